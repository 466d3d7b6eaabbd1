"""A model that turns texts into vectors or scores, loaded, and the engine loop's runner of it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from oaiserve.engine.pooling import Pooling
from oaiserve.engine.sequences.step import ChunkResult, Masks, OutOfMemory, Step, StepResult
from oaiserve.plugins.pooling.model.attention import runs_of
from oaiserve.plugins.pooling.model.heads import Head

BAD_VECTOR = "The model produced no usable numbers (NaN or infinity) for this request."


class Forward(Protocol):
    """Computes the vectors [texts, size], or logits, of texts that follow each other, in float32."""

    def __call__(self, ids: list[int], types: list[int], lengths: list[int]) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class PackedForward:
    """Computes all texts of a step in one row, with packed attention."""

    layers: PreTrainedModel  # the model up to the hidden states
    head: Head
    first_position: int  # first position of a text; RoBERTa counts from after the padding's
    takes_types: bool  # Token types distinguish the two texts of a pair.

    def __call__(self, ids: list[int], types: list[int], lengths: list[int]) -> torch.Tensor:
        return self.head(self.hidden(ids, types, lengths), lengths)

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
        outputs = []
        start = 0
        for length in lengths:
            end = start + length
            output = self.output(ids[start:end], types[start:end])
            outputs.append(output.float() if self.head is None else self.head(output, [length]))
            start = end
        return torch.cat(outputs)

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

    @torch.inference_mode()
    def pool(self, ids: list[int], types: list[int], lengths: list[int]) -> torch.Tensor:
        """Return the vectors [texts, size] of texts that follow each other, in float32."""
        vectors = self.forward(ids, types, lengths)
        return vectors if self.activation is None else self.activation(vectors)


def row(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([values], device=device)


class PoolingRunner:
    """Runs steps of whole texts, each of which becomes a vector. A launch computes the step; nothing is cached."""

    is_exact = False
    is_asynchronous = False

    def __init__(self, pooler: LoadedPooler) -> None:
        self._pooler = pooler

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
        try:
            vectors = self._pooler.pool(ids, types, [step.chunks[index].num_tokens for index in order]).cpu()
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(str(error)) from None
        usable = vectors.isfinite().all(dim=1).tolist()
        results = [ChunkResult(error=BAD_VECTOR)] * len(order)
        for place, index in enumerate(order):
            if usable[place]:
                results[index] = ChunkResult(vector=array("f", vectors[place].numpy().tobytes()))
        return StepResult(results)

    def draw(self, launched: StepResult, masks: Masks | None) -> None:
        """Do nothing: a pooled text draws no token."""

    def collect(self, launched: StepResult) -> StepResult:
        return launched
