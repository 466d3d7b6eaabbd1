"""The process of one model: a server on a loopback port, which gets its settings and its socket from here."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from signal import SIGTERM, Signals

from oaiserve.config import Config
from oaiserve.errors import StartupError
from oaiserve.scale.gateway.upstream import Address

READY = b"+"


class ModelProcess:
    """A process that loads one model, and then serves it until `end`."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        self.address = Address("127.0.0.1", port, f"127.0.0.1:{port}")
        self._process = process
        self._reader, self._writer = reader, writer  # the other process ends when this end is closed

    @classmethod
    async def start(cls, config: Config) -> ModelProcess:
        """Start the process, which ends by itself when this one has ended."""
        link, its_link = socket.socketpair()
        listening = socket.socket()
        with its_link, listening:
            listening.bind(("127.0.0.1", 0))
            files = (its_link.fileno(), listening.fileno())
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "oaiserve", "model-process", *map(str, files), config.model_name),
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                pass_fds=files,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C reaches this process only
            )
            port = listening.getsockname()[1]
        reader, writer = await asyncio.open_connection(sock=link)
        writer.write(pickle.dumps(config))
        return cls(process, reader, writer, port)

    async def ready(self) -> None:
        """Wait until it serves. Raises StartupError if it has ended before."""
        if await self._reader.read(1) != READY:
            await self._process.wait()
            raise StartupError(f"Its process has ended {self.how_ended}.")

    async def ended(self) -> None:
        await self._process.wait()

    @property
    def how_ended(self) -> str:
        """Say how the process has ended."""
        code = self._process.returncode
        return f"by {Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"

    @property
    def num_bytes(self) -> int:
        """Return the memory of the process: what it alone has, and its share of what it has in common with others."""
        lines = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))

    async def end(self, limit_seconds: float) -> None:
        """End the process in order, or kill it after the limit."""
        if self._process.returncode is None:
            self._process.send_signal(SIGTERM)
        try:
            async with asyncio.timeout(limit_seconds):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._writer.close()


def run(arguments: list[str], serve: Callable[[Config, socket.socket, Callable[[], None]], int]) -> int:
    """Serve one model in this process, with the settings from the process that started it; return the exit code.

    The arguments are the descriptors of the link to that process and of the socket, and the name, for `ps`."""
    link, listening = (socket.socket(fileno=int(number)) for number in arguments[:2])
    with link.makefile("rb") as file:
        config: Config = pickle.load(file)  # only the process that started this one has the other end

    def end_with_the_parent() -> None:
        link.recv(1)  # which sends nothing more
        os.kill(os.getpid(), SIGTERM)

    threading.Thread(target=end_with_the_parent, daemon=True).start()
    return serve(config, listening, lambda: link.sendall(READY))
