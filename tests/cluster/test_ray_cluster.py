"""Replicas on a real cluster of Ray with two nodes: a replica that is killed costs its own streams only.

The tool that this runs says more: python -m tools.cluster faults
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.paths import ROOT
from tools.cluster.clients import End

pytest.importorskip("ray", reason="not installed: oaiserve[ray]")


def test_streams_survive_the_faults_of_others(tmp_path: Path) -> None:
    file = tmp_path / "faults.json"
    command = [sys.executable, "-m", "tools.cluster", "faults", "--only", "long", "leave", "replica", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    long, leave, killed = json.loads(file.read_text())["faults"]
    assert list(long["answers"]) == [End.WHOLE]
    assert leave["repaired_seconds"] is not None, "what clients have left goes on"
    assert "rejected" not in leave["note"]
    assert killed["repaired_seconds"] is not None, "the replica was not replaced"
    bad = {end: number for end, number in killed["answers"].items() if end != End.WHOLE}
    assert sum(bad.values()) <= 8, "more than the streams that were under way"
    assert bad.keys() <= {End.CUT, End.ERROR, End.ERROR_EVENT}
