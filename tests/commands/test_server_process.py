"""The start of a child process, as far as it needs no model."""

import asyncio
import socket
import sys

import pytest

from oaiserve.commands.server_process import ServerProcess
from oaiserve.errors import StartupError


async def running(code: str) -> tuple[ServerProcess, socket.socket]:
    """Return a process that runs this code, with its end of the link as `link`, and the other end."""
    link, its_link = socket.socketpair()
    number = its_link.fileno()
    begin = f"import signal, socket, sys; link = socket.socket(fileno={number})"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", f"{begin}\n{code}", pass_fds=[number])
    its_link.close()
    return ServerProcess(process, *await asyncio.open_connection(sock=link)), link


async def test_process_that_ends_before_it_is_ready_is_an_error_and_leaves_no_open_link() -> None:
    process, link = await running("sys.exit(3)")
    with pytest.raises(StartupError, match="Its process has ended with exit code 3."):
        await process.ready()
    await asyncio.sleep(0)  # for the event loop to close it
    assert link.fileno() == -1


FAILING_START = """
import pickle, tempfile
from oaiserve.config import Config
from oaiserve.errors import StartupError
from oaiserve.commands.server_process import run

def serve(*_):
    raise StartupError("No such file:\\n'a'")

settings = tempfile.TemporaryFile()
pickle.dump((PLUGINS, None), settings)
pickle.dump(Config("demo"), settings)
settings.flush()
numbers = link.detach(), socket.socket(socket.AF_UNIX).detach(), settings.fileno()
sys.exit(run([*map(str, numbers)], serve))
"""


async def test_reason_why_a_process_cannot_start_is_that_of_the_error() -> None:
    process, _ = await running(FAILING_START.replace("PLUGINS", "()"))
    with pytest.raises(StartupError, match="^No such file: 'a'$"):
        await process.ready()
    assert process.how_ended == "with exit code 2"


async def test_plugin_that_cannot_be_loaded_is_the_reason_why_a_process_cannot_start() -> None:
    process, _ = await running(FAILING_START.replace("PLUGINS", "('no_such_plugin',)"))
    with pytest.raises(StartupError, match="^--plugin is 'no_such_plugin', which cannot be loaded"):
        await process.ready()
    assert process.how_ended == "with exit code 2"


async def test_process_without_a_drain_timeout_still_ends_in_order() -> None:
    code = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(4)); link.sendall(b'+'); signal.pause()"
    process, _ = await running(code)
    await process.ready()
    await process.end(0)
    assert process.how_ended == "with exit code 4"
