"""Runners with graphs of steps on a CPU, where a capture is work that runs again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from oaiserve.engine.decoder.description import Decoder
from oaiserve.engine.decoder.model_spec import kv_shapes
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.runner import Launched, ModelRunner
from oaiserve.engine.model.attention import Backend
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.sampling.sampled_ids import DeviceEdits, SampledIds
from oaiserve.engine.sequences.draw_columns import DrawRow
from oaiserve.engine.sequences.step import Step
from oaiserve.plugins.cuda.executor.block_tables import BlockTables
from oaiserve.plugins.cuda.executor.cuda_capture import Run
from oaiserve.plugins.cuda.executor.executor import CudaExecutor, CudaWeights
from oaiserve.plugins.cuda.executor.kernels import Kernels, PlainAttention, PlainLatentAttention
from oaiserve.plugins.cuda.executor.step_graphs import StepGraphs
from oaiserve.plugins.cuda.executor.step_sizes import Size
from oaiserve.plugins.cuda.executor.token_counts import DeviceCounts
from tests.engine.executors.native.small_models import load
from tests.engine.model.runners import states_of
from tests.engine.model.sampling import plain_sampling
from tests.engine.model.steps import CPU

MOST_SEQUENCES = 16


class Model(NamedTuple):
    spec: ModelSpec
    decoder: Decoder


def model_of(config: PreTrainedConfig) -> Model:
    loaded = load(config)
    return Model(loaded, loaded.decoder)


def run_again(run: Run) -> Run:
    """Return `run` after running it, as a capture does, which is rehearsed."""
    run()
    return run


class PlainSampler:
    """Samples as `triton_sampling` does, in plain torch, and counts the draws that are no part of a graph."""

    def __init__(self) -> None:
        self.num_sampled = 0

    def sample_ids(self, logits: torch.Tensor, rows: list[DrawRow], edits: DeviceEdits | None = None) -> SampledIds:
        self.num_sampled += len(rows)
        return plain_sampling.sample_ids(logits, rows, edits)

    def draw(
        self,
        logits: torch.Tensor,
        parameters: torch.Tensor,
        seeds: torch.Tensor,
        out: SampledIds,
        edits: DeviceEdits | None = None,
    ) -> None:
        for results, stored in zip(plain_sampling.draw(logits, parameters, seeds, edits), out, strict=True):
            stored.copy_(results)


def padded_attention(batch: Batch) -> PlainAttention:
    """Attend as kernels do in a captured step, which read lengths on the device. Padding writes into the last slot."""
    return PlainAttention(_without_padding(batch))


def padded_latent_attention(batch: Batch) -> PlainLatentAttention:
    return PlainLatentAttention(_without_padding(batch))


def _without_padding(batch: Batch) -> Batch:
    if batch.decode_slots is None:
        seq_lens = batch.seq_lens.clamp(min=1)
        return replace(batch, seq_lens=seq_lens, context_lens=seq_lens.tolist())
    query_lens = batch.query_start.diff().tolist()
    places = [place for place, length in enumerate(query_lens) if length]
    num_decodes = int((batch.decode_slots >= 0).sum())
    slots = batch.slots.clone()
    slots[:num_decodes] = batch.decode_slots[:num_decodes]
    seq_lens = batch.seq_lens[places]
    return replace(
        batch,
        num_decodes=num_decodes,
        slots=slots,
        decode_slots=None,
        table_rows=batch.table_rows[places],
        query_start=torch.tensor([*batch.query_start[places].tolist(), batch.query_start[-1]]),
        seq_lens=seq_lens,
        query_lens=[query_lens[place] for place in places],
        context_lens=seq_lens.tolist(),
    )


def executor_of(
    model: Model, num_blocks: int, block_size: int, attention: Backend = PlainAttention, **kernels: Any
) -> CudaExecutor:
    weights = CudaWeights(model.decoder, dtype=torch.float32, device=CPU)
    sizes = {"num_blocks": num_blocks, "block_size": block_size}
    return CudaExecutor(
        weights,
        kv_shapes(model.decoder),
        **sizes,
        kernels=Kernels(attention, latent_attention=padded_latent_attention, **kernels),
    )


def plain_runner(model: Model, num_blocks: int, block_size: int, **arguments: Any) -> ModelRunner:
    """Return a runner without graphs; `arguments` are those of ModelRunner."""
    executor = executor_of(model, num_blocks, block_size)
    return ModelRunner(executor, CPU, block_size, states=states_of(model.spec), **arguments)


class GraphRunner(ModelRunner):
    """A runner that counts its steps, and the sizes that are replayed. With `overlap`, steps overlap as on a GPU."""

    def __init__(
        self,
        model: Model,
        sizes: list[Size],
        *,
        num_blocks: int,
        block_size: int,
        width: int = 12,
        overlap: bool = False,
        attention: Backend = padded_attention,
        capture: Callable[[Run], Run] = run_again,
        sampler: Any = None,
        adapters: Any = None,
    ) -> None:
        executor = executor_of(model, num_blocks + 1, block_size, attention, adapters=adapters)
        tables = BlockTables(max(MOST_SEQUENCES, sizes[-1].rows), width, block_size, CPU)
        states = states_of(model.spec)
        counts = DeviceCounts(tables, model.spec.vocab_size)
        self.sampler = sampler or PlainSampler()
        of_graphs = {"sizes": sizes, "block_size": block_size, "states": states, "adapters": adapters, "counts": counts}
        self.graphs = StepGraphs(executor.forward, self.sampler, capture, model.spec, tables, **of_graphs)
        of_runner = {"graphs": self.graphs, "tables": tables, "counts": counts, "states": states}
        super().__init__(executor, CPU, block_size, sample_ids=self.sampler.sample_ids, **of_runner)
        self.is_asynchronous = overlap
        self.num_unknown = 0
        self.num_steps = 0
        self.replayed: list[Size] = []
        launch = self.graphs.launch
        self.graphs.launch = lambda size, *given: self.replayed.append(size) or launch(size, *given)  # type: ignore

    def launch(self, step: Step) -> Launched:
        self.num_steps += 1
        self.num_unknown += any(chunk.start >= len(chunk.sequence.token_ids) for chunk in step.chunks)
        return super().launch(step)


def check_replayed(runner: GraphRunner, expected: ModelRunner, step: Step) -> Launched:
    """Check that a step is replayed, and has the logits and the tokens of a runner without graphs."""
    before = len(runner.replayed)
    launched = runner.launch(step)
    want = expected.launch(step)
    assert len(runner.replayed) == before + 1
    torch.testing.assert_close(launched.logits, want.logits, rtol=1e-4, atol=1e-4)
    found = runner.collect(launched).chunks
    wanted = expected.collect(want).chunks
    assert [chunk.token_ids for chunk in found] == [chunk.token_ids for chunk in wanted]
    return launched
