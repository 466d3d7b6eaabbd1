"""Compares replayed decodes and prompts with the same steps launched operation by operation."""

from __future__ import annotations

import torch

from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.graphs import DecodeGraphs
from oaiserve.engine.model.gpu.prompt_graphs import PromptGraphs
from oaiserve.engine.model.rehearsal import prompts_and_decodes
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.compare import Difference, difference, tolerance
from oaiserve.engine.step import Step

COMPARED_LENGTHS = (9, 40, 17)  # of the sequences whose replayed steps are compared


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
    """Compare replayed steps with the same steps launched operation by operation."""
    most = min(len(COMPARED_LENGTHS), num_blocks // -(-max(COMPARED_LENGTHS) // block_size), sizes[-1])
    for num_rows in sorted({1, most}) if most > 0 else []:
        lengths = [min(length, loaded.max_model_len) for length in COMPARED_LENGTHS[:num_rows]]
        prompts, decodes = prompts_and_decodes(lengths, loaded.vocab_size, block_size)
        executor.forward(_batch(prompts, graphs.tables, loaded, block_size))
        want = executor.forward(_batch(decodes, graphs.tables, loaded, block_size)).clone()
        logits, replayed = graphs.launch(decodes, graphs.tables.update(decodes), None, {})
        found = Difference(f"the outputs of {num_rows} sequences", difference(logits, want), tolerance(loaded.dtype))
        if found.is_beyond_rounding:
            return str(found)
        assert replayed is not None
        if replayed.wait().token_ids != logits.argmax(dim=-1).tolist():
            return "other tokens than the best would be drawn"
    return None


@torch.inference_mode()
def prompt_problem(
    graphs: PromptGraphs,
    executor: Executor,
    loaded: LoadedModel,
    tables: BlockTables,
    sizes: list[int],
    *,
    num_blocks: int,
    block_size: int,
) -> str | None:
    """Compare replayed prompts with the same ones launched operation by operation."""
    for number in (1, len(COMPARED_LENGTHS)):
        lengths = [min(length, loaded.max_model_len) for length in COMPARED_LENGTHS[:number]]
        prompts, _ = prompts_and_decodes(lengths, loaded.vocab_size, block_size)
        step = Step([chunk._replace(max_draws=1) for chunk in prompts.chunks])
        if step.num_tokens > sizes[-1] or sum(len(chunk.sequence.blocks) for chunk in step.chunks) > num_blocks:
            continue
        want = executor.forward(_batch(step, tables, loaded, block_size)).clone()
        logits, sample_chunks = graphs.launch(step, tables.update(step))
        found = Difference(f"the outputs of {number} prompts", difference(logits, want), tolerance(loaded.dtype))
        if sample_chunks != list(range(number)) or found.is_beyond_rounding:
            return str(found)
    return None


def _batch(step: Step, tables: BlockTables, loaded: LoadedModel, block_size: int) -> Batch:
    """Return the batch of a step, which reads the tables that graphs read."""
    rows = tables.update(step)
    return build_batch(step, block_size, loaded.device, tables=(tables.on_device, rows))
