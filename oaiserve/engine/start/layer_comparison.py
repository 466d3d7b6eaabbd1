"""Compares a user's model with transformers' code, layer by layer in float32, for `oaiserve doctor MODEL`.

Comparing executors can't reveal a mistake in the description that they share, and a start doesn't use transformers'
code. In float32, two correct computations of a layer differ only in their last digits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from oaiserve.checkpoints.source import ModelSource
from oaiserve.config import EngineOptions
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.rehearsal import prompt_of
from oaiserve.engine.model.states import StateChunk, States
from oaiserve.engine.start.compare import difference_by_row
from oaiserve.engine.start.described import Described, describe_model
from oaiserve.engine.start.load import load_weights, read_checkpoint
from oaiserve.engine.text.tokenizer import Tokenizer

LIMIT = 1e-3  # largest difference that rounding in float32 explains
OPTIONS = EngineOptions(device="cpu", dtype="float32", compile=False)
_BLOCK_SIZE = 16
_TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1969, two people walked on the Moon for 2 h 31 min. "
    "def area(r: float) -> float:\n    return 3.14159 * r ** 2\n Die Übung macht den Meister; 熟能生巧。"
)
_NUM_TOKENS = 96  # minimum number of tokens of the text
_LONGEST_WINDOW = 1024  # longest attention window that a comparison goes beyond; longer ones would take too long
_BEYOND_WINDOW = 16


class Comparison(NamedTuple):
    """The distance between two outputs of a part of the model, relative to their size, at the worst token."""

    part: str
    apart: float

    @property
    def is_right(self) -> bool:
        return self.apart <= LIMIT  # false for NaN


@torch.inference_mode()
def compare_layers(source: ModelSource) -> Iterator[Comparison]:
    """Compare the embedding, each layer but the last, and the logits. Raises NotKnown without a description.

    The model is in memory twice, in float32.
    """
    described = describe_model(source, OPTIONS)
    ids = token_ids(source, described)
    expected = transformers_states(source, ids, len(described.decoder.layers))
    yield from compared(own_states(described, ids), expected)


def token_ids(source: ModelSource, described: Described) -> list[int]:
    """Return the tokens that a comparison computes: more than fit into a window of attention, unless the window is
    long."""
    spec = described.spec
    attending = [layer.attention for layer in described.decoder.layers]
    parameters = [one.parameters for one in attending if one is not None]
    windows = [one.sliding_window or one.chunk or 0 for one in parameters]
    number = max([_NUM_TOKENS, *(window + _BEYOND_WINDOW for window in windows if window <= _LONGEST_WINDOW)])
    encode = Tokenizer.of(source.checkpoint).backend.encode
    ids: list[int] = encode(_TEXT * -(-number // _NUM_TOKENS) * 2, add_special_tokens=True).ids
    return [token_id for token_id in ids if token_id < spec.vocab_size][: min(number, spec.max_model_len)]


def compared(own: Iterable[Tensor], others: list[Tensor]) -> Iterator[Comparison]:
    """Compare each state as soon as it is computed, so that a caller can stop at the first difference."""
    remaining = iter(own)
    # Each layer of transformers returns what the next one reads. After the last one come the logits.
    for number, other in enumerate(others[:-1]):
        name = f"layer {number - 1}" if number else "embedding"
        yield Comparison(name, difference_by_row(next(remaining), other))
    *_, logits = remaining
    yield Comparison("logits", difference_by_row(logits, others[-1]))


def transformers_states(source: ModelSource, ids: list[int], num_layers: int) -> list[Tensor]:
    """Return the hidden states of all tokens before each layer of transformers' model, and the logits."""
    checkpoint = read_checkpoint(source, source.gguf_file or source.location)
    model = load_weights(checkpoint, torch.float32, attention="eager")
    model.eval()
    states: list[Tensor] = []

    def note(_: Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        states.append((inputs[0] if inputs else named["hidden_states"])[0].clone())

    lists = (module for module in model.modules() if isinstance(module, ModuleList) and len(module) == num_layers)
    for layer in next(lists, ()):
        layer.register_forward_pre_hook(note, with_kwargs=True)
    logits: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return [*states, logits]


def own_states(described: Described, ids: list[int]) -> Iterator[Tensor]:
    """Compute and yield the hidden states of all tokens, before the first layer and after each one, and the logits."""
    spec = described.spec
    num_blocks = -(-len(ids) // _BLOCK_SIZE)
    executor = ReferenceExecutor(
        described.decoder, dtype=torch.float32, device=spec.device, num_blocks=num_blocks, block_size=_BLOCK_SIZE
    )
    batch: Batch = build_batch(prompt_of(ids, _BLOCK_SIZE), _BLOCK_SIZE, spec.device)
    batch.logits_rows = torch.arange(len(ids))
    if spec.state_shapes:
        batch.states = States(spec.state_shapes, 1, spec.device).of_step([StateChunk(0, 0, len(ids))])
    yield from executor.steps(batch)
