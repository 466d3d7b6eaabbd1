"""CUDA graphs are captured in the right order, and a model that cannot be captured is served without them.

The device is a double.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.cuda_capture import CudaCapture
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.gpu import graph_capture
from oaiserve.engine.start.gpu.graph_capture import Captured, capture_decodes
from oaiserve.engine.start.gpu.trials import Trials
from oaiserve.engine.start.prepare import prepare
from tests.models.decoders import FAMILIES, random_model

SYNCHRONIZES = "called a synchronizing CUDA operation"
GRAPH = inspect.signature(torch.cuda.graph)
DEVICE = torch.device("cpu")


class FakeCuda:
    """Replaces parts of torch.cuda, and logs their calls in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.is_capturing = False
        self.capture_fails = False
        self._patch = monkeypatch
        doubles = {
            "Stream": lambda device: self,
            "current_stream": lambda: self,
            "stream": self.stream,
            "graph_pool_handle": lambda: "pool",
            "CUDAGraph": lambda: self,
            "graph": self.graph,
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

    @contextmanager
    def graph(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        assert GRAPH.bind(*args, **kwargs).arguments["pool"] == "pool"
        self.log.append("capture")
        self.is_capturing = True
        try:
            yield
            if self.capture_fails:
                raise ValueError("the reason why the capture failed")
        finally:
            self.is_capturing = False
            if self.capture_fails:
                raise RuntimeError("operation failed due to a previous error during capture")

    def run(self) -> None:
        self.log.append("captured" if self.is_capturing else "run")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_work_runs_once_before_it_is_captured_and_can_be_replayed(device: FakeCuda) -> None:
    replay = CudaCapture(DEVICE)(device.run)
    assert device.log == [
        "order",
        "stream",
        "waiting: error",
        "run",
        "waiting: default",
        "stream as before",
        "order",
        "order",
        "stream",
        "capture",
        "captured",
        "stream as before",
        "order",
    ]
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
def loaded() -> LoadedModel:
    return prepare(random_model(FAMILIES["llama"]))


@pytest.mark.parametrize("fails", ["before", "within", "not"])
def test_a_model_that_cannot_be_captured_runs_eagerly_and_the_reason_is_logged(
    device: FakeCuda, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")

    def forward(batch: Any) -> torch.Tensor:
        if fails == "before":
            raise RuntimeError(SYNCHRONIZES)
        return torch.zeros(len(batch.seq_lens), loaded.vocab_size)

    executor = EagerExecutor.with_cache(loaded, num_blocks=8, block_size=4)
    monkeypatch.setattr(executor, "forward", forward)
    monkeypatch.setattr(graph_capture, "replay_problem", lambda *_, **__: None)
    device.capture_fails = fails == "within"
    tables = BlockTables(2, 4, 4, DEVICE)
    with caplog.at_level(logging.INFO):
        graphs = capture_decodes(Captured(executor, loaded, tables, CudaCapture(DEVICE), 8, 4, 16), 2, Trials())
    (line,) = caplog.messages
    assert (graphs is None) == (fails != "not")
    expected = {
        "before": f"(--no-cuda-graph does not try): RuntimeError: {SYNCHRONIZES}",
        "within": "(--no-cuda-graph does not try): ValueError: the reason why the capture failed",
        "not": "CUDA graphs of decodes, for up to 2 sequences: 2 sizes captured in ",
    }
    assert expected[fails] in line
