"""Captures decode steps as CUDA graphs: for which numbers of rows, and at what cost in memory."""

from __future__ import annotations

import logging
import warnings

import torch

from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.graphs import DecodeGraphs, Run
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.times import monotonic_ns

log = logging.getLogger(__name__)

# For the estimate of what graphs take. All share one pool, whose size follows from the largest.
LAYER_BYTES = 64 << 10  # that the driver keeps for the launches of a layer, in each forward
POOL_BYTES = 96 << 20  # hidden states of the largest, what cuBLAS works with, and what is lost between them
DRAW_BYTES = 12  # for each logit: weights, and the candidates for the cuts with their ids


def ladder(most: int) -> list[int]:
    """Return the numbers of rows to capture, ascending, so that any up to `most` finds one that is not much larger.

    A row of padding reads no keys, and up to some hundred rows a matrix product takes as long as its weights take to be
    read; so a step of a few rows too many takes hardly longer. A further size takes some 50 ms of the start.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 64)]
    return [size for size in sizes if size < most] + [most]


def graph_memory_bytes(loaded: LoadedModel, *, max_running: int, max_model_len: int, block_size: int) -> int:
    """Return an estimate of the device memory that `capture_decodes` will take in all."""
    sizes = ladder(max_running)
    logit_bytes = 2 * loaded.dtype.itemsize + DRAW_BYTES  # of the model, and where they are kept
    table_bytes = -(-max_model_len // block_size) * 8
    row_bytes = loaded.vocab_size * logit_bytes + table_bytes
    return max_running * row_bytes + len(sizes) * len(loaded.kv_shapes) * LAYER_BYTES + POOL_BYTES


def capture_decodes(
    executor: Executor, loaded: LoadedModel, *, max_running: int, max_model_len: int, block_size: int
) -> DecodeGraphs | None:
    """Capture the decode steps of the executor. Where the model cannot be captured, the log says why: None."""
    from oaiserve.engine.model import triton_sampling

    sizes, began_ns = ladder(max_running), monotonic_ns()
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(loaded.device)
    try:
        graphs = DecodeGraphs(
            executor.forward,
            triton_sampling,
            CudaCapture(loaded.device),
            loaded,
            sizes=sizes,
            max_model_len=max_model_len,
            block_size=block_size,
        )
    except RuntimeError as error:
        # Where a capture fails, its end fails, too, and knows nothing of the reason.
        reason = str(error.__context__ or error).strip().partition("\n")[0]
        log.warning(
            "Decode steps are launched operation by operation, which is slower: they cannot be captured as CUDA graphs "
            "(%s). --no-cuda-graph does not try.",
            reason,
        )
        return None
    left_bytes, _ = torch.cuda.mem_get_info(loaded.device)
    log.info(
        "CUDA graphs for up to %d sequences: %d sizes captured in %.1f s, %.2f GiB",
        max_running,
        len(sizes),
        (monotonic_ns() - began_ns) / 1e9,
        (free_bytes - left_bytes) / 2**30,
    )
    return graphs


class CudaCapture:
    """Captures CUDA graphs that share memory: what one leaves in its own tensors is gone when another is replayed."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """Run `run`, capture it, and return what replays it. Raises RuntimeError where it cannot be captured."""
        self._stream.wait_stream(torch.cuda.current_stream())
        # This `with` also puts the stream back that was in use before, which a capture that fails does not.
        with torch.cuda.stream(self._stream):
            # First as it is: kernels are compiled, libraries take the memory that they keep, and what waits for the
            # device, as no captured work can, is found while torch can still go on as if nothing had happened.
            self._run_without_waiting(run)
            graph = torch.cuda.CUDAGraph()
            # Other threads do not matter: none of them uses the device.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay

    def _run_without_waiting(self, run: Run) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
