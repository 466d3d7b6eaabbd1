"""The table of CPU seconds has those of tests and of their children, also from other processes of tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BUSY = """
import subprocess, sys, time

LOOP = "import time\\nwhile time.process_time() < 0.3: pass"


def test_busy():
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass


def test_busy_child():
    subprocess.run([sys.executable, "-c", LOOP], check=True)
"""


def run(folder: Path, *flags: str) -> str:
    """Run the tests of a folder with the plug-in, and return the output."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.cpu", *flags, "--config-file", os.devnull]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), "-p", "no:cacheprovider", str(folder)],
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


def test_a_crashed_worker_process_is_an_ordinary_failure(tmp_path: Path) -> None:
    (tmp_path / "test_crash.py").write_text("import os\n\n\ndef test_crash():\n    os._exit(3)\n")
    said = run(tmp_path, "-p", "xdist", "-n", "1", "--max-worker-restart", "0")
    assert "crashed while running" in said
    assert "INTERNALERROR" not in said


@pytest.mark.parametrize("flags", [(), ("-p", "xdist", "-n", "1")], ids=" ".join)
def test_seconds_are_those_of_tests_and_children(tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "test_busy.py").write_text(BUSY)
    (tmp_path / "test_idle.py").write_text("def test_idle():\n    pass\n")
    said = run(tmp_path, *flags)
    rows = re.findall(r"^ +([\d.]+) +([\d.]+)  (\S+)$", said, re.MULTILINE)
    found = {name: (float(own), float(of_children)) for own, of_children, name in rows}
    assert [*found] == ["all", "test_busy.py", "test_idle.py"]
    own, of_children = found["test_busy.py"]
    assert 0.2 <= own < 2
    assert 0.3 <= of_children < 2
    assert sum(found["test_idle.py"]) < 0.2
