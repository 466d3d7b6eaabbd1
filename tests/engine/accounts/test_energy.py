"""The meters of energy: they are read where they are, wrap, and are divided with nothing lost."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from oaiserve.engine.accounts.energy import Counter, Energy, nvml_counters, rapl_counters
from oaiserve.runtime import THREADS
from tests.engine.doubles import Clock

WRAPS_AT = 262_143_328_850  # µJ, as of a real package: an hour at 150 W wraps twice


class Package:
    """The files of RAPL for a package and its memory, whose meter wraps."""

    def __init__(self, folder: Path) -> None:
        self.zones = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:0:1": "dram"}
        self.folder = folder
        self.microjoules = WRAPS_AT - 10_000_000
        for zone, name in self.zones.items():
            (folder / zone).mkdir()
            (folder / zone / "name").write_text(f"{name}\n")
            (folder / zone / "max_energy_range_uj").write_text(f"{WRAPS_AT}\n")
        self.use(0)

    def use(self, joules: float) -> None:
        self.microjoules += round(joules * 1e6)
        for zone, name in self.zones.items():
            value = 0 if name == "dram" else self.microjoules % WRAPS_AT
            (self.folder / zone / "energy_uj").write_text(f"{value}\n")


def test_shares_of_an_hour_add_up_to_what_the_meter_has_counted_though_it_wraps(tmp_path: Path) -> None:
    package = Package(tmp_path)
    clock = Clock()
    energy = Energy(rapl_counters(tmp_path), [], num_cores=2, clock_ns=clock)
    used = total = 0.0
    energy.read()
    assert energy.joules_of(10**9, 0) is None
    for number in range(360):  # ten seconds each
        joules = 1500 + 100 * (number % 7)
        package.use(joules)
        used += joules
        clock.move(10)
        energy.read()
        total += energy.joules_of(2 * 10**10, 10**10)
    assert energy.joules == pytest.approx(used)
    assert total == pytest.approx(used, rel=0.02)


def test_idle_cores_and_other_processes_are_nobodys(tmp_path: Path) -> None:
    package = Package(tmp_path)
    clock = Clock()
    energy = Energy(rapl_counters(tmp_path), [], num_cores=8, clock_ns=clock)
    energy.read()
    package.use(100)
    clock.move(0.5)
    energy.read()  # too soon to tell
    assert energy.joules_of(10**9, 0) is None
    clock.move(0.5)
    energy.read()
    assert energy.joules_of(10**9, 0) == pytest.approx(100 / 8)


def test_a_gpu_is_the_engines_for_its_share_of_time() -> None:
    clock = Clock()
    joules = iter([0, 700])
    energy = Energy([], [Counter(lambda: next(joules))], clock_ns=clock)
    energy.read()
    clock.move(1)
    energy.read()
    assert energy.joules_of(10**12, 10**9 // 4) == pytest.approx(175)


def test_without_a_meter_nothing_is_known_and_a_meter_that_fails_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nothing = Energy(rapl_counters(tmp_path), [], clock_ns=THREADS.clock_ns)
    nothing.read()
    assert not nothing.is_known
    assert nothing.joules_of(1, 1) is None
    package = Package(tmp_path)
    energy = Energy(rapl_counters(tmp_path), [], clock_ns=THREADS.clock_ns)
    package.zones.clear()
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    energy.read()
    assert not energy.is_known
    assert "requests have no joules" in caplog.text


@pytest.mark.parametrize(("visible", "asked"), [(None, 0), ("3,1", 3), ("GPU-7f", "GPU-7f")])
def test_the_gpu_of_this_process_is_the_first_that_it_may_see(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, asked: int | str
) -> None:
    joules = {asked: iter([5_000, 7_500])}  # mJ
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetHandleByUUID=str,
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: next(joules[gpu]),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (counter,) = nvml_counters()
    assert counter.since_last() == pytest.approx(2.5)
