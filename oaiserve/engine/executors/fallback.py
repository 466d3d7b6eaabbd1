"""The fallback executor: transformers' own code computes the steps of a model that has no description.

It uses only that code's public interface: a model's forward, and the cache that forward creates for a sequence. To the
engine, such a model has no KV cache. Its layers have a state per sequence instead, which is transformers' cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.states import StateChunk, StepStates


class NoCache(ValueError):
    """A model's forward cannot continue from the cache that it returns."""


class CachedForward:
    """The forward of a model over one sequence, whose earlier tokens are in a cache."""

    _cache_name: str  # name of both the argument and the output

    def __init__(self, model: Module) -> None:
        self.model = model
        self._parameters = signature(model.forward).parameters.keys()

    def __call__(self, text: Tensor, start: int, cache: Any, rows: list[int]) -> tuple[Tensor, Any]:
        """Compute tokens from position `start` on: ids int64 [T], or their embeddings [T, hidden size].

        `cache` has the tokens before them and may be changed; None if there are none. Returns the logits
        [len(rows), vocab] of these rows of the text, and the cache with all tokens. Raises NoCache.
        """
        arguments: dict[str, Any] = {"inputs_embeds" if text.is_floating_point() else "input_ids": text[None]}
        arguments["use_cache"] = True
        if "position_ids" in self._parameters:  # Some models derive wrong positions from their caches.
            arguments["position_ids"] = torch.arange(start, start + len(text), device=text.device)[None]
        indices = torch.tensor(rows or [0], device=text.device)
        if "logits_to_keep" in self._parameters:
            arguments["logits_to_keep"] = indices
        if cache is not None:
            arguments[self._cache_name] = cache
        output = self.model(**arguments)
        # The cache's name differs between models and versions of transformers.
        names = [name for name in output if name in self._parameters]
        if len(names) != 1:
            raise NoCache("the forward of its code returns no cache that it takes again")
        (self._cache_name,) = names
        logits = output["logits"][0]
        if "logits_to_keep" not in self._parameters:
            logits = logits[indices]
        return logits[: len(rows)], output[self._cache_name]


class Caches:
    """The caches of sequences, stored like states: see `KeptStates`."""

    def __init__(self, num_sequences: int) -> None:
        self.of_sequences: list[Any] = [None] * num_sequences

    @torch.inference_mode()
    def copy(self, copies: Iterable[tuple[int, int]]) -> None:
        for source, target in copies:
            self.of_sequences[target] = deepcopy(self.of_sequences[source])

    def of_step(self, parts: list[StateChunk]) -> StepStates:
        return StepStates({}, slice(0), 0, places=[part.state for part in parts])


class _Part(NamedTuple):
    """The chunk of one sequence, and the rows whose logits are needed."""

    text: Tensor
    start: int
    place: int
    rows: list[int]


class FallbackExecutor:
    """Computes the sequences of a step one by one. The runner uses `caches` as its states."""

    is_exact = False  # matrix products round differently for different numbers of rows

    def __init__(self, forward: CachedForward, num_sequences: int, *, continues_chunks: bool = True) -> None:
        """Reserve the caches of `num_sequences`. Without `continues_chunks`, the model's code accepts only one token at
        a time after the first chunk."""
        self.caches = Caches(num_sequences)
        self.weight_bytes = sum(each.nbytes for each in (*forward.model.parameters(), *forward.model.buffers()))
        self._forward = forward
        self._continues_chunks = continues_chunks

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Return the logits [R, vocab] of `batch.logits_rows` in the model's dtype."""
        assert batch.states is not None
        drawing = set(batch.sample_chunks)
        num_predicted = {chunk: number for chunk, _, number in batch.prompt_rows}
        texts = self._texts(batch).split(batch.query_lens)
        draws: list[Tensor] = []
        predictions: list[Tensor] = []  # logits of prompt tokens
        for chunk, (text, end, place) in enumerate(zip(texts, batch.context_lens, batch.states.places, strict=True)):
            number = num_predicted.get(chunk, 0)
            last = [len(text) - 1] if chunk in drawing else []
            logits = self._computed(_Part(text, end - len(text), place, [*range(number), *last]))
            predictions.append(logits[:number])
            draws.append(logits[number:])
        return torch.cat([*draws, *predictions])

    def _texts(self, batch: Batch) -> Tensor:
        """Return the ids [T] of a batch. With media, return embeddings [T, hidden size] with the media's vectors."""
        if (media := batch.media) is None:
            return batch.input_ids
        ids = batch.input_ids.index_fill(0, media.rows, 0)  # The ids of images may be outside the vocabulary.
        embeddings: Tensor = self._forward.model.get_input_embeddings()(ids)  # type: ignore[operator]
        return embeddings.index_copy(0, media.rows, media.vectors.to(embeddings.dtype))

    def _computed(self, part: _Part) -> Tensor:
        """Compute a chunk, and return the logits [len(rows), vocab] of its rows."""
        caches = self.caches.of_sequences
        cache = caches[part.place] if part.start else None
        size = len(part.text) if self._continues_chunks or not part.start else 1
        logits_of_steps: list[Tensor] = []
        for first, piece in zip(range(0, len(part.text), size), part.text.split(size), strict=True):
            rows = [row - first for row in part.rows if 0 <= row - first < size]
            logits, cache = self._forward(piece, part.start + first, cache, rows)
            logits_of_steps.append(logits)
        caches[part.place] = cache
        return torch.cat(logits_of_steps)

    def prepare(self, adapter: Adapter) -> Adapter:
        """Raise NotImplementedError, because adapters would have to change the model's modules."""
        raise NotImplementedError("transformers' own code takes no adapters in a step")

    @property
    def block_tensors(self) -> list[torch.Tensor]:
        return []

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Do nothing, because blocks only count tokens."""
