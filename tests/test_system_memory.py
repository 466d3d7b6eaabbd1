"""Tests that memory is kept for what comes next, and given back, by what the system says about a process of its own."""

import platform
import subprocess
import sys

import pytest

from oaiserve import system_memory

# Counts the pages that the system has to find while eight megabytes are copied, with and without having taken them.
COUNT = """
import resource
from oaiserve.system_memory import give_back, keep_freed, take

def faults(work):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

content = bytes(8 * 2**20)
keep_freed()
unprepared = faults(lambda: bytearray(content))
give_back()
take(len(content))
prepared = faults(lambda: bytearray(content))
give_back()
given_back = faults(lambda: bytearray(content))
print(unprepared, prepared, given_back)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it does nothing without glibc")
def test_memory_that_was_taken_needs_no_pages_until_it_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    unprepared, prepared, given_back = map(int, done.stdout.split())
    assert unprepared > 1000
    assert prepared < 100
    assert given_back > 1000


def test_without_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_memory, "_libc", None)
    system_memory.keep_freed()
    system_memory.take(2**20)
    system_memory.give_back()
