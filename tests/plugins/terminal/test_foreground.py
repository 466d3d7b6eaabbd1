"""A program in the foreground ends with the process that has started it, which has its exit code."""

import os
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.agents.scripted import ScriptedServer
from tests.commands.terminal import Terminal, terminal
from tests.waiting import LIMIT_SECONDS

# Runs a program that first runs its argument, for example to set signal handlers, then prints its process id and waits.
# The other argument is the time that it has to end.
RUN = """\
import sys
from oaiserve.plugins.terminal import foreground
foreground.GRACE_SECONDS = float(sys.argv[2])
program = "import os, signal, sys, time; " + sys.argv[1] + "; print(os.getpid(), flush=True); time.sleep(600)"
sys.exit(foreground.run([sys.executable, "-c", program], {}))
"""
OBEYS = "[signal.signal(number, signal.SIG_DFL) for number in (1, 2, 15)]"  # as none is ignored in a terminal
ENDS_WELL = "[signal.signal(number, lambda *_: sys.exit(5)) for number in (1, 2, 15)]"
IGNORES = "[signal.signal(number, signal.SIG_IGN) for number in (1, 2, 15)]"


@pytest.mark.parametrize(
    ("number", "program"),
    [
        *((number, OBEYS) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)),
        (signal.SIGTERM, ENDS_WELL),
        (signal.SIGINT, IGNORES),
    ],
)
def test_signal_ends_program(number: signal.Signals, program: str) -> None:
    grace_seconds = 0.1 if program == IGNORES else LIMIT_SECONDS
    command = [sys.executable, "-c", RUN, program, str(grace_seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        running = int(process.stdout.readline())
        process.send_signal(number)
        expected = {OBEYS: 128 + number, ENDS_WELL: 5, IGNORES: 128 + signal.SIGKILL}[program]
        assert process.wait(LIMIT_SECONDS) == expected
    with pytest.raises(ProcessLookupError):
        os.kill(running, 0)


def test_ctrl_c_reaches_program_once_and_terminal_is_restored(server: ScriptedServer, tmp_path: Path) -> None:
    stub = tmp_path / "codex"
    stub.write_text(f"#!{sys.executable}\n{WITHOUT_ECHO}")
    stub.chmod(0o755)
    with terminal("launch", "codex", "--url", server.url, PATH=str(tmp_path)) as screen:
        screen.shows("ready")
        assert not echoes(screen)
        screen.types("\x03")
        screen.shows("interrupted 1\n")
        screen.types("\x03")
        screen.shows("interrupted 2\n")
        screen.process.terminate()
        assert screen.process.wait(LIMIT_SECONDS) == 128 + signal.SIGTERM
        assert echoes(screen)


WITHOUT_ECHO = """\
import itertools, signal, termios, time
settings = termios.tcgetattr(0)
settings[3] &= ~termios.ECHO
termios.tcsetattr(0, termios.TCSANOW, settings)
numbers = itertools.count(1)
signal.signal(signal.SIGINT, lambda *_: print("interrupted", next(numbers), flush=True))
print("ready", flush=True)
time.sleep(600)
"""


def echoes(screen: Terminal) -> bool:
    return bool(termios.tcgetattr(screen.master)[3] & termios.ECHO)
