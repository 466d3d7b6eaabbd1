"""Tests that memory is kept for what comes next, and given back, by what the system says about a process of its own."""

import errno
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from oaiserve import system_memory
from oaiserve.system_memory import container_bytes, limit_bytes, shortage
from tests.system_files import write_files

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


# Six threads at a time allocate memory. glibc writes a paragraph about each arena.
ARENAS = """
import ctypes
from threading import Barrier, Thread
from oaiserve.system_memory import share_arenas

share_arenas()
libc = ctypes.CDLL(None)
all_are_there = Barrier(6)

def allocate():
    libc.malloc(1000)
    all_are_there.wait()

threads = [Thread(target=allocate) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.malloc_stats()
"""
needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it does nothing without glibc")


@needs_glibc
@pytest.mark.parametrize(("environment", "expected"), [({}, 2), ({"MALLOC_ARENA_MAX": "4"}, 4)])
def test_threads_share_arenas_unless_the_environment_says_how_many(environment: dict[str, str], expected: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"} | environment
    done = subprocess.run([sys.executable, "-c", ARENAS], capture_output=True, text=True, check=True, env=environment)
    assert done.stderr.count("Arena ") == expected


@needs_glibc
def test_memory_that_was_taken_needs_no_pages_until_it_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    unprepared, prepared, given_back = map(int, done.stdout.split())
    assert unprepared > 1000
    assert prepared < 100
    assert given_back > 1000


def test_without_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_memory, "_libc", None)
    system_memory.share_arenas()
    system_memory.keep_freed()
    system_memory.take(2**20)
    system_memory.give_back()


def test_without_a_cgroup_that_has_a_limit_nothing_is_left_out(tmp_path: Path) -> None:
    assert container_bytes(tmp_path) is None
    write_files(tmp_path, {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"})
    assert container_bytes(tmp_path) is None


def test_the_narrowest_of_nested_cgroups_counts_without_the_files_that_the_system_can_drop(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/memory.max": "1000\n",
            "sys/fs/cgroup/outer/memory.current": "600\n",
            "sys/fs/cgroup/outer/memory.stat": "anon 300\nactive_file 100\ninactive_file 200\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/inner/memory.high": "900\n",
            "sys/fs/cgroup/outer/inner/memory.current": "100\n",
        },
    )
    assert container_bytes(tmp_path) == 700
    assert limit_bytes(tmp_path) == 900


@pytest.mark.parametrize("folder", ["sys/fs/cgroup/memory/docker/1", "sys/fs/cgroup/memory"])
def test_cgroups_of_the_first_version_are_read_from_outside_and_from_within_a_container(
    folder: str, tmp_path: Path
) -> None:
    write_files(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/1\n1:cpu,cpuacct:/docker/1\n0::/\n",
            f"{folder}/memory.limit_in_bytes": "1000\n",
            f"{folder}/memory.usage_in_bytes": "500\n",
            f"{folder}/memory.stat": "total_inactive_file 50\n",
        },
    )
    assert container_bytes(tmp_path) == 550
    assert limit_bytes(tmp_path) == 1000


def test_without_a_container_the_limit_is_the_memory_of_the_machine(tmp_path: Path) -> None:
    write_files(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"})
    assert limit_bytes(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_all_free_memory_is_available_where_nothing_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_memory, "container_bytes", lambda: None)
    monkeypatch.setattr(system_memory, "address_space_bytes", lambda: None)
    monkeypatch.setattr(system_memory, "free_bytes", lambda: 700)
    assert system_memory.available_bytes() == 700


# Limits the address space of a process of its own, and prints what is left of it, and how a failure is reported.
LIMITED = """
import resource
from oaiserve.system_memory import address_space_bytes, available_bytes, shortage
assert address_space_bytes() is None
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
try:
    bytearray(2**30)
except MemoryError as error:
    print(address_space_bytes(), available_bytes(), shortage(error))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a process is read from /proc")
def test_a_limit_of_the_address_space_is_what_a_shortage_of_memory_names() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    left, available, sentence = done.stdout.split(maxsplit=2)
    assert 0 <= int(left) - int(available) < 2**20, "They differ by what Python allocates between the two."
    assert 0 < int(left) < 2**30
    assert "this process may have 1.0 GiB of address space (ulimit -v)" in sentence


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_errors_of_libraries_that_get_no_memory_are_a_shortage_of_it(error: Exception) -> None:
    assert shortage(error) is not None


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "No such file"), RuntimeError("CUDA out of memory")])
def test_other_errors_are_none_of_memory(error: Exception) -> None:
    assert shortage(error) is None
