"""Why the prefix cache did not have the prompt of an earlier message, in the form of Anthropic's `diagnostics`."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from oaiserve.facts.record import ReadAgain
from oaiserve.routes.prompt_reuse import PromptReuse

CacheMissType = Literal[
    "model_changed",
    "system_changed",
    "tools_changed",
    "messages_changed",
    "previous_message_not_found",
    "unavailable",
]
_TYPES: dict[ReadAgain, CacheMissType] = {
    ReadAgain.MODEL: "model_changed",
    ReadAgain.SYSTEM: "system_changed",
    ReadAgain.TOOLS: "tools_changed",
    ReadAgain.MESSAGE: "messages_changed",
    ReadAgain.IMAGE: "messages_changed",
}


class CacheMissReason(msgspec.Struct):
    """The first part of the prompt that differs from the earlier one, and what that cost."""

    type: CacheMissType
    cache_missed_input_tokens: int | UnsetType = UNSET


class Diagnostics(msgspec.Struct):
    """Why the prompt was not read from the cache. null: it is not known yet."""

    cache_miss_reason: CacheMissReason | None = None


def diagnostics_of(reuse: PromptReuse) -> Diagnostics | None:
    """Return the comparison with the message that the client named; None if it named none, or nothing differs."""
    if not reuse.compare_with:
        return None
    if (compared := reuse.by_prompt.get(0)) is None:
        return Diagnostics()
    if not reuse.is_known:
        return Diagnostics(CacheMissReason("unavailable" if reuse.is_one_of_several else "previous_message_not_found"))
    if compared.change is None:
        return None
    kind = _TYPES.get(compared.change.reason)
    if kind is None:  # For example, its blocks were evicted, or another replica has them.
        return Diagnostics(CacheMissReason("unavailable"))
    return Diagnostics(CacheMissReason(kind, compared.num_missed))
