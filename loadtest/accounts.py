"""Computes the difference of two sets of accounts: means over requests, by phase and cause, with intervals.

The accounts are those of ended requests, from a recording (serve --record-requests) or from /debug/requests.

Concurrent requests wait for the same things, so their times are correlated. The intervals are therefore computed by
batch means: requests are divided into batches by arrival, and the means of the batches are taken as independent (Law
and Kelton, "Simulation Modeling and Analysis", on the method of batch means).
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.errors import UsageError
from loadtest.intervals import t_quantile
from oaiserve.wire.recordings import is_recording

NUM_BATCHES = 20


@dataclass(frozen=True, slots=True)
class Account:
    """An account says where one request spent its time. The parts add up to its duration."""

    arrived_seconds: float
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    parts_ns: Mapping[tuple[str, str], int]  # keyed by phase and cause; the cause is "" where a phase has none
    model: str = ""


def read(path: Path) -> list[Account]:
    """Return the accounts of the answered requests, in the order of arrival. Raises UsageError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError):
            reason = error.strerror
        else:
            reason = "it is not text"
        raise UsageError(f"'{path}' cannot be read: {reason}.") from error
    try:
        first, _, rest = text.partition("\n")
        if (not rest or rest.startswith("{")) and is_recording(head := json.loads(first)):
            rows = [json.loads(line) for line in rest.splitlines()]
            model = head["server"].get("model", "")
            answered = [row for row in rows if row.get("outcome") == "finished" and "input_length" in row]
            accounts = [_recorded(row, model) for row in answered]
        else:
            accounts = [_shown(row) for row in json.loads(text)["requests"] if row["outcome"] == "finished"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if type(error) is ValueError:
            why = f": {error}"
        else:
            why = "; reports of the load test are for 'oaiserve bench compare'"
        raise UsageError(
            f"'{path}' must be a recording (serve --record-requests) or an answer of /debug/requests{why}."
        ) from error
    return sorted(accounts, key=lambda account: account.arrived_seconds)


def _recorded(row: Mapping[str, Any], model: str) -> Account:
    parts = _parts(row["phases_ns"], row["causes_ns"], row["queue_waits_ns"])
    tokens = row["input_length"], row["cached_tokens"], row["output_length"]
    return Account(row["timestamp"], *tokens, parts, row.get("model") or model)


def _shown(row: Mapping[str, Any]) -> Account:
    phases_ns = {phase["name"]: phase["duration_ns"] for phase in row["phases"]}
    causes_ns = {phase["name"]: phase["causes_ns"] for phase in row["phases"]}
    parts = _parts(phases_ns, causes_ns, row["queue_waits_ns"])
    seconds = row["received_unix_ns"] / 1e9
    tokens = row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]
    return Account(seconds, *tokens, parts, row["model"])


def _parts(
    phases_ns: Mapping[str, int], causes_ns: Mapping[str, Mapping[str, int]], waits_ns: Mapping[str, int]
) -> dict[tuple[str, str], int]:
    """Return the parts of a request's time. Time of a phase that no cause explains is a part of its own."""
    parts: dict[tuple[str, str], int] = {}
    for phase, phase_ns in phases_ns.items():
        known = waits_ns if phase == "queue" else causes_ns.get(phase, {})
        parts |= {(phase, cause): cause_ns for cause, cause_ns in known.items()}
        if rest_ns := phase_ns - sum(known.values()):
            parts[phase, ""] = rest_ns
    return parts


@dataclass(frozen=True, slots=True)
class MeanChange:
    """The mean of a quantity before and after, and the 95 % interval of its change, which is None if there is too
    little data."""

    before: float
    after: float
    interval: tuple[float, float] | None

    @property
    def change(self) -> float:
        return self.after - self.before

    @property
    def is_certain(self) -> bool:
        """Return True if the interval does not include zero."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


@dataclass(frozen=True, slots=True)
class AccountsDifference:
    """A comparison of two sets of answered requests. Times are means in seconds."""

    num_before: int
    num_after: int
    duration: MeanChange
    parts: dict[tuple[str, str], MeanChange]  # keyed by phase and cause; their changes add up to the duration's
    load: dict[str, MeanChange]  # the request rate, and the mean numbers of tokens per request


def difference(before: Sequence[Account], after: Sequence[Account]) -> AccountsDifference:
    """Return the change from `before` to `after`. Both are in order of arrival, and neither is empty."""

    def change(value: Callable[[Account], float]) -> MeanChange:
        return _change([value(one) for one in before], [value(one) for one in after])

    def part_seconds(part: tuple[str, str]) -> Callable[[Account], float]:
        return lambda account: account.parts_ns.get(part, 0) / 1e9

    known = dict.fromkeys(part for account in (*before, *after) for part in account.parts_ns)
    phases = [*dict.fromkeys(phase for phase, _ in known)]
    parts = sorted(known, key=lambda part: phases.index(part[0]))
    return AccountsDifference(
        len(before),
        len(after),
        change(lambda account: sum(account.parts_ns.values()) / 1e9),
        {part: change(part_seconds(part)) for part in parts},
        {
            "requests/s": MeanChange(_rate(before), _rate(after), None),
            "prompt tokens": change(lambda account: account.prompt_tokens),
            "of these cached": change(lambda account: account.cached_tokens),
            "answer tokens": change(lambda account: account.answer_tokens),
        },
    )


def _rate(accounts: Sequence[Account]) -> float:
    seconds = accounts[-1].arrived_seconds - accounts[0].arrived_seconds
    if seconds:
        return (len(accounts) - 1) / seconds
    return 0.0


def _change(before: Sequence[float], after: Sequence[float]) -> MeanChange:
    means = statistics.fmean(before), statistics.fmean(after)
    spreads = [_spread(values) for values in (before, after)]
    if None in spreads:
        return MeanChange(*means, None)
    (first, num_first), (second, num_second) = (spread for spread in spreads if spread is not None)
    half = math.hypot(first, second) * t_quantile(min(num_first, num_second) - 1)
    return MeanChange(*means, (means[1] - means[0] - half, means[1] - means[0] + half))


def _spread(values: Sequence[float]) -> tuple[float, int] | None:
    """Return the standard error of the mean and the number of batches, or None if there are fewer than two batches."""
    count = min(NUM_BATCHES, len(values))
    if count < 2:
        return None
    cuts = [len(values) * k // count for k in range(count + 1)]
    means = [statistics.fmean(values[start:end]) for start, end in itertools.pairwise(cuts)]
    return statistics.stdev(means) / math.sqrt(count), count
