"""A compiler, and the processes that it starts, end with the process that waits for them. The compilers are scripts."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from oaiserve.engine.executors.native.compiler_process import compiler_process

LIMIT_SECONDS = 60.0
# As g++ does, it starts another process. Both hold the pipe open that is given as the first argument.
COMPILER = 'exec 3> "$0"; echo began >&3; sleep 600; echo ended >&3'


def read_part(pipe: int) -> bytes:
    """Return the next bytes of a pipe: b"" at its end, when no process holds the other side."""
    readable, _, _ = select.select([pipe], [], [], LIMIT_SECONDS)
    assert readable, "a compiler still runs"
    return os.read(pipe, 100)


@pytest.mark.parametrize("send", [os.kill, os.killpg])  # A terminal and `timeout` send signals to the whole group.
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_compiler_ends_with_a_server_that_a_signal_ends(
    tmp_path: Path, number: signal.Signals, send: Callable[[int, int], None]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    code = (
        "import signal, sys; from oaiserve.engine.executors.native.compiler_process import compiler_process\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)  # as while a model loads\n"
        "with compiler_process(sys.argv[1:]) as process: process.wait()"
    )
    command = ["sh", "-c", COMPILER, str(tmp_path / "pipe")]
    with subprocess.Popen([sys.executable, "-c", code, *command], process_group=0) as server:
        pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)  # to wait with a limit
        try:
            assert read_part(pipe) == b"began\n"
            send(server.pid, number)
            assert read_part(pipe) == b""
        finally:
            os.close(pipe)
            server.kill()
    assert server.returncode == -number


def test_a_compiler_ends_with_the_block_that_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with compiler_process(["sh", "-c", COMPILER, str(tmp_path / "pipe")]):
        pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)  # to wait with a limit
        assert read_part(pipe) == b"began\n"
    assert read_part(pipe) == b""
    os.close(pipe)


def test_a_process_that_a_compiler_starts_while_it_ends_is_ended(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    # g++ blocks signals while it starts a process, so one may begin after the signal to the group.
    code = (
        "import os, signal, subprocess, sys\n"
        "pipe = os.open(sys.argv[1], os.O_WRONLY)\n"
        "def start_another(*_):\n"
        "    subprocess.Popen(['sleep', '600'], pass_fds=[pipe])\n"
        "    os._exit(1)\n"
        "signal.signal(signal.SIGTERM, start_another)\n"
        "os.write(pipe, b'began\\n')\n"
        "while True: signal.pause()"
    )
    with compiler_process([sys.executable, "-c", code, str(tmp_path / "pipe")]):
        pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)  # to wait with a limit
        assert read_part(pipe) == b"began\n"
    assert read_part(pipe) == b""
    os.close(pipe)


def test_messages_and_exit_code_are_those_of_the_compiler() -> None:
    with compiler_process(["sh", "-c", "echo no such thing >&2; exit 3"]) as process:
        assert process.communicate() == (None, "no such thing\n")
    assert process.returncode == 3
