"""Explains in sentences that an answer ended in a loop, and what helps against it."""

from __future__ import annotations

from oaiserve.facts.record import RequestRecord

USUAL_PENALTY = 1.1  # Several publishers of small models recommend it.


def looped(record: RequestRecord) -> str | None:
    """Return sentences on the loop at an answer's end, or None if there is none."""
    account = record.account
    if not account.num_loops:
        return None
    answer = "an answer" if account.num_choices > 1 else "the answer"
    repeated = f"The last {account.loop_tokens:,} tokens of {answer} repeat {account.loop_period_tokens:,}"
    return f"{repeated} token{'s' * (account.loop_period_tokens > 1)} again and again. {_advice(record)}"


def _advice(record: RequestRecord) -> str:
    stops = '"repetition_detection": true ends such an answer.'
    penalty = record.sampling.get("repetition_penalty", 1.0)
    if penalty > 1:
        more = f"A repetition_penalty a little above its {penalty:g}, or a larger model, makes this rarer"
    elif "repetition_penalty" in record.params:
        more = f"The request set repetition_penalty to {penalty:g}: a model's own, or {USUAL_PENALTY}, makes this rarer"
    elif record.sampling.get("temperature") == 0:
        more = f"A repetition_penalty of {USUAL_PENALTY}, or a temperature above 0, makes this rarer"
    else:
        more = f"A repetition_penalty of {USUAL_PENALTY} makes this rarer"
    return f"{more}; {stops}"
