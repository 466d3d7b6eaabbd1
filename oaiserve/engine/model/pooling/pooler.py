"""A model that turns texts into vectors or scores, loaded, and the engine loop's runner of it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from oaiserve.engine.model.pooling.attention import runs_of
from oaiserve.engine.model.pooling.heads import Head
from oaiserve.engine.pooling import Pooling
from oaiserve.engine.step import ChunkResult, Masks, OutOfMemory, Step, StepResult

BAD_VECTOR = "The model produced no usable numbers (NaN or infinity) for this request."


@dataclass(frozen=True, slots=True)
class LoadedPooler:
    """A model whose texts are computed whole, with its weights on the device."""

    layers: PreTrainedModel  # up to the hidden states
    head: Head
    activation: torch.nn.Module | None  # of scores; vectors have none
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    max_model_len: int  # the most tokens of a text
    longest: int  # that the model has positions for
    first_position: int  # of a text: RoBERTa's begin behind that of padding
    takes_types: bool  # whether token types tell the two texts of a pair apart
    pooling: Pooling

    @torch.inference_mode()
    def pool(self, ids: list[int], types: list[int], lengths: list[int]) -> torch.Tensor:
        """Return the vectors [texts, size] of texts that lie one behind the other, in float32."""
        vectors = self.head(self.hidden(ids, types, lengths), lengths)
        return vectors if self.activation is None else self.activation(vectors)

    def hidden(self, ids: list[int], types: list[int], lengths: list[int]) -> torch.Tensor:
        """Return the hidden states [T, hidden] of all tokens."""
        arguments: dict[str, Any] = {"token_type_ids": row(types, self.device)} if self.takes_types else {}
        first = self.first_position
        positions = [position for length in lengths for position in range(first, first + length)]
        hidden: torch.Tensor = self.layers(
            input_ids=row(ids, self.device),
            position_ids=row(positions, self.device),
            # A dummy with 4 dimensions, which keeps transformers from building a mask.
            attention_mask=torch.empty(1, 1, 1, 1, device=self.device),
            runs=runs_of(lengths),
            **arguments,
        ).last_hidden_state
        return hidden[0]


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
        """Compute the texts of a step. Texts of equal length lie side by side: attention takes them together."""
        order = sorted(range(len(step.chunks)), key=lambda index: step.chunks[index].num_tokens)
        ids: list[int] = []
        types: list[int] = []
        for index in order:
            sequence = step.chunks[index].sequence
            ids += sequence.token_ids
            first = sequence.prompt_len if sequence.second_start is None else sequence.second_start
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
