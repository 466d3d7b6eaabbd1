"""The default number of threads, on machines that files describe."""

from collections.abc import Collection
from pathlib import Path

import pytest

from oaiserve.config import EngineOptions
from oaiserve.engine.start import plan as pretrained
from oaiserve.engine.start.start_times import StartTimes
from oaiserve.errors import StartupError
from oaiserve.system_cpus import default_threads, usable_cpus
from tests.engine.doubles import new_world
from tests.system_files import write_files


def machine(root: Path, *, siblings: dict[int, str], quota: str | None = None) -> Path:
    for cpu, names in siblings.items():
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{names}\n")
    if quota is not None:
        write_files(root, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota}\n"})
    return root


ALONE = {cpu: str(cpu) for cpu in range(64)}
IN_PAIRS = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}


@pytest.mark.parametrize(
    ("cpus", "siblings", "quota", "threads"),
    [
        *((range(n), ALONE, None, threads) for n, threads in ((1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (64, 63))),
        (range(4), IN_PAIRS, None, 2),  # two hardware threads of a core count once
        ((1, 3), IN_PAIRS, None, 1),  # the CPUs that taskset or a cpuset leaves
        (range(8), ALONE, "max 100000", 7),
        (range(8), ALONE, "800000 100000", 7),
        (range(8), ALONE, "350000 100000", 3),
        (range(8), ALONE, "50000 100000", 1),
        (range(8), ALONE, "20000 10000", 2),
        (range(8), ALONE, "not this", 7),
        (range(3), {}, None, 3),  # without information each CPU counts as a core
    ],
)
def test_each_core_has_a_thread_within_the_quota_but_one_of_four_or_more(
    tmp_path: Path, cpus: Collection[int], siblings: dict[int, str], quota: str | None, threads: int
) -> None:
    assert default_threads(cpus, machine(tmp_path, siblings=siblings, quota=quota)) == threads
    assert default_threads() >= 1


@pytest.mark.parametrize(("quota", "usable"), [(None, 4), ("max 100000", 4), ("250000 100000", 3), ("5000 100000", 1)])
def test_all_hardware_threads_within_the_quota_can_be_used(tmp_path: Path, quota: str | None, usable: int) -> None:
    root = machine(tmp_path, siblings={}, quota=quota)
    assert usable_cpus({0, 1, 2, 3}, root) == usable


def test_a_service_of_systemd_has_the_narrowest_quota_of_its_cgroups(tmp_path: Path) -> None:
    contents = {
        "proc/self/cgroup": "0::/system.slice/oaiserve.service\n",
        "sys/fs/cgroup/system.slice/cpu.max": "600000 100000\n",
        "sys/fs/cgroup/system.slice/oaiserve.service/cpu.max": "200000 100000\n",
    }
    write_files(tmp_path, contents)
    assert default_threads(range(8), tmp_path) == 2
    write_files(tmp_path, {"sys/fs/cgroup/system.slice/oaiserve.service/cpu.max": "max 100000\n"})
    assert default_threads(range(8), tmp_path) == 5


@pytest.mark.parametrize("folder", ["sys/fs/cgroup/cpu/docker/1", "sys/fs/cgroup/cpu"])
@pytest.mark.parametrize(("quota", "threads"), [(200_000, 2), (-1, 7), (0, 7)])
def test_a_quota_of_the_first_version_counts_outside_and_within_a_container(
    tmp_path: Path, folder: str, quota: int, threads: int
) -> None:
    contents = {
        "proc/self/cgroup": "4:memory:/docker/1\n1:cpu,cpuacct:/docker/1\n0::/\n",
        f"{folder}/cpu.cfs_quota_us": f"{quota}\n",
        f"{folder}/cpu.cfs_period_us": "100000\n",
    }
    write_files(tmp_path, contents)
    assert default_threads(range(8), tmp_path) == threads


@pytest.mark.parametrize(("threads", "device", "is_said"), [(3, "cpu", True), (2, "cpu", False), (3, "cuda", False)])
def test_more_threads_than_cpus_are_remarked_on_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, threads: int, device: str, is_said: bool
) -> None:
    monkeypatch.setattr(pretrained, "usable_cpus", lambda: 2)
    options = EngineOptions(cpu_threads=threads, device=device)
    with pytest.raises(StartupError, match="which does not exist"):
        pretrained.start_model("/nowhere", options, StartTimes(), lambda: None, new_world())
    said = "--cpu-threads is 3, but this process may run on 2 CPUs only."
    assert [message[: len(said)] for message in caplog.messages] == [said] * is_said
