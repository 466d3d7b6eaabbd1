"""What Linux says of a process is what the process knows of itself."""

from __future__ import annotations

import os
import subprocess
import sys
from time import process_time

from oaiserve.telemetry.metrics import numbers_of


def test_the_numbers_are_those_of_the_process() -> None:
    before, now, after = process_time(), numbers_of(os.getpid()), process_time()
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert before - 2 * tick <= now["process_cpu_seconds"] <= after + 2 * tick
    assert now["process_resident_memory_bytes"] > 2**20
    assert now["process_open_fds"] >= 3


def test_a_process_that_is_gone_has_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert numbers_of(process.pid) == {}
