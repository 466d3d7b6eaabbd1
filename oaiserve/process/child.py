"""`ChildProcess`: an engine process as a child of this one, which ends when this one does."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import suppress
from signal import Signals

from oaiserve.interpreter import child_environment
from oaiserve.process.link import SocketLink
from oaiserve.process.messages import Start, ToFront
from oaiserve.process.placement import VISIBLE_GPUS
from oaiserve.process.plain_data import decoder
from oaiserve.runtime import Runtime

PROGRAM: tuple[str, ...] = ("-m", "oaiserve")  # A measurement has another one, with an engine that computes nothing.
COMMAND = "engine-process"  # hidden, of the command line
GOODBYE_SECONDS = 2.0  # from the end of the link to that of the process


class ChildProcess:
    """An engine process, which has been started and loads its model."""

    def __init__(self, start: Start, runtime: Runtime, gpu: str = "") -> None:
        """Without a `gpu`, it sees those that this process sees."""
        ours, its_own = socket.socketpair()
        with its_own:
            self._process = subprocess.Popen(
                # The names are for `ps`.
                [
                    *(sys.executable, *PROGRAM, COMMAND, str(its_own.fileno()), start.model),
                    *filter(None, [start.replica]),
                ],
                env=child_environment() | ({VISIBLE_GPUS: gpu} if gpu else {}),
                pass_fds=(its_own.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C then reaches only this process.
            )
        self.pid = self._process.pid
        self.link = SocketLink(ours, decoder(ToFront), "engine", runtime)
        self.link.send(start)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GOODBYE_SECONDS)
        self._process.kill()
        code = self._process.wait()
        return f"by {Signals(-code).name}" if code < 0 else f"with exit code {code}"
