"""The maximum length of answers whose requests set none. The gateway imports this, so it imports no transformers."""

from __future__ import annotations

from collections.abc import Mapping

from oaiserve.config import EngineOptions


def default_limits(options: EngineOptions, params: Mapping[str, float | int]) -> dict[str, int]:
    """Return the limits of answers whose requests set none: the operator's, or else the model's."""
    if options.default_max_tokens is not None:
        return {"default_max_tokens": options.default_max_tokens}
    if "max_new_tokens" in params:  # as in transformers, this takes precedence over max_length
        return {"default_max_tokens": int(params["max_new_tokens"])}
    if "max_length" in params:
        return {"default_max_length": int(params["max_length"])}
    return {}
