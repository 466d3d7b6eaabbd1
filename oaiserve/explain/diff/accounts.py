"""Reads the accounts of ended requests: from a recording (serve --record-requests), or an answer of /debug/requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oaiserve.errors import StartupError
from oaiserve.facts.recordings import is_recording


@dataclass(frozen=True, slots=True)
class Account:
    """An account says where one request spent its time. The parts add up to its duration."""

    arrived_seconds: float
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    parts_ns: Mapping[tuple[str, str], int]  # by phase and cause; the cause is "" where a phase has none


def read(path: Path) -> list[Account]:
    """Return the accounts of the answered requests, in the order of arrival. Raises StartupError."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise StartupError(f"'{path}' cannot be read: {reason}.") from error
    try:
        first, _, rest = text.partition("\n")
        if rest.startswith("{") and is_recording(json.loads(first)):
            rows = [json.loads(line) for line in rest.splitlines()]
            found = [_recorded(row) for row in rows if row.get("outcome") == "finished" and "input_length" in row]
        else:
            found = [_shown(row) for row in json.loads(text)["requests"] if row["outcome"] == "finished"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StartupError(
            f"'{path}' must be a recording (serve --record-requests), an answer of /debug/requests, or a report of the "
            f"load test (bench run --json), as the other file is ({type(error).__name__}: {error})."
        ) from error
    return sorted(found, key=lambda account: account.arrived_seconds)


def _recorded(row: Mapping[str, Any]) -> Account:
    parts = _parts(row["phases_ns"], row["causes_ns"], row["queue_waits_ns"])
    return Account(row["timestamp"], row["input_length"], row["cached_tokens"], row["output_length"], parts)


def _shown(row: Mapping[str, Any]) -> Account:
    phases_ns = {phase["name"]: phase["duration_ns"] for phase in row["phases"]}
    causes_ns = {phase["name"]: phase["causes_ns"] for phase in row["phases"]}
    parts = _parts(phases_ns, causes_ns, row["queue_waits_ns"])
    seconds = row["received_unix_ns"] / 1e9
    return Account(seconds, row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"], parts)


def _parts(
    phases_ns: Mapping[str, int], causes_ns: Mapping[str, Mapping[str, int]], waits_ns: Mapping[str, int]
) -> dict[tuple[str, str], int]:
    """Return the parts of a request's time. The rest of a phase without a cause is a part of its own."""
    parts: dict[tuple[str, str], int] = {}
    for phase, phase_ns in phases_ns.items():
        known = waits_ns if phase == "queue" else causes_ns.get(phase, {})
        parts |= {(phase, cause): cause_ns for cause, cause_ns in known.items()}
        if rest_ns := phase_ns - sum(known.values()):
            parts[phase, ""] = rest_ns
    return parts
