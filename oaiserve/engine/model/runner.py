"""Runs steps: builds their batches, calls the model, samples. The only owner of the KV cache.

Steps are computed one after the other, on one stream: what a step writes, all later ones find.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from oaiserve.engine.model.attention import Backend, reference
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.cpu.attention import NativeAttention
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.graphs import DecodeGraphs, Replayed
from oaiserve.engine.model.load import LoadedModel
from oaiserve.engine.model.sampler import Choose, Sampling
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import ChunkResult, OutOfMemory, Step

BAD_LOGITS = "The model produced no usable numbers (NaN or infinity) for this request."
NOTHING_LEFT = f"{BAD_LOGITS} Or its allowed_token_ids, bad_words and min_tokens leave no token to choose."


class Executor(Protocol):
    """A way to run the model, with the KV cache that belongs to it."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, vocab] of `batch.logits_rows`; the caller may write into them, and the next call does."""

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """The keys and values of these blocks: (from, to)."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A step under way."""

    step: Step
    sampling: Sampling | Replayed
    sample_chunks: list[int]  # as in Batch
    prompt_rows: list[tuple[int, int, int]]
    # On a CUDA device: when it had this step's inputs, when the step had ended, and when the one before had.
    began: torch.cuda.Event | None
    ended: torch.cuda.Event | None
    ended_before: torch.cuda.Event | None


class ModelRunner:
    """`num_blocks` blocks of `block_size` tokens, on the model's device and in its dtype. `choose`: see `Sampling`."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int,
        block_size: int,
        backend: Backend = reference.attend,
        choose: Choose | None = None,
    ) -> None:
        self.is_asynchronous = loaded.device.type == "cuda"  # `launch` returns before the step has been computed
        self._device = loaded.device
        self._block_size = block_size
        self._executor: Executor = EagerExecutor(loaded, num_blocks=num_blocks, block_size=block_size, backend=backend)
        self._choose = choose
        self._next: NativeDecoder | NativeAttention | None = None
        self.graphs: DecodeGraphs | None = None  # of `forward`; for the steps that they can run
        # Of the step that was launched last: the ids that it draws, whose these are, and when it ends.
        self._drawn_ids: torch.Tensor | None = None
        self._drawn_rows: dict[Sequence, int] = {}
        self._ended: torch.cuda.Event | None = None

    def use(self, native: NativeDecoder | NativeAttention) -> None:
        """From the next step on, with all that has been computed. May be called from any thread, once."""
        self._next = native

    def launch(self, step: Step) -> Launched:
        """Waits for nothing on a CUDA device. Ids that are not known here are those that the step before draws. Raises
        OutOfMemory where the device has no memory for the step."""
        try:
            return self._launch(step)
        except torch.OutOfMemoryError as error:
            reason = str(error)
        # Only now is the exception gone, whose traceback kept the tensors of the step.
        torch.cuda.empty_cache()
        raise OutOfMemory(reason)

    @torch.inference_mode()
    def _launch(self, step: Step) -> Launched:
        if self._next is not None:
            self._switch(self._next)
        # What the host takes to make the inputs is no time of the step, if the device waits for them.
        began = torch.cuda.Event(enable_timing=True) if self._device.type == "cuda" else None
        if step.copies:
            self._executor.copy_blocks(step.copies)
            step.copies.clear()  # see Step
        sampling: Sampling | Replayed
        if self.graphs is not None and self.graphs.can_run(step):
            sampling = self.graphs.launch(step, self._drawn_ids, self._drawn_rows, began)
            sample_chunks, prompt_rows = list(range(len(step.chunks))), []
        else:
            batch = build_batch(step, self._block_size, self._device, self._drawn_rows)
            if began is not None:
                began.record()
            if len(batch.unknown_rows):
                assert self._drawn_ids is not None
                batch.input_ids[batch.unknown_rows] = self._drawn_ids[batch.drawn_rows]
            sample_chunks, prompt_rows = batch.sample_chunks, batch.prompt_rows
            sequences = [step.chunks[index].sequence for index in sample_chunks]
            sampling = Sampling(self.forward(batch), sequences, _known(step, batch), self._choose)
        ended_before, self._ended = self._ended, sampling.read_back.arrived
        self._drawn_ids = sampling.token_ids
        self._drawn_rows = {step.chunks[index].sequence: row for row, index in enumerate(sample_chunks)}
        return Launched(step, sampling, sample_chunks, prompt_rows, began, self._ended, ended_before)

    def collect(self, launched: Launched) -> list[ChunkResult]:
        """One result per chunk, in the step's order; waits until they are on the host."""
        step, sampled = launched.step, launched.sampling.wait()
        results = [ChunkResult() for _ in step.chunks]
        rows = zip(launched.sample_chunks, sampled.token_ids, sampled.are_finite, sampled.logprobs, strict=True)
        for index, token_id, is_finite, logprobs in rows:
            if is_finite:
                results[index].token_id, results[index].logprobs = token_id, logprobs
            else:
                results[index].error = NOTHING_LEFT if _masks(step.chunks[index].sequence) else BAD_LOGITS
        for index, first_row, num_rows in launched.prompt_rows:
            first = first_row - len(launched.sample_chunks)
            results[index].prompt_logprobs = sampled.known_logprobs[first : first + num_rows]
        if launched.began is not None and launched.ended is not None:
            step.device_ns = _ns_between(launched.began, launched.ended)
            if launched.ended_before is not None:
                step.device_gap_ns = _ns_between(launched.ended_before, launched.began)
        return results

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [R, vocab] of `batch.logits_rows`."""
        return self._executor.forward(batch)

    def _switch(self, native: NativeDecoder | NativeAttention) -> None:
        eager = self._executor
        assert isinstance(eager, EagerExecutor)
        native.adopt(list(eager.caches.values()), eager.num_used_blocks)
        if isinstance(native, NativeAttention):
            eager.backend, eager.caches = native.attend, native.caches
        else:
            self._executor = native
        torch.set_num_threads(native.torch_threads)
        self._next = None


def _known(step: Step, batch: Batch) -> list[tuple[int, int]]:
    """The tokens of prompts that `batch.prompt_rows` are about, and how many alternatives to each are wanted."""
    known: list[tuple[int, int]] = []
    for index, _, num_rows in batch.prompt_rows:
        sequence, start, *_ = step.chunks[index]
        num_top = sequence.params.prompt_logprobs or 0
        known += [(token_id, num_top) for token_id in sequence.token_ids[start + 1 : start + 1 + num_rows]]
    return known


def _ns_between(begin: torch.cuda.Event, end: torch.cuda.Event) -> int:
    return int(begin.elapsed_time(end) * 1e6)


def _masks(sequence: Sequence) -> bool:
    return bool(sequence.params.allowed_token_ids is not None or sequence.bad_words or sequence.params.min_tokens)
