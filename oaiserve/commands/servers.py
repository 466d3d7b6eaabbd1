"""The servers of this user on this machine, each of which keeps a small file while it runs.

A server holds a lock on its file, which the system releases when the process ends, however that happens. So a file
without a lock belongs to a server that has ended.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

import msgspec

from oaiserve.errors import StartupError
from oaiserve.storage import private
from oaiserve.storage.private import NotPrivate, cache_folder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningServer:
    url: str
    model: str  # the name that clients use
    pid: int
    since: float  # Unix time
    host: str  # Hosts may share the folder, but only this one reaches the address.


@contextmanager
def announced(url: str, model: str) -> Iterator[None]:
    """Keep this server's file during the `with` block. If it cannot be written, `running` does not find the server."""
    server = RunningServer(url, model, os.getpid(), time.time(), socket.gethostname())
    with ExitStack() as stack:
        try:
            private.make_folder(_folder())
            file = stack.enter_context(NamedTemporaryFile("w", dir=_folder(), prefix=".", suffix=".json", delete=False))
            fcntl.flock(file, fcntl.LOCK_EX)
            json.dump(asdict(server), file)
            file.flush()
            path = _folder() / Path(file.name).name.removeprefix(".")
            os.replace(file.name, path)  # Readers see the complete file from now on.
            stack.callback(path.unlink, missing_ok=True)
        except OSError as error:
            log.debug("'oaiserve ps' will not find this server: %s", error)
        yield


def running() -> list[RunningServer]:
    """Return the servers that run, newest first. Raises StartupError if others could have written their files."""
    servers = []
    try:
        for path in private.verified(_folder()).glob("[!.]*.json"):
            with suppress(OSError, RecursionError, ValueError), path.open() as file:  # no longer there, or damaged
                if not _is_held(file.fileno()):
                    path.unlink()
                    continue
                server = msgspec.json.decode(file.read(), type=RunningServer)
                if server.host == socket.gethostname():
                    servers.append(server)
    except (FileNotFoundError, NotADirectoryError):
        pass  # No server has run yet.
    except NotPrivate as error:
        raise StartupError(f"The list of servers cannot be trusted: {error}.") from error
    return sorted(servers, key=lambda server: -server.since)


def newest() -> RunningServer:
    """Return the server that started last, which commands use without --url. Raises StartupError if no server
    runs."""
    servers = running()
    if not servers:
        raise StartupError("No server is running here. Start one, as in 'oaiserve serve demo', or give --url.")
    return servers[0]


def _is_held(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _folder() -> Path:
    return cache_folder() / "servers"
