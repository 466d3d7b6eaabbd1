"""CUDA graphs are captured in the right order, and the error of one that cannot be captured has the reason.

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
from oaiserve.plugins.cuda.executor.cuda_capture import CudaCapture
from oaiserve.plugins.cuda.start.on_gpu import captured
from tests.models.decoders import LLAMA_OF_ONE_LAYER
from tests.plugins.cuda.executor.step_runs import Model, model_of
from tests.plugins.cuda.start.ready import ready_model

SYNCHRONIZES = "called a synchronizing CUDA operation"
BEGIN = inspect.signature(torch.cuda.CUDAGraph.capture_begin)
DEVICE = torch.device("cpu")


class FakeCuda:
    """Replaces parts of torch.cuda, and logs their calls in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.device_index = 0
        self.is_capturing = False
        self.is_in_pool = False  # whether the allocator believes that memory is for a capture
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
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocate_to_pool)

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
        assert not self.is_in_pool
        self.log.append("capture")
        self.is_capturing = True
        self.is_in_pool = True

    def capture_end(self) -> None:
        self.is_capturing = False
        if self.capture_fails:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.is_in_pool = False

    def end_allocate_to_pool(self, device: int, pool: str) -> None:
        assert (device, pool) == (0, "pool")
        if not self.is_in_pool:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.is_in_pool = False

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


@pytest.mark.parametrize("ends", [True, False])
def test_after_a_capture_that_fails_there_can_be_another(device: FakeCuda, ends: bool) -> None:
    """Ending the failed one may raise, too, and leaves the allocator in the capture with torch 2.11."""

    def run() -> None:
        if device.is_capturing:
            raise ValueError("the reason why the capture failed")

    capture = CudaCapture(DEVICE)
    device.capture_fails = not ends
    with pytest.raises(ValueError, match="the reason"):
        capture(run)
    assert not device.is_in_pool
    device.capture_fails = False
    capture(device.run)()
    assert device.log[-1] == "replay"


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


@pytest.mark.parametrize("fails", ["before", "within", "not"])
def test_the_error_of_a_capture_says_why_it_failed(
    device: FakeCuda, llama: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    def forward(batch: Any) -> torch.Tensor:
        if fails == "before":
            raise RuntimeError(SYNCHRONIZES)
        device.run()
        return torch.zeros(len(batch.seq_lens), llama.spec.vocab_size)

    own = ready_model(llama)
    monkeypatch.setattr(own.executor, "forward", forward)
    device.capture_fails = fails == "within"
    if fails == "not":
        with caplog.at_level(logging.DEBUG):
            captured(own, CudaCapture(DEVICE))
        (line,) = caplog.messages
        assert "Captured 7 CUDA graphs in " in line
        assert (device.log[0], device.log[-1]) == ("empty", "empty")
        return
    reason = {"before": SYNCHRONIZES, "within": "the reason why the capture failed"}[fails]
    with pytest.raises((RuntimeError, ValueError), match=reason):
        captured(own, CudaCapture(DEVICE))


def test_with_adapters_each_size_is_captured_twice(device: FakeCuda, llama: Model) -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")
    sizes = {}
    for has_adapters in (False, True):
        options = EngineOptions(max_running=256)
        own = ready_model(llama, has_adapters=has_adapters, options=options)
        sizes[has_adapters] = captured(own, lambda run: run).num_captured
    assert sizes == {False: 105, True: 210}
