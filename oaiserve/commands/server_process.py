"""`ServerProcess`: a server in a child process, which gets its settings and its listening socket from its parent."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from signal import SIGTERM, Signals

from oaiserve.config import Config, OptionError
from oaiserve.errors import StartupError
from oaiserve.explain.commands import settings_in
from oaiserve.interpreter import child_environment
from oaiserve.plugin_loading import Found, find, tables_in

READY = b"+"
MOST_REASON_BYTES = 4096  # maximum length of a start-up error that is passed on
GOODBYE_SECONDS = 8.0  # time after the drain timeout to cut off requests and export telemetry


class ServerProcess:
    """A process that loads one model, and then serves it until `end`."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer  # The other process ends when this end of the link is closed.

    @classmethod
    async def start(cls, config: Config, listening: socket.socket) -> ServerProcess:
        """Start the process and pass it the bound socket. It ends by itself when this process ends."""
        link, its_link = socket.socketpair()
        with its_link, listening, tempfile.TemporaryFile() as settings:
            # The process must have loaded the plug-ins when it reads their settings.
            pickle.dump((config.server.plugin, config.file), settings)
            pickle.dump(config, settings)
            settings.flush()
            files = (its_link.fileno(), listening.fileno(), settings.fileno())
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "oaiserve", "model-process", *map(str, files), config.model_name),
                env=child_environment(),
                pass_fds=files,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C then reaches only this process.
            )
        reader, writer = await asyncio.open_connection(sock=link)
        return cls(process, reader, writer)

    async def ready(self) -> None:
        """Wait until the process serves. Raises StartupError if it ends first, with the reason that it reported, if
        any."""
        if (reason := await self._reader.read(1)) != READY:
            reason += await self._reader.read()
            await self.ended()
            raise StartupError(reason.decode(errors="replace") or f"Its process has ended {self.how_ended}.")

    async def ended(self) -> None:
        await self._process.wait()
        self._writer.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    @property
    def how_ended(self) -> str:
        code = self._process.returncode
        return f"by {Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def end(self, drain_seconds: float) -> None:
        """Shut the process down, or kill it if that takes longer than its drain timeout and GOODBYE_SECONDS."""
        if self._process.returncode is None:
            self._process.send_signal(SIGTERM)
        try:
            async with asyncio.timeout(drain_seconds + GOODBYE_SECONDS):
                await self.ended()
        except TimeoutError:
            self.kill()
            await self.ended()


def run(arguments: list[str], serve: Callable[[Config, socket.socket, Found, Callable[[], None]], int]) -> int:
    """Serve one model in this process, with the settings of the process that started it; return the exit code.

    If it cannot start, the other process gets the reason. The arguments are the file descriptors of the link to that
    process, of the listening socket and of the settings, and the model's name, for `ps`."""
    link, listening = (socket.socket(fileno=int(number)) for number in arguments[:2])

    def end_with_the_parent() -> None:
        link.recv(1)  # The parent sends nothing: this returns when its end is closed.
        os.kill(os.getpid(), SIGTERM)

    threading.Thread(target=end_with_the_parent, daemon=True).start()
    try:
        with open(int(arguments[2]), "rb", closefd=False) as file:  # The file is read again if the server restarts.
            file.seek(0)
            modules, path = pickle.load(file)  # No other process can write this file, which has no name.
            found = find(modules, {} if path is None else tables_in(settings_in(path)))
            config: Config = pickle.load(file)
        return serve(config, listening, found, lambda: link.sendall(READY))
    except (OptionError, StartupError) as error:
        link.sendall(" ".join(str(error).split()).encode()[:MOST_REASON_BYTES])
        return 2
