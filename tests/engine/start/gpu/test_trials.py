"""A feature is on if its trial, or the verdict of an earlier probe, found no problem. No GPU takes part."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.start.gpu import usable
from oaiserve.engine.start.gpu.child import Order
from oaiserve.engine.start.gpu.trials import FEATURES, TrialFailed, Trials
from oaiserve.engine.start.gpu.usable import Usable
from oaiserve.engine.start.gpu.verdict import Verdict, recall, remember
from oaiserve.engine.start.request import StartRequest
from oaiserve.errors import DeviceLost, StartupError
from oaiserve.files.source import ModelSource

ALL_ON = Verdict(dict.fromkeys(FEATURES, ""))


def broken(*_: Any) -> Any:
    raise RuntimeError("an illegal memory access was encountered")


def test_a_verdict_replaces_trials(caplog: pytest.LogCaptureFixture) -> None:
    off = {"kernels": "", "sampling": "it is wrong", "adapters": "there are none", "graphs": ""}
    trials = Trials(Verdict(off, frozenset(["sampling"])))
    never = pytest.fail
    assert trials.is_usable("kernels", lambda: never("it is tried"))
    assert trials.tried("sampling", lambda: never("it is made"), lambda _: None) is None
    assert not trials.is_usable("adapters", lambda: never("it is tried"))
    assert trials.tried("graphs", broken, lambda _: None) is None  # no memory for it, for example
    assert trials.is_usable("long_prompts", lambda: None)  # not in the verdict, so it is tried
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "Sampling by Triton's kernels",
        "CUDA graphs",
    ]
    assert trials.verdict.problems == {"sampling", "graphs"}


def test_trials_are_reported_before_and_after() -> None:
    reported: list[str | None] = []
    trials = Trials(report=reported.append)
    assert trials.is_usable("kernels", lambda: None)
    assert not trials.is_usable("sampling", lambda: "wrong draws")
    with trials.blamed_on("kernels"):
        pass
    with trials.blamed_on("sampling"):  # sampling is off
        pass
    assert reported == ["kernels", None, "sampling", None, "kernels", None]


def test_an_error_ends_a_probe_because_later_trials_could_fail_by_what_it_left() -> None:
    reported: list[str | None] = []
    trials = Trials(report=reported.append)
    with pytest.raises(TrialFailed, match="illegal memory access"):
        trials.is_usable("sampling", broken)
    assert reported == ["sampling"]  # so that it is blamed


def test_what_the_user_asks_for_in_vain_is_an_error() -> None:
    def refuse() -> str:
        raise StartupError("Attention by triton needs ...")

    with pytest.raises(StartupError):
        Trials().is_usable("kernels", refuse)


# -- the verdict of earlier starts ------------------------------------------------------------------------------------


class Probes:
    """Counts probes, and returns a verdict."""

    def __init__(self, verdict: Verdict | None = ALL_ON) -> None:
        self.orders: list[Order] = []
        self.verdict = verdict

    def __call__(self, order: Order) -> Verdict | None:
        self.orders.append(order)
        return self.verdict


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Probes:
    found = Probes()
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(usable, "probed", found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a double")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return found


def start(**options: Any) -> Usable:
    request = StartRequest(ModelSource("/a model", None, is_local=True), EngineOptions(**options))
    return Usable(request, SimpleNamespace(device="cuda", dtype=torch.bfloat16))  # type: ignore[arg-type]


def test_a_gpu_is_probed_once_for_each_kind_of_start(probes: Probes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start().verdict == start().verdict == ALL_ON
    assert len(probes.orders) == 1
    start(max_running=8)
    start(recheck=True)
    monkeypatch.setattr(usable, "driver_version", lambda: "NVRM version: a newer one")
    start()
    assert len(probes.orders) == 4
    assert start(compile=False).verdict == Verdict()
    assert len(probes.orders) == 4


def test_failures_of_whole_probes_are_not_stored(probes: Probes) -> None:
    probes.verdict = Verdict(dict.fromkeys(FEATURES, "no memory"), frozenset(FEATURES))
    assert start().verdict == probes.verdict
    probes.verdict = None
    assert set(start().verdict.problems) == set(FEATURES)
    probes.verdict = ALL_ON
    assert start().verdict == ALL_ON


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
    assert set(second.verdict.problems) == set(FEATURES)
    assert "--recheck" in second.verdict.off["kernels"]
    with pytest.raises(StartupError) as raised, second.watched():  # plain torch fails, too
        broken()
    assert not isinstance(raised.value, DeviceLost)
    assert len(probes.orders) == 1
    assert start(recheck=True).verdict == ALL_ON


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


@pytest.mark.parametrize(
    "content", ["[" * 100_000, "[]", "7", '{"off": {}}', '{"off": {"a": 1}, "problems": []}', "\xff", None]
)
def test_a_spoiled_verdict_counts_as_missing(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "verdict"
    if content is None:
        path.mkdir()
    else:
        path.write_text(content, encoding="latin-1")
        path.chmod(0o600)
    assert recall(path) is None
    assert recall(tmp_path / "missing") is None


def test_a_verdict_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "probed-gpus" / "verdict"
    verdict = Verdict({"kernels": "", "sampling": "wrong"}, frozenset(["sampling"]))
    assert remember(path, verdict)
    assert recall(path) == verdict


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
    _, text = process.communicate(timeout=120)
    assert process.returncode == 1, text
    assert text.count("The server starts again without kernels of its own") == 1
    assert text.endswith("the second start\n")
