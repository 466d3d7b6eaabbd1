"""Captures decode steps as CUDA graphs: chooses the numbers of rows, and estimates the memory that graphs take."""

from __future__ import annotations

import logging
import warnings

import torch

from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.block_tables import BlockTables
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.fast_paths import is_usable, reason
from oaiserve.engine.model.graphs import DecodeGraphs, Run
from oaiserve.engine.model.rehearsal import difference, prompts_and_decodes, tolerance
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.times import monotonic_ns

log = logging.getLogger(__name__)

# These estimate the memory that graphs take. All graphs share one pool, whose size follows from the largest graph.
LAYER_BYTES = 64 << 10  # what the driver keeps for the launches of one layer, in each forward
POOL_BYTES = 96 << 20  # hidden states of the largest graph, cuBLAS's workspace, and fragmentation
DRAW_BYTES = 12  # for each logit: its weight, and a candidate's weight and id for top_k and top_p

COMPARED_LENGTHS = (9, 40, 17)  # of the sequences whose replayed steps are compared


def ladder(most: int) -> list[int]:
    """Return the numbers of rows to capture, ascending, so that each number up to `most` has a size not much larger.

    A row of padding reads no keys, and up to some hundred rows a matrix product takes as long as reading its weights.
    So a few rows of padding cost hardly any time, while each further size adds some 50 ms to the start.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 64)]
    return [size for size in sizes if size < most] + [most]


def graph_memory_bytes(loaded: LoadedModel, *, max_running: int, max_model_len: int, block_size: int) -> int:
    """Return an estimate of the device memory that `capture_decodes` will take in all."""
    sizes = ladder(max_running)
    logit_bytes = 2 * loaded.dtype.itemsize + DRAW_BYTES  # the model's output, and the copy that is kept
    table_bytes = -(-max_model_len // block_size) * 8
    row_bytes = loaded.vocab_size * logit_bytes + table_bytes
    return max_running * row_bytes + len(sizes) * len(loaded.kv_shapes) * LAYER_BYTES + POOL_BYTES


def capture_decodes(
    executor: Executor,
    loaded: LoadedModel,
    tables: BlockTables,
    *,
    max_running: int,
    max_model_len: int,
    num_blocks: int,
    block_size: int,
) -> DecodeGraphs | None:
    """Capture the decode steps of the executor, and write into the first blocks of its cache.

    If the model cannot be captured, or the graphs compute something else, log the reason and return None.
    """
    from oaiserve.engine.model import triton_sampling

    sizes, began_ns = ladder(max_running), monotonic_ns()
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(loaded.device)
    captured: list[DecodeGraphs] = []

    def problem() -> str | None:
        try:
            graphs = DecodeGraphs(
                executor.forward,
                triton_sampling,
                CudaCapture(loaded.device),
                loaded,
                tables,
                sizes=sizes,
                max_model_len=max_model_len,
                block_size=block_size,
            )
        except RuntimeError as error:
            # After a capture has failed, ending it fails too, with an error that does not have the reason.
            return reason(error.__context__ or error)
        captured.append(graphs)
        return replay_problem(graphs, executor, loaded, sizes, num_blocks=num_blocks, block_size=block_size)

    instead = "steps are launched operation by operation, which is slower (--no-cuda-graph does not try)"
    if not is_usable("CUDA graphs", instead, problem):
        captured.clear()
        torch.cuda.empty_cache()
        return None
    left_bytes, _ = torch.cuda.mem_get_info(loaded.device)
    log.info(
        "CUDA graphs for up to %d sequences: %d sizes captured in %.1f s, %.2f GiB",
        max_running,
        len(sizes),
        (monotonic_ns() - began_ns) / 1e9,
        (free_bytes - left_bytes) / 2**30,
    )
    return captured[0]


@torch.inference_mode()
def replay_problem(
    graphs: DecodeGraphs,
    executor: Executor,
    loaded: LoadedModel,
    sizes: list[int],
    *,
    num_blocks: int,
    block_size: int,
) -> str | None:
    """Return how replayed steps differ from the same steps launched operation by operation, if they do."""
    most = min(len(COMPARED_LENGTHS), num_blocks // -(-max(COMPARED_LENGTHS) // block_size), sizes[-1])
    for num_rows in sorted({1, most}) if most > 0 else []:
        lengths = [min(length, loaded.max_model_len) for length in COMPARED_LENGTHS[:num_rows]]
        prompts, decodes = prompts_and_decodes(lengths, loaded.vocab_size, block_size)
        executor.forward(build_batch(prompts, block_size, loaded.device))
        want = executor.forward(build_batch(decodes, block_size, loaded.device)).clone()
        logits, replayed = graphs.launch(decodes, graphs.tables.update(decodes), None, {})
        found, limit = difference(logits, want), tolerance(loaded.dtype)
        if not found <= limit:
            return f"the outputs of {num_rows} sequences would differ by {found:.1%} (allowed: {limit:.1%})"
        assert replayed is not None
        if replayed.wait().token_ids != logits.argmax(dim=-1).tolist():
            return "other tokens than the best would be drawn"
    return None


class CudaCapture:
    """Captures CUDA graphs that share memory: replaying one graph overwrites the tensors that others have allocated."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """Run `run`, capture it, and return a function that replays it. Raises RuntimeError if that is impossible."""
        self._stream.wait_stream(torch.cuda.current_stream())
        # This `with` also restores the stream that was in use before, which a failed capture does not.
        with torch.cuda.stream(self._stream):
            # The first run is not captured. It compiles kernels and lets libraries allocate the memory that they keep.
            # If something in it waits for the device, which captured work cannot, the error leaves torch usable.
            self._run_without_waiting(run)
            graph = torch.cuda.CUDAGraph()
            # No other thread uses the device, so the capture does not have to watch other threads.
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
