"""Replicas on a real cluster of Ray with two nodes; `on_a_cluster.py` has the checks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.deploy.paths import ROOT

pytest.importorskip("ray", reason="not installed: oaiserve[ray]")


def test_replicas_serve_and_survive_on_a_cluster() -> None:
    command = [sys.executable, "-m", "tests.scale.on_a_cluster"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
