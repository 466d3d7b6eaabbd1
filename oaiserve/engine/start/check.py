"""A few steps that a start computes to check an executor."""

from __future__ import annotations

from dataclasses import replace

import torch

from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.rehearsal import prompt
from oaiserve.engine.model.states import StateChunk, States
from oaiserve.engine.sequences.step import Step

NUM_TOKENS = 9
_LARGEST_LOGIT = 1e30  # larger logits would make those of other tokens overflow


def batches(spec: ModelSpec, block_size: int) -> list[Batch]:
    """Return batches with a prompt, with the token after it, and with the same token at the model's last position.

    At the last position, rotary tables end, and values that grow with the position are largest.
    """
    steps = (
        prompt(NUM_TOKENS - 1, spec.vocab_size, block_size),
        prompt(NUM_TOKENS, spec.vocab_size, block_size, start=NUM_TOKENS - 1),
    )
    states = States.of(spec, 1)
    built = [batch_of(step, spec, block_size, states) for step in steps]
    return [*built, replace(built[-1], positions=torch.tensor([spec.max_model_len - 1], device=spec.device))]


def batch_of(
    step: Step,
    spec: ModelSpec,
    block_size: int,
    states: States | None,
    tables: tuple[torch.Tensor, list[int]] | None = None,
) -> Batch:
    """Return the batch of a step. If there are states, each sequence uses the one with its index in the step. For
    `tables` see `build_batch`."""
    batch = build_batch(step, block_size, spec.device, tables=tables)
    if states is not None:
        parts = [StateChunk(place, chunk.start, chunk.num_tokens) for place, chunk in enumerate(step.chunks)]
        batch.states = states.of_step(parts)
    return batch


@torch.inference_mode()
def refuse_unless_finite(executor: Executor, spec: ModelSpec, block_size: int) -> None:
    """Raise NotKnown if logits of the model are not finite, or so large that others might overflow."""
    for batch in batches(spec, block_size):
        if not (executor.forward(batch).abs() < _LARGEST_LOGIT).all():
            raise NotKnown("its outputs are no finite numbers")
