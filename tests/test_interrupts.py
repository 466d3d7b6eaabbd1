"""Ctrl-C ends every command quietly, also while it is still being imported."""

import signal
import subprocess
import sys

import pytest

# Sends Ctrl-C to the process itself at the import of one module, which no other process could time.
PROGRAM = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

module = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupt())
from oaiserve.__main__ import main
code = main()
sys.exit(f"{module} was not imported, or Ctrl-C was lost" if code != 130 else code)
"""


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("oaiserve.cli", ["--version"]),
        ("oaiserve.config", ["serve", "demo"]),
        ("oaiserve.plugins.pages", ["serve", "demo"]),
        ("oaiserve.commands.doctor", ["doctor"]),
        ("oaiserve.checkpoints.demo", ["pull", "demo"]),
        ("loadtest", ["bench", "run", "--url", "http://127.0.0.1:9"]),
        ("loadtest.http_target", ["bench", "run", "--url", "http://127.0.0.1:9"]),
    ],
)
def test_interrupt_at_an_import_ends_the_command_without_a_traceback(module: str, command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, module, *command], capture_output=True, timeout=60)
    assert (done.stdout, done.stderr) == (b"", b"")
    assert done.returncode in (-signal.SIGINT, 130)  # Shells report both as 130.


def test_interrupt_that_is_ignored_stays_ignored() -> None:
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", PROGRAM, "oaiserve.config", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == "oaiserve.config was not imported, or Ctrl-C was lost\n"
    assert done.returncode == 1
