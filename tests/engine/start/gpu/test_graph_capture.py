"""CUDA graphs are captured in the right order, and a model that cannot be captured is served without them.

The device is a double.
"""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.cuda_capture import CudaCapture
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.start.gpu import graph_capture
from oaiserve.engine.start.gpu.graph_capture import Captured, capture_decodes, capture_graphs
from oaiserve.engine.start.gpu.trials import Trials

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
            "empty_cache": lambda: None,
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


def test_beside_other_threads_which_may_wait_for_the_device_waiting_is_no_error(device: FakeCuda) -> None:
    capture = CudaCapture(DEVICE)
    capture.is_alone = False
    capture(device.run)
    assert "waiting: error" not in device.log
    assert device.log.count("run") == device.log.count("captured") == 1


@pytest.mark.parametrize("fails", ["before", "within", "not"])
def test_a_model_that_cannot_be_captured_runs_eagerly_and_the_reason_is_logged(
    device: FakeCuda, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")

    def forward(batch: Any) -> torch.Tensor:
        if fails == "before":
            raise RuntimeError(SYNCHRONIZES)
        device.run()
        return torch.zeros(len(batch.seq_lens), loaded.vocab_size)

    executor = EagerExecutor.with_cache(loaded, num_blocks=8, block_size=4)
    monkeypatch.setattr(executor, "forward", forward)
    monkeypatch.setattr(graph_capture, "replay_problem", lambda *_, **__: None)
    device.capture_fails = fails == "within"
    tables = BlockTables(2, 4, 4, DEVICE)
    with caplog.at_level(logging.DEBUG):
        graphs = capture_decodes(Captured(executor, loaded, tables, CudaCapture(DEVICE), 8, 4, 16), 2, Trials())
    (line,) = caplog.messages
    assert (graphs is None) == (fails != "not")
    expected = {
        "before": f"(--no-cuda-graph does not try): RuntimeError: {SYNCHRONIZES}",
        "within": "(--no-cuda-graph does not try): ValueError: the reason why the capture failed",
        "not": "CUDA graphs of decodes, for up to 2 sequences: 2 of 2 sizes captured in ",
    }
    assert expected[fails] in line


def test_a_start_captures_a_fourth_of_the_graphs_and_the_runner_all_others_when_there_is_time(
    device: FakeCuda, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")
    for problem in ("replay_problem", "prompt_problem", "mixed_problem"):
        monkeypatch.setattr(graph_capture, problem, lambda *_: None)
    captured: list[Any] = []
    executor = EagerExecutor.with_cache(loaded, num_blocks=8, block_size=4)
    own = Captured(executor, loaded, BlockTables(256, 4, 4, DEVICE), lambda run: captured.append(run) or run, 8, 4, 16)
    graphs = capture_graphs(own, EngineOptions(max_running=256), Trials())
    assert len(captured) == 29
    of_runner = {"graphs": graphs.decodes, "prompt_graphs": graphs.prompts, "mixed_graphs": graphs.mixed}
    runner = ModelRunner(executor, DEVICE, 4, **of_runner)
    assert runner.num_captured == 14
    for number in range(42, 0, -1):
        assert runner.capture_next(), number
    assert not runner.capture_next()
    assert (len(captured), runner.num_captured) == (125, 56)
