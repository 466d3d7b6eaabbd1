"""Runs sections side by side, each in a process of its own, within a time limit. No torch.

A section that fails, hangs or dies does not disturb the others, and its result reports how it ended.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tools.gpu.sections import Section
from tools.server_process import KILL_LIMIT_SECONDS, stop_group

LAST_LINES = 15
LEAST_SECONDS = 10  # a section that has less does not begin

# Makes the command of a section, given the file for its result and its limit in seconds.
Command = Callable[[Section, Path, float], Sequence[str]]


def run_all(
    sections: Sequence[Section], command: Command, folder: Path, budget_seconds: float, at_once: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and results as sections end. They begin in their order, as many at once as are given. Once the budget
    is used up, those that run are ended, and the others are left out, with a result that reports it."""
    give_up = time.monotonic() + budget_seconds

    def result(section: Section) -> dict[str, Any]:
        left_seconds = give_up - time.monotonic()
        if left_seconds < LEAST_SECONDS:
            problem = f"{max(0.0, left_seconds):.0f} s were left of the {budget_seconds:.0f} s for all sections."
            return {"status": "left out", "problem": problem}
        return run_one(section, command, folder, min(section.limit_seconds, left_seconds))

    with ThreadPoolExecutor(at_once) as pool:
        running = {pool.submit(result, section): section.name for section in sections}
        for done in as_completed(running):
            yield running[done], done.result()


def run_one(section: Section, command: Command, folder: Path, limit_seconds: float) -> dict[str, Any]:
    """Return the section's results when it ended, with `status`, `seconds` and, unless it is done, `problem`."""
    out = folder / f"{section.name}.json"
    log = folder / f"{section.name}.log"
    out.unlink(missing_ok=True)
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command(section, out, limit_seconds), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = "done" if (code := process.wait(limit_seconds)) == 0 else f"broke with exit code {code}"
        except subprocess.TimeoutExpired:
            status = f"ended after {limit_seconds:.0f} s, its limit"
        finally:
            stop_group(process, signal.SIGKILL, KILL_LIMIT_SECONDS)
    result: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - started, 1)}
    if status != "done":
        result["problem"] = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
    return result | (json.loads(out.read_text()) if out.exists() else {})
