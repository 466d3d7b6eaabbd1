"""A start whose slow step is a test's: what it prints meanwhile."""

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.live import clean_environment, serve_process

# A way to start that declines when the test has written to a pipe.
SLOW = """
from oaiserve.plugin import Plugin
from oaiserve.plugin.parts import InnerParts


class Slow:
    name = "slowly"

    def accepts(self, request):
        with request.times.part("a slow step"), open({pipe!r}) as opened:
            opened.read()
        return "it is only slow"


plugin = Plugin(name="slow", inner=InnerParts(starts=lambda: [Slow()]))
"""


@pytest.mark.parametrize("engine_process", ["off", "on"])
def test_a_start_says_which_step_takes_so_long(engine_process: str, small_model: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    plugin = tmp_path / "slow.py"
    plugin.write_text(SLOW.format(pipe=str(pipe)))
    command = [sys.executable, "-m", "oaiserve", "serve", str(small_model), "--port", "0", "--plugin", str(plugin)]
    command += ["--log-format", "console", "--engine-process", engine_process]
    command += ["--served-model-name", "slow-one"]
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=clean_environment())
        )
        stack.callback(process.kill)  # A failed test must not wait for the step.
        assert process.stderr is not None
        lines = iter(process.stderr)
        first = next(line for line in lines if "Loading" in line)
        slow = next(line for line in lines if "a slow step" in line)  # other steps may be slow, too
        with pipe.open("w"):
            pass  # so that the step ends
        title = next(line for line in lines if line.startswith("oaiserve"))
        process.send_signal(signal.SIGTERM)
        process.wait()
    assert first.rstrip().endswith("Loading slow-one ...")
    assert re.search(r"Loading slow-one: a slow step \(\d+ s\)$", slow.rstrip())
    assert "serves slow-one at http://127.0.0.1:" in title
    assert process.returncode == 0


def test_threads_of_plain_pytorch_sleep_while_they_wait(small_model: Path, tmp_path: Path) -> None:
    """A thread that spins would take its core from the thread that it waits for, on a machine with other work."""
    log_file = tmp_path / "log"
    reports = {"OMP_DISPLAY_ENV": "verbose"}  # OpenMP then writes its settings when torch loads it
    with serve_process(str(small_model), log_file, "--no-compile", env=reports):
        pass
    assert "GOMP_SPINCOUNT = '0'" in log_file.read_text()
