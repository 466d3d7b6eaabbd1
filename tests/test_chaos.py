"""The pauses of `make chaos` find a race between threads, and come again with their seed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.chaos import ALL_SECONDS, MOST_SECONDS, Pauses

RACE = """
from threading import Event, Thread

import pytest


@pytest.mark.parametrize("number", range(20))
def test_two_additions_make_two(number):
    total = 0

    def add():
        nonlocal total
        before = total
        Event().set()
        total = before + 1

    threads = [Thread(target=add, name=f"{number} {place}") for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total == 2
"""


TOLD_PAUSES = """
import json
import threading

from tests import chaos

pauses = {}
sleep = chaos.sleep


def told_sleep(seconds):
    pauses.setdefault(threading.current_thread().name, []).append(seconds)
    sleep(seconds)


chaos.sleep = told_sleep


def pytest_terminal_summary(terminalreporter):
    del pauses["MainThread"]  # It also pauses where it waits for the others, which it does not always.
    terminalreporter.write_line(f"PAUSES {json.dumps(pauses, sort_keys=True)}")
"""


def run_with_pauses(folder: Path, seed: int) -> tuple[set[str], dict[str, list[float]], str]:
    """Run the tests of a folder with the pauses of a seed. Return the names of those that failed, the pauses of their
    threads by name, in seconds, and the output."""
    flags = ["--config-file", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider", "-r", "f"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.chaos", *flags, str(folder)],
        env=os.environ | {"CHAOS_SEED": str(seed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    names = re.findall(r"^FAILED .*::(\S+)", done.stdout, re.MULTILINE)
    pauses = re.search(r"^PAUSES (.*)", done.stdout, re.MULTILINE)
    assert pauses is not None
    return set(names), json.loads(pauses[1]), done.stdout


def test_a_race_fails_and_its_threads_pause_as_the_seed_says(tmp_path: Path) -> None:
    (tmp_path / "test_race.py").write_text(RACE)
    (tmp_path / "conftest.py").write_text(TOLD_PAUSES)
    names, pauses, output = run_with_pauses(tmp_path, 1)
    assert names
    assert "chaos: CHAOS_SEED=1" in output
    assert "CHAOS_SEED=1 repeats these pauses." in output
    assert len(pauses) > 5
    # How long a thread really sleeps, and so which tests fail, is also the machine's choice.
    assert run_with_pauses(tmp_path, 1)[1] == pauses
    assert run_with_pauses(tmp_path, 2)[1] != pauses


def drawn(seed: str) -> list[float | None]:
    pauses = Pauses(seed)
    return [pauses.next() for _ in range(10_000)]


def test_a_thread_has_the_same_pauses_with_the_same_seed_and_rests_within_a_bound() -> None:
    seeds = [f"{number} test_a 0.1" for number in range(20)]
    for seed in seeds:
        assert drawn(seed) == drawn(seed)
        assert sum(filter(None, drawn(seed))) < ALL_SECONDS + max(MOST_SECONDS)
    assert len({tuple(drawn(seed)) for seed in seeds}) > 10
