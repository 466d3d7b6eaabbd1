"""Decides when the server starts which faster ways to compute are used on a GPU.

Each of them is optional: it computes what a plain way in torch does, too. So it is tried on the device, and compared
with the plain way. One that fails, or computes something else, is switched off, and the log says so; the start goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from oaiserve.engine.model import plain_sampling
from oaiserve.engine.model.attention import Backend, LayerCache, StepAttention
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.draw_rows import GREEDY, DrawRow, SampleIds
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.fused_projections import fuse_projections, separate_projections
from oaiserve.engine.model.logit_edits import ApplyMasks, apply_masks_in_torch
from oaiserve.engine.model.rehearsal import difference, prompt, prompts_and_decodes, tolerance
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.model.states import PartOfStep, States
from oaiserve.engine.step import Chunk, Step
from oaiserve.errors import StartupError

log = logging.getLogger(__name__)

# The names under which /metrics says what is on.
ATTENTION, SAMPLING, PROJECTIONS, COMPILED = "attention", "sampling", "fused_projections", "compiled_layers"
DECODE_GRAPHS, PROMPT_GRAPHS = "decode_graphs", "prompt_graphs"
FEATURES = (ATTENTION, SAMPLING, PROJECTIONS, COMPILED, DECODE_GRAPHS, PROMPT_GRAPHS)

LENGTHS = (3, 20, 9, 75)  # of sequences whose attention is compared
PROMPT_TOKENS = 20  # of the prompt whose logits are compared
CHUNK_TOKENS = 5  # of the longest, in a step in which the others decode
# What attention may differ by in one layer, relative to its norm: it rounds its weights and its results.
ATTENTION_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.03}
_DRAWS = [
    GREEDY,
    DrawRow(1.0, 0.0, 0.0, 1.0, 11),
    DrawRow(0.7, 0.05, 0.0, 1.0, 12),
    DrawRow(0.7, 0.0, 40.0, 0.9, 13),
    DrawRow(1.0, 0.0, 0.0, 1.0, 14),  # from logits that are not finite
]


def is_usable(name: str, instead: str, problem: Callable[[], str | None]) -> bool:
    """Return whether `problem` finds none. What it finds, or raises, is logged as the reason why `name` is off."""
    try:
        found = problem()
    except StartupError:  # what was asked for is not possible: this is for the user
        raise
    except Exception as error:  # a compiler or a driver can raise anything, and the server runs without it
        found = reason(error)
    if found is None:
        return True
    log.warning("%s: off, and %s: %s", name, instead, found)
    return False


def reason(error: BaseException) -> str:
    """Return an error as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


@torch.inference_mode()
def attention_problem(loaded: LoadedModel, backend: Backend, block_size: int) -> str | None:
    """Return how attention differs from the reference in the model's layers, in prompts, chunks and decodes, if it
    does."""
    if not loaded.kv_shapes:
        return None
    *lengths, longest = (max(3, min(length, loaded.max_model_len)) for length in LENGTHS)
    prompts, decodes = prompts_and_decodes([*lengths, longest], loaded.vocab_size, block_size)
    # The longest goes on with some tokens while the others decode.
    sequence, start = decodes.chunks.pop().sequence, longest - min(CHUNK_TOKENS, longest - 1)
    prompts.chunks[-1] = Chunk(sequence, 0, start, max_draws=0)
    decodes.chunks.append(Chunk(sequence, start, longest - start))
    compared = _Compared(backend)
    num_blocks = sequence.blocks[-1] + 1
    executor = EagerExecutor.with_cache(loaded, num_blocks=num_blocks, block_size=block_size, backend=compared.of_step)
    states = States(loaded.state_shapes, len(prompts.chunks), loaded.device) if loaded.state_shapes else None
    for step in (prompts, decodes):
        order = sorted(enumerate(step.chunks), key=lambda numbered: numbered[1].num_tokens > 1)
        batch = build_batch(Step([chunk for _, chunk in order]), block_size, loaded.device)
        if states is not None:
            batch.states = states.of_step([PartOfStep(i, chunk.start, chunk.num_tokens) for i, chunk in order])
        executor.forward(batch)
    limit = ATTENTION_TOLERANCE[loaded.dtype]
    if compared.largest <= limit:
        return None
    return f"attention would differ by {compared.largest:.1%} in a layer (allowed: {limit:.1%})"


@torch.inference_mode()
def fuse_checked(loaded: LoadedModel, block_size: int) -> bool:
    """Fuse the projections of a model, unless its logits would differ. Return whether any are."""
    step = prompt(min(PROMPT_TOKENS, loaded.max_model_len), loaded.vocab_size, block_size)
    num_blocks = len(step.chunks[0].sequence.blocks)
    executor = EagerExecutor.with_cache(loaded, num_blocks=num_blocks, block_size=block_size)
    number = 0

    def problem() -> str | None:
        nonlocal number
        want = executor.forward(build_batch(step, block_size, loaded.device)).clone()
        number = fuse_projections(loaded.model)
        found = difference(executor.forward(build_batch(step, block_size, loaded.device)), want)
        limit = tolerance(loaded.dtype)
        return None if found <= limit else f"the outputs would differ by {found:.1%} (allowed: {limit:.1%})"

    if is_usable("Fused projections", "each of them is a product of its own", problem):
        return number > 0
    separate_projections(loaded.model)
    return False


class _Compared:
    """Computes attention by the reference, and by another backend to compare."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.largest = 0.0  # difference; NaN stays

    def of_step(self, batch: Batch) -> StepAttention:
        reference, fast = ReferenceAttention(batch), self._backend(batch)

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, **scoring: Any
        ) -> torch.Tensor:
            copies = LayerCache(cache.keys.clone(), cache.values.clone())
            got = fast(query, key, value, copies, **scoring)
            want = reference(query, key, value, cache, **scoring)
            found = [difference(got, want)]
            found += [float((copy != kept).float().mean()) for copy, kept in zip(copies, cache, strict=True)]
            for one in found:
                self.largest = one if not one <= self.largest else self.largest
            return want

        return attend


@torch.inference_mode()
def sampling_problem(loaded: LoadedModel, sample_ids: SampleIds, apply_masks: ApplyMasks) -> str | None:
    """Return what is different from draws and masks in plain torch, if anything is."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(len(_DRAWS), loaded.vocab_size, generator=generator) * 3
    logits = numbers.to(loaded.device, loaded.dtype)
    logits[-1] = torch.inf
    for rows in (_DRAWS[:1], _DRAWS[:3], _DRAWS):  # each has kernels of its own
        some = logits[: len(rows)]
        got_ids, got_finite = sample_ids(some, rows)
        want_ids, want_finite = plain_sampling.sample_ids(some, rows)
        are_equal = (got_ids == want_ids) | ~want_finite.bool()
        if not bool((got_finite.bool() == want_finite.bool()).all()) or not bool(are_equal.all()):
            return f"of {len(rows)} draws, {int((~are_equal).sum())} would be others"
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (2, -(-loaded.vocab_size // 32)), dtype=np.uint32)
    masked, expected = (logits[:3].to(torch.float32, copy=True) for _ in range(2))
    apply_masks(masked, [0, 2], words)
    apply_masks_in_torch(expected, [0, 2], words)
    return None if torch.equal(masked, expected) else "masks of grammars would let other tokens come"
