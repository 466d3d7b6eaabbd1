"""Runs `oaiserve bench run` on a running server, in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LIMIT_SECONDS = 900


class RunFailed(Exception):
    """Requests of a run failed, or it did not end in time."""


def run_bench(url: str, options: dict[str, Any], *flags: str, most_failed: float = 0.0) -> dict[str, Any]:
    """Run `oaiserve bench run` and return the point of its report. Raises RunFailed if more than this share of the
    requests failed."""
    with_seed = {"--seed": 0} | options  # the same prompts for each server
    words = [str(word) for option in with_seed.items() for word in option]
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "loadtest", "run", "--json", str(report)]
        command += ["--url", url, "--no-calibrate", *flags, *words]
        try:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_SECONDS)
        except subprocess.SubprocessError as error:
            raise RunFailed(str(error)) from error
        (point,) = json.loads(report.read_text())["points"]
    metrics = point["runs"][0]["metrics"]
    if sum(metrics["errors"].values()) > most_failed * metrics["num_requests"]:
        raise RunFailed(f"Requests failed: {metrics['errors']} {metrics['error_messages']}")
    return point  # type: ignore[no-any-return]
