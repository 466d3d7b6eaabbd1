"""A model that turns texts into vectors or scores, loaded, and the engine loop's runner of it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from oaiserve.engine.request import PooledAs
from oaiserve.engine.sequences.step import ChunkResult, Masks, OutOfMemory, Step, StepResult
from oaiserve.engine.types.pooling import Pooling
from oaiserve.plugins.pooling.model.attention import runs_of
from oaiserve.plugins.pooling.model.heads import Head
from oaiserve.plugins.pooling.model.token_heads import TokenHeads

_NO_LAYERS = TokenHeads()
BAD_VECTOR = "The model produced no usable numbers (NaN or infinity) for this request."


class Forward(Protocol):
    """Computes the vectors [texts, size], or logits, of texts that follow each other, in float32."""

    def __call__(self, ids: list[int], types: list[int], lengths: list[int]) -> torch.Tensor: ...
    def hidden(self, ids: list[int], types: list[int], lengths: list[int]) -> torch.Tensor:
        """Return the hidden states [T, hidden] of all tokens, where a head makes the vectors from these."""
        ...

    def pooled(self, hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """Return the vectors [texts, size] of texts with these hidden states."""
        ...


@dataclass(frozen=True, slots=True)
class PackedForward:
    """Computes all texts of a step in one row, with packed attention."""

    layers: PreTrainedModel  # the model up to the hidden states
    head: Head
    first_position: int  # first position of a text; RoBERTa counts from after the padding's
    takes_types: bool  # Token types distinguish the two texts of a pair.

    def __call__(self, ids: list[int], types: list[int], lengths: list[int]) -> torch.Tensor:
        return self.pooled(self.hidden(ids, types, lengths), lengths)

    def pooled(self, hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        return self.head(hidden, lengths)

    def hidden(self, ids: list[int], types: list[int], lengths: list[int]) -> torch.Tensor:
        """Return the hidden states [T, hidden] of all tokens."""
        device = self.layers.device
        arguments: dict[str, Any] = {"token_type_ids": row(types, device)} if self.takes_types else {}
        first = self.first_position
        positions = [position for length in lengths for position in range(first, first + length)]
        hidden: torch.Tensor = self.layers(
            input_ids=row(ids, device),
            position_ids=row(positions, device),
            # A dummy with 4 dimensions, which keeps transformers from building a mask.
            attention_mask=torch.empty(1, 1, 1, 1, device=device),
            runs=runs_of(lengths),
            **arguments,
        ).last_hidden_state
        return hidden[0]


@dataclass(frozen=True, slots=True)
class OwnForward:
    """Computes each text alone with transformers' own forward.

    Several texts in one forward would need padding, and their bits would depend on the others.
    """

    model: PreTrainedModel
    head: Head | None  # head on the hidden states; if None, the model's own head returns logits
    takes_types: bool

    def __call__(self, ids: list[int], types: list[int], lengths: list[int]) -> torch.Tensor:
        if self.head is None:
            return torch.cat([output.float() for output in self._outputs(ids, types, lengths)])
        return self.pooled(self.hidden(ids, types, lengths), lengths)

    def hidden(self, ids: list[int], types: list[int], lengths: list[int]) -> torch.Tensor:
        assert self.head is not None
        return torch.cat(list(self._outputs(ids, types, lengths)))

    def pooled(self, hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        assert self.head is not None
        texts = zip(hidden.split(lengths), lengths, strict=True)
        return torch.cat([self.head(text, [length]) for text, length in texts])

    def _outputs(self, ids: list[int], types: list[int], lengths: list[int]) -> Iterator[torch.Tensor]:
        start = 0
        for length in lengths:
            yield self.output(ids[start : start + length], types[start : start + length])
            start += length

    def output(self, ids: list[int], types: list[int]) -> torch.Tensor:
        """Return the hidden states [T, hidden] of a text, or its logits [1, labels]."""
        self._use_attention_for(len(ids))
        device = self.model.device
        arguments: dict[str, Any] = {"token_type_ids": row(types, device)} if self.takes_types else {}
        output = self.model(input_ids=row(ids, device), **arguments)
        result: torch.Tensor = output.logits if self.head is None else output.last_hidden_state[0]
        return result

    def _use_attention_for(self, length: int) -> None:
        """Set BigBird's sparse attention for a long text. At the first short text, BigBird changes to full attention
        and never changes back."""
        layers: Any = self.model.base_model
        config = layers.config
        if hasattr(layers, "set_attention_type") and length > config.block_size * (5 + 2 * config.num_random_blocks):
            layers.set_attention_type(config.attention_type)


@dataclass(frozen=True, slots=True)
class LoadedPooler:
    model: PreTrainedModel
    forward: Forward
    activation: torch.nn.Module | None  # activation of scores; vectors have none
    vocab_size: int
    max_model_len: int  # the most tokens of a text
    longest: int  # longest text that the model has positions for
    pooling: Pooling
    token_heads: TokenHeads = _NO_LAYERS

    @torch.inference_mode()
    def pool(self, ids: list[int], types: list[int], lengths: list[int]) -> torch.Tensor:
        """Return the vectors [texts, size] of texts that follow each other, in float32."""
        vectors = self.forward(ids, types, lengths)
        return vectors if self.activation is None else self.activation(vectors)

    @torch.inference_mode()
    def pool_as(
        self, kinds: list[PooledAs], ids: list[int], types: list[int], lengths: list[int], left_out: frozenset[int]
    ) -> list[array[float]]:
        """Return the vector, weights or vectors of each text, see `Pooled`. Tokens of `left_out` have no weight."""
        hidden = self.forward.hidden(ids, types, lengths).split(lengths)
        whole = [place for place, kind in enumerate(kinds) if kind == "text"]
        vectors = iter(())
        if whole:
            texts = torch.cat([hidden[place] for place in whole])
            vectors = iter(self.forward.pooled(texts, [lengths[place] for place in whole]).cpu())
        results = []
        start = 0
        for kind, text, length in zip(kinds, hidden, lengths, strict=True):
            if kind == "token_weights":
                results.append(self.token_heads.weigh(ids[start : start + length], text, left_out))
            elif kind == "token_vectors":
                results.append(as_array(self.token_heads.vectors_of(text).cpu()))
            else:
                results.append(as_array(next(vectors)))
            start += length
        return results


def as_array(numbers: torch.Tensor) -> array[float]:
    """Return float32 numbers that are on the CPU."""
    return array("f", numbers.contiguous().numpy().tobytes())


def row(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([values], device=device)


class PoolingRunner:
    """Runs steps of whole texts, each of which becomes a vector. A launch computes the step; nothing is cached."""

    is_exact = False
    is_asynchronous = False

    def __init__(self, pooler: LoadedPooler, special_ids: frozenset[int] = frozenset()) -> None:
        """`special_ids` are those of tokens that are no words."""
        self._pooler = pooler
        self._special_ids = special_ids

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        raise AssertionError("a model that pools has no KV cache")

    def launch(self, step: Step) -> StepResult:
        """Compute the texts of a step, sorted so that attention computes texts of equal length together."""
        order = sorted(range(len(step.chunks)), key=lambda index: step.chunks[index].num_tokens)
        ids: list[int] = []
        types: list[int] = []
        for index in order:
            sequence = step.chunks[index].sequence
            ids += sequence.token_ids
            if sequence.second_start is None:
                first = sequence.prompt_len
            else:
                first = sequence.second_start
            types += [0] * first + [1] * (sequence.prompt_len - first)
        lengths = [step.chunks[index].num_tokens for index in order]
        kinds = [step.chunks[index].sequence.params.pooled_as for index in order]
        try:
            if {*kinds} == {"text"}:
                vectors = [as_array(vector) for vector in self._pooler.pool(ids, types, lengths).cpu()]
            else:
                vectors = self._pooler.pool_as(kinds, ids, types, lengths, self._special_ids)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(str(error)) from None
        results = [ChunkResult(error=BAD_VECTOR)] * len(order)
        for vector, index in zip(vectors, order, strict=True):
            if np.isfinite(np.frombuffer(vector, np.float32)).all():
                results[index] = ChunkResult(vector=vector)
        return StepResult(results)

    def draw(self, launched: StepResult, masks: Masks | None) -> None:
        """Do nothing: a pooled text draws no token."""

    def collect(self, launched: StepResult) -> StepResult:
        return launched
