"""Runs pytest, and tries what failed once more, each test alone: python -m tools.retry_failed COMMAND

A test may fail because other processes took the cores, although the product is right. CI counts such tests instead of
hiding them: build/retried.txt has a line for each, and `--total` prints them, and fails above three. More failures in
one run are no accident, so none of them is tried again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAILED = ROOT / ".pytest_cache/v/cache/lastfailed"  # written by pytest: the names of failed tests
RETRIED = ROOT / "build/retried.txt"
MAX_RETRIED = 3
TESTS_FAILED = 1  # pytest's exit status if tests ran to the end and some failed


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Run a command of pytest, and return its exit status, or 0 if each failed test passes when it is tried again."""
    FAILED.unlink(missing_ok=True)
    status = subprocess.run(command, env=env, check=False).returncode
    if status != TESTS_FAILED:
        return status
    names = list(json.loads(FAILED.read_text()))
    if not 0 < len(names) <= MAX_RETRIED:
        print(f"{len(names)} tests failed, and none is tried again: {MAX_RETRIED} may be")
        return status
    RETRIED.parent.mkdir(exist_ok=True)
    with RETRIED.open("a") as retried:
        retried.writelines(f"{name}\n" for name in names)
    for name in names:
        print(f"-- once more, alone: {name}", flush=True)
        again = subprocess.run([sys.executable, "-m", "pytest", name], env=env, check=False).returncode
        if again != 0:
            return again
    return 0


def total() -> int:
    """Print how many tests were tried again, with their names, and return 1 if there were too many."""
    names = RETRIED.read_text().splitlines() if RETRIED.exists() else []
    print(f"retried: {len(names)}", *names, sep="\n  ")
    return 1 if len(names) > MAX_RETRIED else 0


if __name__ == "__main__":
    sys.exit(total() if sys.argv[1:] == ["--total"] else run(sys.argv[1:]))
