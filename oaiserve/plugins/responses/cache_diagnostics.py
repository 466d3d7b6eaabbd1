"""Why the prefix cache did not have the prompt of an earlier response, in the form of OpenAI's
`prompt_cache_diagnostics`."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from oaiserve.facts.record import ReadAgain
from oaiserve.routes.dialects.reasoning import EFFORTS, SWITCHES
from oaiserve.routes.prompt_reuse import PromptReuse

CacheMissReason = Literal[
    "model_changed",
    "prompt_cache_key_changed",
    "tools_changed",
    "text_format_changed",
    "reasoning_effort_changed",
    "verbosity_changed",
    "context_compacted",
    "input_changed",
    "service_tier_changed",
]
_REASONS: dict[ReadAgain, CacheMissReason] = {
    ReadAgain.MODEL: "model_changed",
    ReadAgain.SALT: "prompt_cache_key_changed",
    ReadAgain.TOOLS: "tools_changed",
    ReadAgain.SYSTEM: "input_changed",
    ReadAgain.MESSAGE: "input_changed",
    ReadAgain.IMAGE: "input_changed",
    ReadAgain.TEXT: "input_changed",
}
# By the variable of the chat template that changed. A schema changes a prompt only where it makes the model reason,
# other settings only where the template reads them, and the service tier never.
_OPTIONS: dict[str, CacheMissReason] = {
    **dict.fromkeys((*SWITCHES, *EFFORTS), "reasoning_effort_changed"),
    "verbosity": "verbosity_changed",
    "opening": "text_format_changed",
}


class PromptCacheDiagnostics(msgspec.Struct):
    """Whether the cache had the prompt of the compared response, and if not, which part of the prompt differs."""

    type: Literal["cache_hit", "cache_miss", "comparison_response_not_found", "unavailable"]
    reason: CacheMissReason | UnsetType = UNSET
    cache_missed_tokens: int | UnsetType = UNSET
    comparison_reusable_tokens: int | UnsetType = UNSET


def diagnostics_of(reuse: PromptReuse, *, is_compacted: bool) -> PromptCacheDiagnostics | UnsetType:
    """Return the comparison with the response that the client named, or UNSET if it named none. A prompt that begins
    with a summary `is_compacted`."""
    compared = reuse.by_prompt.get(0)
    if not reuse.compare_with or compared is None:
        return UNSET
    if not reuse.is_known:
        return PromptCacheDiagnostics("unavailable" if reuse.is_one_of_several else "comparison_response_not_found")
    if (change := compared.change) is None:
        return PromptCacheDiagnostics("cache_hit")
    is_option = change.reason is ReadAgain.OPTIONS
    reason = _OPTIONS.get(change.option, "input_changed") if is_option else _REASONS.get(change.reason)
    if reason is None:  # For example, its blocks were evicted, or another replica has them.
        return PromptCacheDiagnostics("unavailable")
    if is_compacted and reason == "input_changed":
        reason = "context_compacted"
    return PromptCacheDiagnostics("cache_miss", reason, compared.num_missed, compared.num_common)
