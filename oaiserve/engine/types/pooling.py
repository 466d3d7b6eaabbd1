"""A pooling model's task and prompts, for routes. Such a model turns texts into vectors or scores, or speech into text.

Stdlib only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from oaiserve.checkpoints.gguf import GgufHead, architecture

Task = Literal["generate", "embed", "score", "transcribe"]  # the use of a served model


@dataclass(frozen=True, slots=True)
class Pooling:
    """The task of a pooling model, and its settings from the files next to the weights."""

    task: Literal["embed", "score", "transcribe"]
    size: int  # size of its vectors; 1 for `score`, and 0 for `transcribe`, where it varies
    # Sizes to which its vectors can be cut because it was trained for that; if empty, any size. None: it was not
    # trained for smaller sizes.
    dimensions: tuple[int, ...] | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)  # keyed by name: prefixes of a client's text
    default_prompt: str = ""  # the prompt to use if a request names none
    has_token_weights: bool = False  # whether it can weight the tokens of a text, for example for keyword search
    token_size: int | None = None  # size of a token's vector; None: the model makes none
    # The text that a reranker reads for a pair, with {query} and {document} in it. "": it reads two separate texts.
    pair_template: str = ""


# The meaning of the pooling type's numbers in GGUF files.
GGUF_MODES = {1: "mean", 2: "cls", 3: "lasttoken"}
GGUF_RANK = 4
_ENCODERS = {"bert", "nomic-bert", "jina-bert-v2", "modern-bert", "gemma-embedding"}
_OUTPUTS = ("cls.output.weight", "cls.weight")  # either of these makes a reranker's score, a single number


def gguf_task(head: GgufHead) -> Task:
    """Return the task that a GGUF file's metadata name, or else the task that its tensors imply."""
    values = head.values
    name = architecture(values)
    kind = values.get(f"{name}.pooling_type")
    if kind == GGUF_RANK or (kind is None and has_score(head)):
        return "score"
    if kind in tuple(GGUF_MODES) or name in _ENCODERS:
        return "embed"
    return "generate"


def has_score(head: GgufHead) -> bool:
    """Return whether a GGUF file contains the output layer of a reranker. llama.cpp's converter names no pooling for
    rerankers that are encoders, and users name one when they start it."""
    shapes = (tensor.shape for name, tensor in head.tensors.items() if name in _OUTPUTS)
    return any(shape[:-1] in ((), (1,)) for shape in shapes)
