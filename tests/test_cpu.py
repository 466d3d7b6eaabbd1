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


@pytest.mark.parametrize("flags", [(), ("-p", "xdist", "-n", "1")], ids=" ".join)
def test_seconds_are_those_of_tests_and_children(tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "test_busy.py").write_text(BUSY)
    (tmp_path / "test_idle.py").write_text("def test_idle():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.cpu", *flags, "--config-file", os.devnull]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(tmp_path)],
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = re.findall(r"^ +([\d.]+) +([\d.]+)  (\S+)$", done.stdout, re.MULTILINE)
    found = {name: (float(own), float(of_children)) for own, of_children, name in rows}
    assert [*found] == ["all", "test_busy.py", "test_idle.py"]
    own, of_children = found["test_busy.py"]
    assert 0.2 <= own < 2
    assert 0.3 <= of_children < 2
    assert sum(found["test_idle.py"]) < 0.2
