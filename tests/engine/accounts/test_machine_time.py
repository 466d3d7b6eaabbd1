"""The time that a thread did not run is read as Linux tells it, from files of a test."""

import threading
from pathlib import Path

import pytest

from oaiserve.engine.accounts.machine_time import (
    ENOUGH_NS,
    FIND_NS,
    LOOK_NS,
    MOST_VAIN,
    MachineTime,
    throttling_file,
)
from oaiserve.runtime import THREADS
from tests.system_files import write_files

MOST = 10**9


class Tasks:
    """A folder like /proc/self/task, in which the calling thread, and threads of native code, have waited so long."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.own = str(threading.get_native_id())

    def wrote(self, thread: str, ran_ns: int, delay_ns: int) -> None:
        (self.folder / thread).mkdir(exist_ok=True)
        (self.folder / thread / "schedstat").write_text(f"{ran_ns} {delay_ns} 7\n")


@pytest.fixture
def tasks(tmp_path: Path) -> Tasks:
    return Tasks(tmp_path)


def test_the_delay_of_the_calling_thread_is_that_since_the_last_call(tasks: Tasks) -> None:
    tasks.wrote(tasks.own, 500, 1000)
    machine = MachineTime(tasks.folder, page_faults=lambda: 7, clock_ns=THREADS.clock_ns)
    assert machine.delay_ns() == 0
    tasks.wrote(tasks.own, 600, 1234)
    assert machine.delay_ns() == 234
    assert machine.delay_ns() == 0


def test_the_delay_of_native_threads_is_shared_among_those_that_ran(tasks: Tasks) -> None:
    for thread in (tasks.own, "900001", "900002", "900003"):
        tasks.wrote(thread, 1000, 1000)
    machine = MachineTime(tasks.folder, page_faults=lambda: 7, clock_ns=THREADS.clock_ns)
    machine.delay_ns()
    tasks.wrote("900001", 2000, 1000 + 600)
    tasks.wrote("900002", 2000, 1000 + 300)
    tasks.wrote("900003", 1010, 1000 + 900)
    assert machine.more_ns(MOST) == 900 // 3  # two of them, and the engine thread; the third one hardly worked
    assert machine.num_threads == 3
    assert machine.more_ns(MOST) == 0
    tasks.wrote("900001", 3000, 5000)
    assert machine.more_ns(100) == 100


def test_the_threads_that_share_the_work_count_also_while_they_wait_for_cores(tasks: Tasks) -> None:
    for thread in (tasks.own, "900001"):
        tasks.wrote(thread, 0, 0)
    machine = MachineTime(tasks.folder, page_faults=lambda: 7, clock_ns=THREADS.clock_ns)
    machine.delay_ns()
    tasks.wrote(tasks.own, 10 * ENOUGH_NS, 30 * ENOUGH_NS)
    tasks.wrote("900001", 5 * ENOUGH_NS, 25 * ENOUGH_NS)
    machine.delay_ns()
    assert machine.parallelism == 1 + 30 / 40
    tasks.wrote(tasks.own, 10 * ENOUGH_NS + 1, 30 * ENOUGH_NS)
    machine.more_ns(MOST)
    assert machine.parallelism == 1 + 30 / 40, "nobody has worked since then"


def test_a_thread_that_began_later_is_found(tasks: Tasks) -> None:
    now_ns = [2 * FIND_NS]
    tasks.wrote(tasks.own, 1000, 1000)
    machine = MachineTime(tasks.folder, page_faults=lambda: 7, clock_ns=lambda: now_ns[0])
    machine.delay_ns()
    tasks.wrote("900001", 10, 50)
    now_ns[0] += 2 * FIND_NS
    assert machine.delay_ns() == 0
    tasks.wrote("900001", 20, 250)
    assert machine.more_ns(MOST) == 100


def test_threads_that_do_not_work_are_not_looked_at_with_each_question(tasks: Tasks) -> None:
    now_ns = [2 * FIND_NS]
    for thread in (tasks.own, "900001"):
        tasks.wrote(thread, 1000, 1000)
    machine = MachineTime(tasks.folder, page_faults=lambda: 7, clock_ns=lambda: now_ns[0])
    for _ in range(MOST_VAIN):
        machine.delay_ns()
    tasks.wrote("900001", 2000, 1000)
    machine.delay_ns()
    assert machine.num_threads == 1
    now_ns[0] += LOOK_NS + 1
    machine.delay_ns()
    assert machine.num_threads == 2


def test_where_linux_tells_nothing_the_machine_takes_nothing(tmp_path: Path) -> None:
    machine = MachineTime(tmp_path / "none", clock_ns=THREADS.clock_ns)
    assert (machine.delay_ns(), machine.delay_ns()) == (0, 0)


def test_a_limit_of_the_cgroup_is_found(tasks: Tasks, tmp_path: Path) -> None:
    stat = tmp_path / "cpu.stat"
    stat.write_text("usage_usec 100\nthrottled_usec 5\n")
    machine = MachineTime(tasks.folder, stat, page_faults=lambda: 7, clock_ns=THREADS.clock_ns)
    machine.delay_ns()
    stat.write_text("usage_usec 100\nthrottled_usec 9\n")
    assert machine.more_ns(MOST) == 4000


def test_a_page_that_was_read_from_disk_takes_all_of_the_time(tasks: Tasks) -> None:
    faults = [7]
    machine = MachineTime(tasks.folder, page_faults=lambda: faults[0], clock_ns=THREADS.clock_ns)
    machine.delay_ns()
    assert machine.more_ns(MOST) == 0
    faults[0] += 1
    assert machine.more_ns(MOST) == MOST


def test_the_file_of_a_cgroup_is_found_in_both_versions_outside_and_within_a_container(tmp_path: Path) -> None:
    top = tmp_path / "sys/fs/cgroup"

    def found(lines: str) -> Path | None:
        write_files(tmp_path, {"proc/self/cgroup": lines})
        return throttling_file(tmp_path)

    assert throttling_file(tmp_path) is None
    write_files(top, {"pods/one/cpu.stat": "", "cpu/pods/two/cpu.stat": ""})
    assert found("0::/pods/one\n") == top / "pods/one/cpu.stat"
    assert found("5:memory:/x\n4:cpu,cpuacct:/pods/two\n0::/pods/one\n") == top / "cpu/pods/two/cpu.stat"
    assert found("5:memory:/x\n") is None
    write_files(top, {"cpu/cpu.stat": ""})
    assert found("4:cpu,cpuacct:/docker/1\n") == top / "cpu/cpu.stat"
