"""Ctrl-C ends every command quietly, also while it is still being imported."""

import signal
import subprocess
import sys
import tomllib

import pytest

from tests.deploy.paths import ROOT

ENTRY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["oaiserve"]
# Sends Ctrl-C to the process itself at the import of one module, which no other process could time.
PROGRAM = """
import os, signal, sys
from importlib import import_module

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

module = sys.argv.pop(1)
home, _, function = sys.argv.pop(1).partition(":")
sys.meta_path.insert(0, Interrupt())
code = getattr(import_module(home), function)()
sys.exit(f"{module} was not imported, or Ctrl-C was lost" if code != 130 else code)
"""


def interrupted(module: str, command: list[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, module, ENTRY, *command],
        capture_output=True,
        # A shell that runs the tests in the background ignores Ctrl-C, and processes inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("oaiserve.cli", ["--version"]),
        ("oaiserve.config", ["serve", "demo"]),
        pytest.param("oaiserve.plugins.pages", ["serve", "demo"], marks=pytest.mark.plugin("pages")),
        ("oaiserve.commands.doctor", ["doctor"]),
        ("oaiserve.checkpoints.demo", ["pull", "demo"]),
        ("loadtest", ["bench", "run", "--url", "http://127.0.0.1:9"]),
        ("loadtest.http_target", ["bench", "run", "--url", "http://127.0.0.1:9"]),
    ],
)
def test_interrupt_at_an_import_ends_the_command_without_a_traceback(module: str, command: list[str]) -> None:
    done = interrupted(module, command)
    assert (done.stdout, done.stderr) == (b"", b"")
    assert done.returncode in (-signal.SIGINT, 130)  # Shells report both as 130.


def test_interrupt_during_the_import_of_torch_ends_the_process_whatever_its_callbacks_ignore() -> None:
    done = interrupted("torch", ["doctor"])
    assert done.stderr == b""
    assert done.returncode == -signal.SIGINT


def test_interrupt_that_is_ignored_stays_ignored() -> None:
    done = subprocess.run(
        [
            "sh",
            "-c",
            'trap "" INT; exec "$@"',
            "sh",
            sys.executable,
            "-c",
            PROGRAM,
            "oaiserve.config",
            ENTRY,
            "--version",
        ],
        capture_output=True,
        text=True,
    )
    assert done.stderr == "oaiserve.config was not imported, or Ctrl-C was lost\n"
    assert done.returncode == 1
