"""`LinkedProcess`: a child of this process, with a socket to it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from signal import Signals

from oaiserve.interpreter import child_environment

GOODBYE_SECONDS = 2.0  # time for the process to end after its link has ended


class LinkedProcess:
    """A Python program whose first arguments are file descriptors: its end of the socket, then those in `passed`.

    It has a session of its own, so Ctrl-C reaches only this process.
    """

    def __init__(
        self,
        program: Sequence[str],
        names: Sequence[str],
        *,
        passed: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`names` are further arguments, which `ps` shows. `environment` is added to the variables of
        `child_environment`."""
        self.socket, its_own = socket.socketpair()
        with its_own:
            descriptors = (its_own.fileno(), *passed)
            self._process = subprocess.Popen(
                [sys.executable, *program, *map(str, descriptors), *names],
                env={**child_environment(), **(environment or {})},
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def ended(self) -> str:
        """Wait until the process has ended, and return how."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GOODBYE_SECONDS)
        self._process.kill()
        code = self._process.wait()
        return f"by {Signals(-code).name}" if code < 0 else f"with exit code {code}"
