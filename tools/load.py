"""Runs `oaiserve bench run` on a running server, in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def run_bench(url: str, options: dict[str, Any], *flags: str) -> dict[str, Any]:
    """Run `oaiserve bench run` and return the point of its report. Ends the program if requests failed."""
    words = [str(word) for option in options.items() for word in option]
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "loadtest", "run", "--url", url, "--json", str(report), "--no-calibrate"]
        subprocess.run([*command, *flags, *words], check=True, stdout=subprocess.DEVNULL)
        (point,) = json.loads(report.read_text())["points"]
    if errors := point["runs"][0]["metrics"]["errors"]:
        sys.exit(f"Requests failed: {errors}")
    return point  # type: ignore[no-any-return]
