"""Renders the account of one request as a page of text, which /debug/requests/{id} shows in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from textwrap import wrap
from typing import Any

COLUMNS = 80
BAR_COLUMNS = 40

Entry = Mapping[str, Any]


def page(entry: Entry) -> str:
    """Return the page for `entry`, the route's JSON. No line is longer than COLUMNS."""
    lines = [*_head(entry), "", *_phases(entry), ""]
    for sentence in entry["explanation"]:  # why it took so long
        lines += wrap(sentence, COLUMNS, subsequent_indent="    ", break_on_hyphens=False)
    lines += [*([""] if entry["explanation"] else []), *_engine(entry), *_events(entry), *_neighbours(entry)]
    return "".join(f"{line if len(line) <= COLUMNS else line[: COLUMNS - 3] + '...'}\n" for line in lines)


def _head(entry: Entry) -> Iterable[str]:
    ended = [entry["outcome"], entry["status"], entry["error_type"], *entry["finish_reasons"]]
    kind = "streamed" if entry["stream"] else "whole"
    yield f"{entry['operation']} {entry['model']}, {kind}: {' '.join(str(word) for word in ended if word)}"
    yield f"request     {entry['request_id']}"
    yield f"trace       {entry['trace_id']}"
    if entry["client"] is not None:
        yield f"client      {entry['client']}"
    received = datetime.fromtimestamp(entry["received_unix_ns"] / 1e9, UTC)
    yield f"received    {received:%Y-%m-%d %H:%M:%S}.{received.microsecond // 1000:03d} UTC"
    ttft_ns = entry["time_to_first_token_ns"]
    first_token = f", first token after {_ms(ttft_ns)}" if ttft_ns is not None else ""
    yield f"duration    {_ms(entry['duration_ns'])}{first_token}"
    if (told := entry["forecast"])["is_calibrated"]:
        first, end = (f"{_ms(told[f'{of}_ns'])} (to {_ms(told[f'{of}_high_ns'])})" for of in ("first_token", "end"))
        yield f"forecast    first token after {first}, end after {end}"
    tokens = f"{entry['prompt_tokens']} prompt ({entry['cached_tokens']} cached)"
    yield f"tokens      {tokens}, {entry['completion_tokens']} generated"
    if (drafted := entry["num_draft_tokens"]) > 0:
        accepted = entry["num_accepted_tokens"]
        yield f"drafts      {drafted} tokens: {accepted} accepted, {drafted - accepted} rejected"
    if (grammar := entry["grammar"]) is not None:
        took = "not compiled"
        if grammar["compile_ns"] is not None:
            took = f"compiled in {_ms(grammar['compile_ns'])} ({grammar['cache']})"
        yield f"grammar     {grammar['kind']}, {took}"
        yield f"            masked draws {grammar['num_masked_draws']}, forced tokens {grammar['num_forced_tokens']}"
    if entry["tool_calls"]:
        calls = ", ".join(f"{number} {_words(outcome)}" for outcome, number in entry["tool_calls"].items())
        yield f"tool calls  {calls}"


def _phases(entry: Entry) -> Iterable[str]:
    duration_ns = max(1, entry["duration_ns"])
    for phase in entry["phases"]:
        start_ns, end_ns = phase["start_ns"], phase["start_ns"] + phase["duration_ns"]
        start = min(start_ns * BAR_COLUMNS // duration_ns, BAR_COLUMNS - 1)
        end = max(-(-end_ns * BAR_COLUMNS // duration_ns), start + 1)  # at least one column, so that it is seen
        bar = (" " * start + "#" * (end - start)).ljust(BAR_COLUMNS)
        yield f"{_words(phase['name']):<13}{_ms(phase['duration_ns']):>15}{phase['share']:>7.1%}  |{bar}|"


def _engine(entry: Entry) -> Iterable[str]:
    """Return the lines about the engine: waits, preemptions, gaps between events and steps."""
    waits = ", ".join(
        f"{_words(reason)} {_ms(wait_ns)}" for reason, wait_ns in entry["queue_waits_ns"].items() if wait_ns
    )
    if waits:
        yield f"waited for  {waits}"
    if entry["num_preemptions"]:
        yield f"preemptions {entry['num_preemptions']}, stalled for {_ms(entry['stalled_ns'])}"
    if (gaps := entry["token_gaps"]) is not None:
        yield f"event gaps  p50 {_ms(gaps['p50_ns'])}, p99 {_ms(gaps['p99_ns'])}, max {_ms(gaps['max_ns'])}"
        yield f"            {entry['mean_event_tokens']:.1f} tokens in an event on average"
    if (steps := entry["steps"]) is not None:
        mean = f"{steps['mean_sequences']:.1f} sequences and {steps['mean_tokens']:.1f} tokens"
        yield f"steps       {steps['first']} to {steps['last']}, {mean} each"
        between = f", between them {_ms(steps['between_ns'])}" if steps["between_ns"] is not None else ""
        yield f"            in the model {_ms(steps['model_ns'])}{between}"


def _events(entry: Entry) -> Iterable[str]:
    if entry["events"]:
        yield from ("", "events, since it was received")
    for event in entry["events"]:
        choice = "" if event["choice"] is None else f"choice {event['choice']}  "
        details = " ".join(
            f"{_words(name.removesuffix('_ns'))} {_ms(value) if name.endswith('_ns') else value}"
            for name, value in event["details"].items()
        )
        yield f"{_ms(event['at_ns']):>15}  {_words(event['name']):<17} {choice}{details}".rstrip()
    if entry["num_events_dropped"]:
        yield f"                 and {entry['num_events_dropped']} more"


def _neighbours(entry: Entry) -> Iterable[str]:
    if entry["neighbours"]:
        yield from ("", f"shared steps with {entry['num_neighbours']} of the last requests")
    for other in entry["neighbours"]:
        tokens = f"{other['prompt_tokens']} + {other['completion_tokens']} tokens"
        yield f"{other['num_shared_steps']:>6} steps  {other['operation']}, {tokens}, {other['request_id']}"


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:.3f} ms"


def _words(name: str) -> str:
    return name.replace("_", " ")
