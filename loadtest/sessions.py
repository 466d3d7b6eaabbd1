"""Groups the lines of a trace by session. The format is that of Mooncake's traces, with AIPerf's fields for sessions.

A line is a turn: "session_id", "input_length" (the tokens that it adds) or "messages" (those that it adds),
"output_length", and "delay", the milliseconds since the answer before it. Answers are the server's own.
"""

from __future__ import annotations

from typing import Any

from loadtest.errors import UsageError


def by_session(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first line of each session, with the later lines as its "turns". Raises UsageError if a line has no
    session id."""
    sessions: dict[Any, dict[str, Any]] = {}
    for number, row in enumerate(rows, 1):
        if (name := row.get("session_id")) is None:
            raise UsageError(f'--requests: line {number} has no "session_id", which the first one has.')
        if not isinstance(name, str | int):
            raise UsageError(f'--requests: the "session_id" in line {number} must be a text or a whole number.')
        row = {key: value for key, value in row.items() if key not in ("session_id", "hash_ids")}
        if name in sessions:
            sessions[name]["turns"].append(row)
        else:
            sessions[name] = {key: value for key, value in row.items() if key != "delay"} | {"turns": []}
            if "timestamp" in row:
                sessions[name]["timestamp"] = row["timestamp"] / 1e3  # this format has milliseconds
    return list(sessions.values())
