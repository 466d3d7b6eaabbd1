"""Reads from a model's settings how long its sequences may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oaiserve.errors import StartupError

# These kinds scale every position by the longest sequence of the batch, so an answer would depend on other requests.
_LENGTH_DEPENDENT = {"dynamic", "longrope"}
MOST_POSITIONS = 2**20  # rotary tables have a row per position; for the largest heads, they take 1 GiB in total


def refuse_longer(max_model_len: int | None, limit: int) -> None:
    """Raise StartupError if requests may be longer than the model supports."""
    if max_model_len is not None and max_model_len > limit:
        raise StartupError(f"--max-model-len is {max_model_len}, but the model is good for {limit} tokens.")


def context_length(settings: Mapping[str, Any]) -> int:
    """Return the length of the longest sequence that the model computes in the same way as shorter ones."""
    limit = settings.get("max_position_embeddings") or settings.get("max_seq_len") or 2048
    limit = min(int(limit), MOST_POSITIONS)
    rope = settings.get("rope_parameters") or {}
    for parameters in (rope, *(of_layers for of_layers in rope.values() if isinstance(of_layers, dict))):
        if parameters.get("rope_type") in _LENGTH_DEPENDENT:
            limit = min(limit, int(parameters.get("original_max_position_embeddings") or limit))
    return limit
