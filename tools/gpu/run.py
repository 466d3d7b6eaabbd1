"""Runs each section in a process of its own, within a time limit. No torch.

A section that fails, hangs or dies does not disturb the others, and its result reports how it ended.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from tools.gpu.sections import Section
from tools.server_process import KILL_LIMIT_SECONDS, stop_group

LAST_LINES = 15
LEAST_SECONDS = 20  # a section that has less does not begin

# Makes the command of a section, given the file for its result and its limit in seconds.
Command = Callable[[Section, Path, float], Sequence[str]]


def run_all(
    sections: Sequence[Section], command: Command, folder: Path, budget_seconds: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and results as sections end. Neighbours that are checks run side by side, unless they need to be
    alone. Once the budget is used up, the other sections are left out, with a result that reports it."""
    give_up = time.monotonic() + budget_seconds
    for are_checks, group in groupby(sections, key=lambda section: section.is_check and not section.is_alone):
        for together in [list(group)] if are_checks else [[section] for section in group]:
            left_seconds = give_up - time.monotonic()
            if left_seconds < LEAST_SECONDS:
                problem = f"{max(0.0, left_seconds):.0f} s were left of the {budget_seconds:.0f} s for all sections."
                yield from ((section.name, {"status": "left out", "problem": problem}) for section in together)
                continue
            with ThreadPoolExecutor(len(together)) as pool:
                limits = [min(section.limit_seconds, left_seconds) for section in together]
                results = pool.map(lambda section, limit: run_one(section, command, folder, limit), together, limits)
                yield from zip((section.name for section in together), results, strict=True)


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
