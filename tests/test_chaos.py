"""The pauses of `make chaos` find a race between threads, and come again with their seed."""

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

    threads = [Thread(target=add) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total == 2
"""


def failed(folder: Path, seed: int) -> tuple[set[str], str]:
    """Run the tests of a folder with the pauses of a seed. Return the names of those that failed, and the output."""
    flags = ["--config-file", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider", "-r", "f"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.chaos", *flags, str(folder)],
        env=os.environ | {"CHAOS_SEED": str(seed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    names = re.findall(r"^FAILED .*::(\S+)", done.stdout, re.MULTILINE)
    return set(names), done.stdout


def test_a_race_fails_under_some_seed_and_again_under_that_seed(tmp_path: Path) -> None:
    (tmp_path / "test_race.py").write_text(RACE)
    first, output = failed(tmp_path, 1)
    assert first
    assert len(first) < 20
    assert "chaos: CHAOS_SEED=1" in output
    assert "CHAOS_SEED=1 repeats these pauses." in output
    # On a busy machine a thread may sleep for much longer than it should, so some tests may end differently.
    assert any(are_alike(first, failed(tmp_path, 1)[0]) for _ in range(5))
    assert not are_alike(first, failed(tmp_path, 2)[0])


def are_alike(names: set[str], others: set[str]) -> bool:
    return len(names & others) > len(names ^ others)


def drawn(seed: str) -> list[float | None]:
    pauses = Pauses(seed)
    return [pauses.next() for _ in range(10_000)]


def test_a_thread_has_the_same_pauses_with_the_same_seed_and_rests_within_a_bound() -> None:
    seeds = [f"{number} test_a 0.1" for number in range(20)]
    for seed in seeds:
        assert drawn(seed) == drawn(seed)
        assert sum(filter(None, drawn(seed))) < ALL_SECONDS + max(MOST_SECONDS)
    assert len({tuple(drawn(seed)) for seed in seeds}) > 10
