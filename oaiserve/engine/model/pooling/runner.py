"""Runs the steps of a pooling model: each chunk is a whole text, and becomes a vector. Nothing is cached."""

from __future__ import annotations

from array import array

import torch

from oaiserve.engine.model.pooling.pooler import LoadedPooler
from oaiserve.engine.step import ChunkResult, Masks, OutOfMemory, Step, StepResult

BAD_VECTOR = "The model produced no usable numbers (NaN or infinity) for this request."


class PoolingRunner:
    """The engine loop's runner of a pooling model. A launch computes the step."""

    is_exact = False
    is_asynchronous = False
    kv_version = 0

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
        for row, index in enumerate(order):
            if usable[row]:
                results[index] = ChunkResult(vector=array("f", vectors[row].numpy().tobytes()))
        return StepResult(results)

    def draw(self, launched: StepResult, masks: Masks | None) -> None:
        """Do nothing: a pooled text draws no token."""

    def collect(self, launched: StepResult) -> StepResult:
        return launched
