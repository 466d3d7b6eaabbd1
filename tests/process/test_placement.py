"""Replicas get GPUs, or parts of the cores, and what they share is divided."""

from __future__ import annotations

from pathlib import Path

import pytest

from oaiserve.config import Bytes, Device, EngineOptions, EngineProcessOption, OptionError, Replicas, ServerOptions
from oaiserve.errors import StartupError
from oaiserve.process import placement
from oaiserve.process.placement import Placement, apart, options_of, placements


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "allowed_cpus", lambda: range(8))


def machine(root: Path, gpus: int = 0, nodes: tuple[str, ...] = ()) -> Path:
    for number in range(gpus):
        (root / "dev").mkdir(exist_ok=True)
        (root / f"dev/nvidia{number}").touch()
    for number, cpus in enumerate(nodes):
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    if gpus:
        (root / "dev/nvidiactl").touch()
    return root


@pytest.mark.parametrize(
    ("option", "gpus", "device", "environ", "is_apart"),
    [
        ("auto", 0, "auto", {}, False),
        ("auto", 1, "auto", {}, True),
        ("auto", 1, "cpu", {}, False),
        ("auto", 0, "cuda", {}, True),
        ("auto", 1, "auto", {"CUDA_VISIBLE_DEVICES": ""}, False),
        ("off", 1, "cuda", {}, False),
        ("on", 0, "cpu", {}, True),
    ],
)
def test_the_engine_has_a_process_where_the_model_runs_on_a_gpu(
    option: EngineProcessOption, gpus: int, device: Device, environ: dict[str, str], is_apart: bool, tmp_path: Path
) -> None:
    places = apart(ServerOptions(engine_process=option), device, environ, machine(tmp_path, gpus))
    assert places == ([Placement()] if is_apart else [])


def test_several_replicas_or_fronts_have_processes_for_their_engines(tmp_path: Path) -> None:
    assert apart(ServerOptions(replicas=2), "cpu", {}, machine(tmp_path)) == [Placement()] * 2
    assert apart(ServerOptions(replicas="auto"), "cpu", {}, tmp_path) == []
    assert apart(ServerOptions(front_processes=2), "cpu", {}, tmp_path) == [Placement()]


def test_each_gpu_gets_a_replica(tmp_path: Path) -> None:
    root = machine(tmp_path, 3, ("0-3", "4-7"))
    assert placements("auto", "auto", {}, root) == [Placement("0"), Placement("1"), Placement("2")]
    assert placements(2, "cuda", {}, root) == [Placement("0"), Placement("1")]
    with pytest.raises(StartupError, match="--replicas is 4, but there are 3 GPUs"):
        placements(4, "auto", {}, root)


@pytest.mark.parametrize(
    ("named", "expected"), [("2,GPU-8f1", ["2", "GPU-8f1"]), (" 1 , 0 ", ["1", "0"]), ("3", [""]), ("", ["", ""])]
)
def test_only_visible_gpus_are_used(named: str, expected: list[str], tmp_path: Path) -> None:
    root = machine(tmp_path, 4, ("0-3", "4-7"))
    assert [place.gpu for place in placements("auto", "auto", {"CUDA_VISIBLE_DEVICES": named}, root)] == expected


@pytest.mark.parametrize(
    ("nodes", "replicas", "expected"),
    [
        (("0-3", "4-7"), "auto", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (("0-3", "4-7"), 4, [(0, 1, 2, 3), (0, 1, 2, 3), (4, 5, 6, 7), (4, 5, 6, 7)]),
        (("0-1", "2-3", "4-5", "6,7"), 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (("0-3", "8-15"), 2, [(), ()]),  # This process may not run on the second node.
        (("0-7",), "auto", [()]),
        ((), "auto", [()]),
        ((), 3, [(), (), ()]),
    ],
)
def test_replicas_on_a_cpu_are_divided_among_its_nodes(
    nodes: tuple[str, ...], replicas: Replicas, expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    places = placements(replicas, "cpu", {}, machine(tmp_path, 2, nodes))
    assert [place.cpus for place in places] == expected
    assert not any(place.gpu for place in places)


def test_replicas_on_a_cpu_divide_threads_memory_and_disk() -> None:
    options = EngineOptions(cpu_threads=5, prefix_cache_dir=Path("/cache"), prefix_cache_disk=Bytes("8GiB"))
    second = options_of(options, [Placement()] * 2, 1)
    assert (second.cpu_threads, second.num_sharing) == (2, 2)
    assert (second.prefix_cache_dir, second.prefix_cache_disk) == (Path("/cache/replica-1"), Bytes("4GiB"))
    assert options_of(EngineOptions(cpu_threads=1), [Placement()] * 3, 0).cpu_threads == 1
    assert options_of(options, [Placement()], 0) == options
    assert options_of(options, [Placement("0"), Placement("1")], 1) == options


def test_a_wrong_number_of_replicas_is_refused() -> None:
    with pytest.raises(OptionError, match="--replicas is 0, but must be at least 1, or auto"):
        ServerOptions(replicas=0)
    with pytest.raises(OptionError, match="--replicas needs processes"):
        ServerOptions(replicas="auto", engine_process="off")
