"""A forked child has the command line, environment, folder, streams, process group and end of a new process."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import forking

pytestmark = pytest.mark.skipif(not forking.CAN_FORK, reason="the fork server needs Linux")
BUSY_SECONDS = 0.1
# In place of oaiserve's command line.
ENDS = f"""
import os, sys, time

is_leader = os.getpgrp() == os.getpid()
print(sys.argv, sys.path[0], __name__, os.getcwd(), os.environ["OAISERVE_A"], sys.stdin.read(), is_leader)
print("an error", file=sys.stderr)
while time.process_time() < {BUSY_SECONDS}:
    pass
sys.exit(3)
"""
WAITS = """
import signal

print("ready", flush=True)
signal.pause()
"""
Run = tuple[int, bytes]


@pytest.fixture(scope="module")
def server() -> forking.ForkServer:
    return forking.ForkServer(os.environ, preloaded=())


def run(start: Any, folder: Path, program: str) -> Run:
    """Run a program, which gets a SIGTERM if it waits. Return its exit code and its output."""
    package = folder / "oaiserve"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(program)
    env = os.environ | {"OAISERVE_A": "1"}
    reading, writing = os.pipe()
    with open(reading, "rb") as output:
        with open(writing, "wb") as stream:
            process = start(
                [*forking.SERVER, "serve", "a model"],
                stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=env, cwd=folder, process_group=0,
            )  # fmt: skip
        first = output.readline()
        if program == WAITS:
            assert process.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0)
            os.killpg(process.pid, signal.SIGTERM)
        found = process.wait(), first + output.read()
    process.terminate()  # changes nothing anymore
    assert process.poll() == found[0]
    return found


@pytest.mark.parametrize(("program", "code"), [(ENDS, 3), (WAITS, -signal.SIGTERM)], ids=["ends", "waits"])
def test_a_fork_ends_and_says_what_a_new_process_does(
    program: str, code: int, server: forking.ForkServer, tmp_path: Path
) -> None:
    before_seconds = forking.cpu_seconds
    forked = run(partial(forking.start, server=server), tmp_path, program)
    assert forked == run(subprocess.Popen, tmp_path, program)
    assert forked[0] == code
    assert (forking.cpu_seconds - before_seconds >= BUSY_SECONDS / 2) is (program == ENDS)


@pytest.mark.parametrize(
    ("command", "variables"),
    [(forking.SERVER, {"LANG": "another"}), ((sys.executable, "-P", "-m", "oaiserve"), {})],
    ids=["a variable that imports may read", "other flags of Python"],
)
def test_what_a_fork_would_not_have_starts_a_new_process(
    command: tuple[str, ...], variables: dict[str, str], server: forking.ForkServer, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = forking.start(
            [*command, "--version"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | variables, cwd=tmp_path,
            process_group=0, server=server,
        )  # fmt: skip
        process.kill()
        process.wait()
    assert isinstance(process, subprocess.Popen)


def test_a_fork_server_ends_with_the_process_that_started_it_and_leaves_no_files() -> None:
    code = "import os; from tests.forking import ForkServer; print(ForkServer({}, ()).address, flush=True); os._exit(0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=forking.ROOT)
    # The fork server has the same standard error, so it has ended when there is no more of it.
    assert (done.returncode, done.stderr) == (0, "")
    folder = Path(done.stdout.strip()).parent
    assert folder.name.startswith("oaiserve-forks-")
    assert not folder.exists()
