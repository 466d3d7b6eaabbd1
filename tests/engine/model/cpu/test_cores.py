"""The default number of threads, on machines that files describe."""

from __future__ import annotations

from pathlib import Path

import pytest

from oaiserve.config import EngineOptions
from oaiserve.engine.model.cpu.cores import default_threads, usable_cpus
from oaiserve.engine.start import plan as pretrained
from oaiserve.errors import StartupError
from oaiserve.facts.start_times import StartTimes


def machine(root: Path, *, siblings: dict[int, str], quota: str | None = None) -> Path:
    for cpu, names in siblings.items():
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{names}\n")
    if quota is not None:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/cpu.max").write_text(f"{quota}\n")
    return root


@pytest.mark.parametrize(
    ("cpus", "threads"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (64, 63)], ids=lambda value: str(value)
)
def test_one_core_of_four_or_more_is_left_free(tmp_path: Path, cpus: int, threads: int) -> None:
    root = machine(tmp_path, siblings={cpu: str(cpu) for cpu in range(cpus)})
    assert default_threads(set(range(cpus)), root) == threads


def test_two_threads_of_a_core_count_once(tmp_path: Path) -> None:
    root = machine(tmp_path, siblings={0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"})
    assert default_threads({0, 1, 2, 3}, root) == 2
    assert default_threads({1, 3}, root) == 1  # the CPUs that taskset or a cpuset leaves


@pytest.mark.parametrize(
    ("quota", "threads"),
    [
        ("max 100000", 7),
        ("800000 100000", 7),
        ("350000 100000", 3),
        ("200000 100000", 2),
        ("50000 100000", 1),
        ("20000 10000", 2),
        ("not this", 7),
    ],
)
def test_a_cgroup_gives_no_more_than_its_quota(tmp_path: Path, quota: str, threads: int) -> None:
    root = machine(tmp_path, siblings={cpu: str(cpu) for cpu in range(8)}, quota=quota)
    assert default_threads(set(range(8)), root) == threads


def test_without_information_each_cpu_counts_as_a_core(tmp_path: Path) -> None:
    assert default_threads({0, 1, 2}, tmp_path) == 3


def test_the_default_is_at_least_one_thread() -> None:
    assert default_threads() >= 1


@pytest.mark.parametrize(("quota", "usable"), [(None, 4), ("max 100000", 4), ("250000 100000", 3), ("5000 100000", 1)])
def test_all_hardware_threads_within_the_quota_can_be_used(tmp_path: Path, quota: str | None, usable: int) -> None:
    root = machine(tmp_path, siblings={}, quota=quota)
    assert usable_cpus({0, 1, 2, 3}, root) == usable


@pytest.mark.parametrize(("threads", "device", "is_said"), [(3, "cpu", True), (2, "cpu", False), (3, "cuda", False)])
def test_more_threads_than_cpus_are_remarked_on_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, threads: int, device: str, is_said: bool
) -> None:
    monkeypatch.setattr(pretrained, "usable_cpus", lambda: 2)
    options = EngineOptions(cpu_threads=threads, device=device)  # type: ignore[arg-type]
    with pytest.raises(StartupError, match="which does not exist"):
        pretrained.start_model("/nowhere", options, StartTimes(), lambda: None)
    said = "--cpu-threads is 3, but this process may run on 2 CPUs only."
    assert [message[: len(said)] for message in caplog.messages] == [said] * is_said
