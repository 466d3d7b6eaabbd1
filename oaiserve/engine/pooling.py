"""A pooling model's task and prompts, for routes: it turns texts into vectors or scores. Stdlib only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Task = Literal["generate", "embed", "score"]  # the use of a served model


@dataclass(frozen=True, slots=True)
class Pooling:
    """The task of a pooling model, and its settings in the files beside the weights."""

    task: Literal["embed", "score"]
    size: int  # of its vectors; 1 for `score`
    # Sizes to which its vectors can be cut, because it was trained for that: these, or any if there are none.
    # None: it was not.
    dimensions: tuple[int, ...] | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name: texts to put before a client's text
    default_prompt: str = ""  # the text of the one that is used if a request names none
