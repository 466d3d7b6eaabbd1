"""CUDA graphs are captured in the right order, and a model that cannot be captured is served without them.

The device is a double.
"""

import gc
import inspect
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.cuda_capture import CudaCapture
from oaiserve.engine.model.gpu.step_graphs import StepGraphs
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.start.gpu import graph_capture
from oaiserve.engine.start.gpu.graph_capture import Capturable, capture_graphs
from oaiserve.engine.start.gpu.trials import Trials
from tests.engine.model.gpu.step_runs import Model, PlainSampler, executor_of, model_of, padded_attention, run_again
from tests.engine.model.runners import states_of
from tests.models.decoders import LLAMA_OF_ONE_LAYER
from tests.models.small_configs import config_of

SYNCHRONIZES = "called a synchronizing CUDA operation"
BEGIN = inspect.signature(torch.cuda.CUDAGraph.capture_begin)
DEVICE = torch.device("cpu")


class FakeCuda:
    """Replaces parts of torch.cuda, and logs their calls in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.is_capturing = False
        self.capture_fails = False
        doubles = {
            "Stream": lambda device: self,
            "current_stream": lambda: self,
            "stream": self.stream,
            "graph_pool_handle": lambda: "pool",
            "CUDAGraph": lambda: self,
            "set_sync_debug_mode": lambda mode: self.log.append(f"waiting: {mode}"),
            "empty_cache": lambda: self.log.append("empty"),
            "mem_get_info": lambda device: (1 << 30, 2 << 30),
        }
        for name, double in doubles.items():
            assert hasattr(torch.cuda, name)
            monkeypatch.setattr(torch.cuda, name, double)

    def wait_stream(self, other: object) -> None:
        self.log.append("order")

    def replay(self) -> None:
        self.log.append("replay")

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.log.append("stream")
        try:
            yield
        finally:
            self.log.append("stream as before")

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        assert BEGIN.bind(self, *args, **kwargs).arguments["pool"] == "pool"
        self.log.append("capture")
        self.is_capturing = True

    def capture_end(self) -> None:
        self.is_capturing = False
        if self.capture_fails:
            raise RuntimeError("operation failed due to a previous error during capture")

    def run(self) -> None:
        self.log.append("captured" if self.is_capturing else "run")
        if self.is_capturing and self.capture_fails:
            raise ValueError("the reason why the capture failed")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_work_runs_once_before_it_is_captured_and_can_be_replayed(device: FakeCuda) -> None:
    replay = CudaCapture(DEVICE)(device.run)
    around = ["order", "stream", "waiting: error", "run", "waiting: default", "stream as before", "order"]
    assert device.log == [*around, "order", "stream", "capture", "captured", "stream as before", "order"]
    device.log.clear()
    replay()
    assert device.log == ["replay"]


def test_work_that_waits_for_the_device_fails_before_the_capture_begins(device: FakeCuda) -> None:
    def run() -> None:
        raise RuntimeError(SYNCHRONIZES)

    with pytest.raises(RuntimeError, match=SYNCHRONIZES):
        CudaCapture(DEVICE)(run)
    assert device.log[-2:] == ["waiting: default", "stream as before"]
    assert "capture" not in device.log


@pytest.fixture(scope="module")
def llama() -> Model:
    return model_of(LLAMA_OF_ONE_LAYER)


OPTIONS = EngineOptions(max_running=4, max_step_tokens=64)


def capturable(
    model: Model, *, has_adapters: bool = False, sampler: Any = None, options: EngineOptions = OPTIONS
) -> Capturable:
    tables = BlockTables(8, 4, 16, DEVICE)
    adaptable = model.decoder.adaptable() if has_adapters else {}
    adapters = None
    if has_adapters:
        from oaiserve.engine.model.gpu.triton_adapters import TritonAdapters

        adapters = TritonAdapters(adaptable, 8, DEVICE, captured_tokens=68)
    sampler = sampler or PlainSampler()
    executor = executor_of(model, 9, 16, padded_attention, sampling=sampler, adapters=adapters)
    states = states_of(model.spec)
    kept = {"tables": tables, "states": states, "sample_ids": sampler.sample_ids}
    new_runner = partial(ModelRunner, executor, DEVICE, 16, **kept)
    return Capturable(executor, model.spec, options, tables, 8, states, adaptable, new_runner)


@pytest.mark.parametrize("fails", ["before", "within", "not"])
def test_a_model_that_cannot_be_captured_runs_without_graphs_and_the_reason_is_logged(
    device: FakeCuda, llama: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    def forward(batch: Any) -> torch.Tensor:
        if fails == "before":
            raise RuntimeError(SYNCHRONIZES)
        device.run()
        return torch.zeros(len(batch.seq_lens), llama.spec.vocab_size)

    own = capturable(llama)
    monkeypatch.setattr(own.executor, "forward", forward)
    monkeypatch.setattr(graph_capture, "replay_problem", lambda *_: None)
    device.capture_fails = fails == "within"
    with caplog.at_level(logging.DEBUG):
        graphs = capture_graphs(own, CudaCapture(DEVICE), Trials())
    (line,) = caplog.messages
    assert (graphs is None) == (fails != "not")
    expected = {
        "before": f"(--no-cuda-graph does not try): RuntimeError: {SYNCHRONIZES}",
        "within": "(--no-cuda-graph does not try): ValueError: the reason why the capture failed",
        "not": "Captured 7 CUDA graphs in ",
    }
    assert expected[fails] in line


def test_memory_of_rehearsals_and_of_graphs_that_failed_is_free_at_once(
    device: FakeCuda, llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a model starts, no garbage is collected."""
    made: list[weakref.ref[StepGraphs]] = []
    monkeypatch.setattr(
        graph_capture, "replay_problem", lambda own, graphs: made.append(weakref.ref(graphs)) or "wrong"
    )
    gc.collect()
    gc.disable()
    try:
        assert capture_graphs(capturable(llama), lambda run: device.replay, Trials()) is None
        assert made[0]() is None
    finally:
        gc.enable()
    assert device.log == ["empty", "empty"]


@pytest.mark.parametrize("kind", ["attention", "states", "adapters"])
@pytest.mark.parametrize("is_right", [True, False])
def test_graphs_that_compute_something_else_are_not_used(
    device: FakeCuda, llama: Model, kind: str, is_right: bool
) -> None:
    if kind == "adapters":
        pytest.importorskip("triton", reason="Triton has no wheels for this system")
    model = model_of(config_of("falcon_h1")) if kind == "states" else llama
    trials = Trials()
    capture = run_again if is_right else lambda run: lambda: None
    graphs = capture_graphs(capturable(model, has_adapters=kind == "adapters"), capture, trials)
    assert (graphs is not None) == is_right
    assert ("outputs of a sequence" in trials.off["graphs"]) != is_right


@pytest.mark.parametrize("of", ["decodes", "prompts", "both"])
def test_graphs_of_each_kind_of_step_are_compared(device: FakeCuda, llama: Model, of: str) -> None:
    own = capturable(llama)
    forward = own.executor.forward

    def wrong(batch: Any) -> torch.Tensor:
        kinds = {(True, False): "decodes", (False, True): "prompts", (True, True): "both"}
        kind = kinds[batch.num_decodes > 0, batch.num_decodes < len(batch.query_lens)]
        is_captured = max(batch.context_lens) == 64  # the longest that there can be
        return forward(batch) * (1.1 if is_captured and kind == of else 1.0)

    own.executor.forward = wrong
    trials = Trials()
    assert capture_graphs(own, run_again, trials) is None
    what = {"decodes": "a sequence", "prompts": "2 prompts", "both": "sequences beside a prompt"}[of]
    assert f"the outputs of {what}" in trials.off["graphs"]


def test_graphs_that_draw_with_other_parameters_are_not_used(device: FakeCuda, llama: Model) -> None:
    class OtherSeeds(PlainSampler):
        def draw(self, logits: torch.Tensor, parameters: torch.Tensor, seeds: torch.Tensor, **options: Any) -> None:
            super().draw(logits, parameters, seeds + 1, **options)

    trials = Trials()
    assert capture_graphs(capturable(llama, sampler=OtherSeeds()), run_again, trials) is None
    assert "other tokens of a sequence would be drawn" in trials.off["graphs"]


def test_with_adapters_each_size_is_captured_twice(device: FakeCuda, llama: Model) -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")
    sizes = {}
    for has_adapters in (False, True):
        options = EngineOptions(max_running=256)
        own = capturable(llama, has_adapters=has_adapters, options=options)
        sizes[has_adapters] = graph_capture.captured(own, lambda run: run).num_captured
    assert sizes == {False: 44, True: 88}
