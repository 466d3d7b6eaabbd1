"""Explains in sentences which part of a prompt was read again or restored, why, how long that took, and what helps."""

from __future__ import annotations

from collections.abc import Mapping

from oaiserve.facts.record import ReadAgain, RequestRecord, WaitReason
from oaiserve.facts.times import duration

LEAST_SHARE = 0.1  # There is a sentence from this share of the prompt tokens on.

_CHANGED = {
    ReadAgain.MODEL: "the model or adapter differs from the one {before}",
    ReadAgain.SALT: "the cache_salt or the API key differs from the one {before}",
    ReadAgain.TOOLS: "the tools differ from those {before}{place}",
    ReadAgain.SYSTEM: "the system message differs from the one {before}",
    ReadAgain.OPTIONS: "a variable of the chat template, such as that for thinking, differs from the one {before}",
    ReadAgain.MESSAGE: "an earlier message differs from the one {before}{place}",
    ReadAgain.IMAGE: "an image or a sound differs from the one {before}{place}",
    ReadAgain.TEXT: "the chat template writes an earlier part differently than {before}",
    ReadAgain.OTHER_REPLICA: "another replica has them, and the gateway chose this one because of its load",
    ReadAgain.NOT_YET: "the same prompt {before} was still being read",
    ReadAgain.OFF: "this server or this request uses no prefix cache",
    ReadAgain.STATE: "the cache has their blocks, but no state of this model's layers at the end of these",
}
HELPS = {
    ReadAgain.TOOLS: "Send the tools in the same order, and new ones last.",
    ReadAgain.SYSTEM: "Put what changes, such as a clock, at the end of the conversation.",
    ReadAgain.MESSAGE: "Append messages, and leave the earlier ones as they were.",
    ReadAgain.EVICTED: "A larger --kv-cache-memory, --prefix-cache-dir on a CPU or --kv-offload on a GPU keeps more.",
    ReadAgain.OFF: "Start the server without --no-prefix-cache, and ask for no prompt_logprobs.",
}
_CAME_FROM = {WaitReason.PREFIX_RESTORED: "host memory", WaitReason.PREFIX_READ: "disk"}
_PLACES = {ReadAgain.TOOLS: "tool", ReadAgain.MESSAGE: "message", ReadAgain.IMAGE: "image or sound"}


def read_again(record: RequestRecord) -> str | None:
    """Return the sentence, or None if little was read again."""
    if said := record.account.said_of("read_again"):
        return " ".join(said)
    reason = record.read_again_reason
    if reason is None or record.read_again_tokens < LEAST_SHARE * record.prompt_tokens:
        return None
    number = f"{record.read_again_tokens:,} of {record.prompt_tokens:,} prompt tokens were read again"
    sentence = f"{number}, which took {duration(record.read_again_ns)}: {why(record.reuse, reason)}."
    helps = HELPS.get(reason)
    return sentence if helps is None else f"{sentence} {helps}"


def restored(record: RequestRecord) -> str | None:
    """Return the sentence on tokens that were restored from host memory or disk, or None if there are none."""
    account = record.account
    if not account.num_restored_tokens:
        return None
    number = f"{account.num_restored_tokens:,} of {record.prompt_tokens:,} prompt tokens"
    for reason, place in _CAME_FROM.items():
        if reason in account.waits_ns:
            return f"{number} came back from {place}, for which it waited {duration(account.waits_ns[reason])}."
    return f"{number} came back from below the prefix cache, without a wait."


def why(reuse: Mapping[str, str | int], reason: ReadAgain) -> str:
    """Return why tokens were read again, in words. `reuse` has the facts of the record."""
    if reason is ReadAgain.EVICTED:
        if "evicted_ns" not in reuse:
            return "other requests took the place of their blocks"
        taker = reuse["evicted_for"]
        by = f"request {taker}" if taker else "blocks that were read from disk"
        return f"{by} took the place of their blocks {duration(int(reuse['evicted_ns']))} before"
    before = f"{duration(int(reuse['age_ns']))} before" if "age_ns" in reuse else "before"
    place = ""
    if reason in _PLACES and "place" in reuse:
        place = f", from {_PLACES[reason]} {int(reuse['place']) + 1} on"
    changed = _CHANGED[reason].format(before=before, place=place)
    common = int(reuse.get("common_tokens", 0))
    if reason in _PLACES or reason in (ReadAgain.SYSTEM, ReadAgain.OPTIONS, ReadAgain.TEXT):
        changed += f", at the prompt's token {common + 1:,}"
    return changed
