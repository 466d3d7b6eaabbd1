"""A run as a trace that Perfetto's viewer and trace processor open: Chrome's JSON, with times in microseconds."""

from __future__ import annotations

from typing import Any

from oaiserve.plugins.runs.turns import Run, ShownTurn

PROCESS = 1
GAP_NAMES = {"tools": "tools", "user": "waiting for the user"}


def trace_of(run: Run) -> dict[str, Any]:
    """Return the trace: a thread for each agent or conversation, with its turns, their phases, and what lies between
    them. Requests of one conversation that overlap each get a separate thread."""
    events = [_named("process_name", PROCESS, run.run_id)]
    numbers: dict[tuple[str, int], int] = {}
    free_at_ns: dict[str, list[int]] = {}  # keyed by lane: for each thread, the end of its last slice
    for shown in run.turns:
        turn = shown.turn
        ends = free_at_ns.setdefault(turn.lane, [])
        gap_ns = 0 if shown.gap is None else shown.gap.duration_ns
        began_ns = turn.started_unix_ns - gap_ns
        track = next((index for index, end_ns in enumerate(ends) if end_ns <= began_ns), len(ends))
        ends[track : track + 1] = [turn.ended_unix_ns]
        key = turn.lane, track
        if key not in numbers:
            numbers[key] = len(numbers) + 1
            kind = "subagent" if turn.agent else "conversation"
            name = f"{kind} {run.lanes.index(turn.lane) + 1}"
            events.append(_named("thread_name", numbers[key], name if track == 0 else f"{name}, request {track + 1}"))
        events += _slices(run, shown, numbers[key])
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"run_id": run.run_id, "model": run.model}}


def _slices(run: Run, shown: ShownTurn, thread: int) -> list[dict[str, Any]]:
    turn = shown.turn
    since_ns = turn.started_unix_ns
    slices = []
    if shown.gap is not None:
        gap_ns = shown.gap.duration_ns
        slices.append(_slice(run, thread, GAP_NAMES[shown.gap.kind], since_ns - gap_ns, gap_ns))
    arguments = {
        name: getattr(turn, name)
        for name in (
            *("request_id", "trace_id", "outcome", "prompt_tokens", "cached_tokens", "read_again_tokens"),
            *("read_again_reason", "written_tokens", "completion_tokens", "num_tool_calls"),
        )
    } | {f"context_{part}_tokens": number for part, number in shown.context_tokens.items()}
    slices.append(_slice(run, thread, "turn", since_ns, turn.duration_ns, **arguments))
    for name, phase_ns, *_ in turn.phases:
        slices.append(_slice(run, thread, str(name), since_ns, int(phase_ns)))
        since_ns += int(phase_ns)
    return slices


def _slice(run: Run, thread: int, name: str, since_ns: int, duration_ns: int, **arguments: object) -> dict[str, Any]:
    """Return a slice. Times count from the start of the run, as a float of Unix time would lose nanoseconds."""
    times = {"ts": (since_ns - run.started_unix_ns) / 1000, "dur": duration_ns / 1000}
    return {"ph": "X", "name": name, "cat": "run", "pid": PROCESS, "tid": thread, **times, "args": arguments}


def _named(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": thread, "args": {"name": name}}
