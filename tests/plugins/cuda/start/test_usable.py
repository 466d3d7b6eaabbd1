"""A feature is on if a probe, now or at an earlier start, found no problem. No GPU takes part."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oaiserve.checkpoints.source import ModelSource
from oaiserve.config import EngineOptions
from oaiserve.engine.start.request import StartRequest
from oaiserve.errors import DeviceLost, StartupError
from oaiserve.plugins.cuda.executor.product_ways import ProductWays
from oaiserve.plugins.cuda.start import features, usable
from oaiserve.plugins.cuda.start.child import Order
from oaiserve.plugins.cuda.start.features import FEATURES, Probed, Verdict, all_off
from oaiserve.plugins.cuda.start.usable import Usable
from tests.engine.doubles import new_world

ALL_ON = dict.fromkeys(FEATURES, "")
WAYS = ProductWays(unpacked_from=256, rounded_from=64, adds_fast=True)
SECONDS = {"by a kernel": {16: 1e-5, 64: 2e-5}}


def broken(*_: Any) -> Any:
    raise RuntimeError("an illegal memory access was encountered")


class Probes:
    """Counts probes, and returns a verdict."""

    def __init__(self, verdict: Verdict | None = ALL_ON) -> None:
        self.orders: list[Order] = []
        self.verdict = verdict

    def __call__(self, order: Order) -> Probed | None:
        self.orders.append(order)
        if self.verdict is None:
            return None
        return Probed({name: order.verdict[name] or one for name, one in self.verdict.items()}, WAYS, SECONDS)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Probes:
    found = Probes()
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(usable, "probed", found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a double")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return found


def start(**options: Any) -> Usable:
    request = StartRequest(ModelSource("/a model", None, is_local=True), EngineOptions(**options), new_world())
    return Usable(request, SimpleNamespace(device="cuda", dtype=torch.bfloat16))  # type: ignore[arg-type]


def test_a_gpu_is_probed_once_for_each_kind_of_start(probes: Probes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start().found.verdict == start().found.verdict == ALL_ON
    assert len(probes.orders) == 1
    start(max_running=8)
    start(quantize="fp8")
    start(recheck=True)
    monkeypatch.setattr(usable, "driver_version", lambda: "NVRM version: a newer one")
    start()
    assert len(probes.orders) == 5


def test_what_options_and_packages_rule_out_is_not_probed(probes: Probes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(compile=False).found.verdict == all_off("--no-compile")
    monkeypatch.setattr(features, "find_spec", lambda name: None)
    assert start().found.verdict == all_off("Triton is not installed")
    assert not probes.orders
    monkeypatch.setattr(features, "find_spec", lambda name: name)
    assert start(cuda_graph=False).found.verdict == {**ALL_ON, "graphs": "--no-cuda-graph"}


@pytest.mark.parametrize(
    ("verdict", "warned"),
    [
        (ALL_ON, []),
        ({**ALL_ON, "fp8_products": "slower"}, []),
        ({**ALL_ON, "graphs": "a replay was wrong", "fp8_products": "slower"}, ["CUDA graphs: off, and"]),
        (all_off("no compiler"), ["Triton's kernels: off, and"]),
    ],
)
def test_what_a_probe_found_is_one_warning_of_each_start(
    probes: Probes, caplog: pytest.LogCaptureFixture, verdict: Verdict, warned: list[str]
) -> None:
    probes.verdict = verdict
    for _ in range(2):
        caplog.clear()
        with caplog.at_level("INFO"):
            assert start().found.verdict == verdict
        said = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
        assert ("Products in FP8: off, and weights in FP8 are multiplied in 16 bits: slower" in said) == (
            verdict["fp8_products"] == "slower" and not warned
        )
        caplog.records[:] = [record for record in caplog.records if record.levelname == "WARNING"]
        assert [message[: message.index(" off, and") + 9] for message in caplog.messages] == warned


def test_failures_of_whole_probes_are_not_stored(probes: Probes) -> None:
    probes.verdict = all_off("no memory")
    assert start().found.verdict == probes.verdict
    probes.verdict = None
    assert all(start().found.verdict.values())
    probes.verdict = ALL_ON
    assert start().found.verdict == ALL_ON


def test_a_gpu_that_fails_gets_no_kernels_at_the_next_start(probes: Probes, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start()
    assert not first.forbid_if_failed(RuntimeError("one request"))
    with pytest.raises(RuntimeError), first.watched():  # the device still works
        broken()
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(StartupError, match="too little"), first.watched():
        raise StartupError("too little memory")
    with pytest.raises(DeviceLost, match="illegal memory access"), first.watched():
        broken()
    second = start()
    assert all("--recheck" in reason for reason in second.found.verdict.values())
    with pytest.raises(StartupError) as raised, second.watched():  # plain torch fails, too
        broken()
    assert not isinstance(raised.value, DeviceLost)
    assert len(probes.orders) == 1
    assert start(recheck=True).found.verdict == ALL_ON


def test_without_kernels_a_gpu_that_fails_ends_the_start(probes: Probes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start would be the same."""
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(StartupError) as raised, start(compile=False).watched():
        broken()
    assert not isinstance(raised.value, DeviceLost)


def test_where_nothing_can_be_stored_a_failed_gpu_ends_the_start_for_good(
    probes: Probes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "cache" / "probed-gpus"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(StartupError) as raised, start().watched():
        broken()
    assert not isinstance(raised.value, DeviceLost)


SERVER = """
import sys
from pathlib import Path
from oaiserve import cli
from oaiserve.engine.engine import Engine
from oaiserve.errors import DeviceLost

lost, model = Path(sys.argv[1]), sys.argv[2]

def load(*_, **__):
    if lost.exists():
        raise SystemExit("the second start")
    lost.touch()
    raise DeviceLost("The GPU failed.")

Engine.from_pretrained = load
sys.exit(cli.main(["serve", model, "--port", "0"]))
"""


def test_a_server_whose_gpu_is_lost_starts_again_in_the_same_process(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path / "lost"), str(tmp_path / "model")],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OAISERVE_CACHE": str(tmp_path)},
    )
    _, text = process.communicate()
    assert process.returncode == 1, text
    assert text.count("The server starts again without kernels of its own") == 1
    assert text.endswith("the second start\n")


def test_other_content_at_the_same_path_is_probed_again(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    weights = tmp_path / "model.safetensors"
    assert usable.content_of(config) == []
    config.write_text("{}")
    weights.write_text("ones")
    found = [usable.content_of(tmp_path), usable.content_of(weights)]
    config.write_text('{"hidden_size": 64}')
    found.append(usable.content_of(tmp_path))
    weights.write_text("twos")
    os.utime(weights, (1, 1))
    found += [usable.content_of(tmp_path), usable.content_of(weights)]
    assert len({*map(tuple, found), ()}) == 6


def test_kernels_that_do_not_fit_at_a_start_stay_off_at_later_ones(probes: Probes) -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")
    from tests.plugins.cuda.start.test_fitting import REASON, unless_unfit

    first = start()
    assert first.started(unless_unfit("draws")) == {"draws": REASON}
    assert start().found.unfit == {"draws": REASON}
    assert len(probes.orders) == 1
