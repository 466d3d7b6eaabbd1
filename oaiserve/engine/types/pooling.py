"""A pooling model's task and prompts, for routes: it turns texts into vectors or scores, or speech into text.

Stdlib only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from oaiserve.checkpoints.gguf import GgufHead, architecture

Task = Literal["generate", "embed", "score", "transcribe"]  # the use of a served model


@dataclass(frozen=True, slots=True)
class Pooling:
    """The task of a pooling model, and its settings in the files next to the weights."""

    task: Literal["embed", "score", "transcribe"]
    size: int  # size of its vectors; 1 for `score`, and 0 for `transcribe`, where it varies
    # Sizes to which its vectors can be cut, because it was trained for that: these, or any if there are none.
    # None: it was not trained for smaller sizes.
    dimensions: tuple[int, ...] | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)  # keyed by name: prefixes of a client's text
    default_prompt: str = ""  # text of the prompt that is used if a request names none
    has_token_weights: bool = False  # whether it can weigh the tokens of a text, as for a search by words
    token_size: int | None = None  # size of the vectors of tokens; None: the model makes none
    # The text that a reranker reads for a pair, with {query} and {document} in it. "": it reads the two texts.
    pair_template: str = ""


# What the numbers of a GGUF file's pooling type mean.
GGUF_MODES = {1: "mean", 2: "cls", 3: "lasttoken"}
GGUF_RANK = 4
_ENCODERS = {"bert", "nomic-bert", "jina-bert-v2", "modern-bert", "gemma-embedding"}
_OUTPUTS = ("cls.output.weight", "cls.weight")  # Either makes the score of a reranker, which is one number.


def gguf_task(head: GgufHead) -> Task:
    """Return the task that a GGUF file's metadata name, or else that of its tensors."""
    values = head.values
    name = architecture(values)
    kind = values.get(f"{name}.pooling_type")
    if kind == GGUF_RANK or (kind is None and has_score(head)):
        return "score"
    if kind in tuple(GGUF_MODES) or name in _ENCODERS:
        return "embed"
    return "generate"


def has_score(head: GgufHead) -> bool:
    """Return whether a GGUF file has the output of a reranker. llama.cpp's converter names no pooling for an encoder's,
    and its users name one when they start it."""
    shapes = (tensor.shape for name, tensor in head.tensors.items() if name in _OUTPUTS)
    return any(shape[:-1] in ((), (1,)) for shape in shapes)
