"""Doubles for CUDA graphs, on a CPU: a recording, work that runs again, a sampler, attention with padded rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock, patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.cuda_capture import Capture, Run
from oaiserve.engine.model.gpu.graphs import DecodeGraphs
from oaiserve.engine.model.gpu.mixed_graphs import MixedGraphs
from oaiserve.engine.model.gpu.prompt_graphs import PromptGraphs
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.model.runner import Launched, ModelRunner
from oaiserve.engine.model.sampling.draw_rows import DrawRow, SampledIds
from oaiserve.engine.step import Step
from tests.engine.model.sampling import plain_sampling

if TYPE_CHECKING:  # it imports Triton
    from oaiserve.engine.model.gpu.triton_adapters import TritonAdapters

TILE_TOKENS = 4


class Recording(TorchDispatchMode):
    """Records the operations of a run, and repeats them with the same tensors and numbers."""

    current: Recording | None = None

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # else it is a view
                    old.copy_(new)


def record(run: Run) -> Run:
    with Recording() as recording:
        Recording.current = recording
        run()
    Recording.current = None
    return recording.replay


class RecordedKernel:
    """A kernel of Triton in its interpreter, whose launches are recorded as one call each."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        launch = self._kernel[grid]

        def launch_recorded(*args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():
                launch(*args, **kwargs)
            if Recording.current is not None:
                Recording.current.calls.append((launch, args, kwargs, None))

        return launch_recorded


def run_again(run: Run) -> Run:
    """Return `run` after running it. This replaces `record` for Triton's kernels, which are not operations of torch."""
    run()
    return run


class Plain:
    """Samples as `triton_sampling` does, in plain torch, and records the calls of `sample_ids`."""

    def __init__(self) -> None:
        self.used: list[str] = []

    def sample_ids(self, logits: torch.Tensor, rows: list[DrawRow]) -> SampledIds:
        self.used.append("sample_ids")
        return plain_sampling.sample_ids(logits, rows)

    def take_best(self, logits: torch.Tensor, out: SampledIds | None = None) -> SampledIds:
        token_ids, are_finite = plain_sampling.take_best(logits)
        return out[0].copy_(token_ids), out[1].copy_(are_finite)

    def draw(self, *of_rows: torch.Tensor, has_cuts: bool, out: SampledIds | None = None) -> SampledIds:
        token_ids, are_finite = plain_sampling.draw(*of_rows, has_cuts=has_cuts)
        return out[0].copy_(token_ids), out[1].copy_(are_finite)


def all_graphs(
    forward: Callable[[Batch], torch.Tensor],
    captures: Sequence[Capture],
    loaded: LoadedModel,
    tables: BlockTables,
    *,
    decodes: list[int],
    prompts: list[int],
    adapters: TritonAdapters | None = None,
    **sizes: int,
) -> dict[str, Any]:
    """Return graphs of decodes, of prompts, and of both, for a runner. Each kind has one of `captures`."""
    own, shared = {"sizes": decodes, **sizes}, {"block_size": sizes["block_size"], "adapters": adapters}
    of_decodes = DecodeGraphs(forward, Plain(), captures[0], loaded, tables, **own, adapters=adapters)
    of_prompts = PromptGraphs(forward, captures[1], loaded, tables, sizes=prompts, **shared)
    pairs = [(decodes[-1], size) for size in prompts]
    both = MixedGraphs(forward, captures[2], of_decodes, of_prompts, sizes=pairs, adapters=adapters)
    return {"graphs": of_decodes, "prompt_graphs": of_prompts, "mixed_graphs": both, "tables": tables}


def check_replayed(runner: ModelRunner, expected: ModelRunner, step: Step) -> Launched:
    """Check that a step is replayed, and has the logits and the tokens of a runner without graphs."""
    with patch.object(runner._executor, "forward", Mock(side_effect=AssertionError("launched one by one"))):
        launched, want = runner.launch(step), expected.launch(step)
    torch.testing.assert_close(launched.logits, want.logits[-len(launched.logits) :], rtol=1e-4, atol=1e-4)
    found, wanted = runner.collect(launched).chunks, expected.collect(want).chunks
    assert [chunk.token_ids for chunk in found] == [chunk.token_ids for chunk in wanted]
    return launched


def padded_attention(batch: Batch) -> ReferenceAttention:
    """Attend as kernels do in a captured step, which read lengths on the device. Padding writes into the last slot."""
    slots = torch.where(batch.slots < 0, -1, batch.slots)
    if batch.tiles is None:
        return ReferenceAttention(replace(batch, slots=slots, seq_lens=batch.seq_lens.clamp(min=1)))
    tiles = batch.tiles.of(TILE_TOKENS)
    query_lens = [length for length in batch.query_start.diff().tolist() if length]
    number = len(query_lens)
    assert int(tiles[:, 2].sum()) == sum(query_lens)
    of_step = replace(
        batch,
        slots=slots,
        table_rows=batch.table_rows[:number],
        query_start=batch.query_start[: number + 1],
        seq_lens=batch.seq_lens[:number],
        query_lens=query_lens,
        context_lens=batch.seq_lens[:number].tolist(),
        tiles=None,
    )
    return ReferenceAttention(of_step)
