"""Reads a recorded load: the arrivals, lengths and common prefixes of requests, and the server.

The source is a recording (`serve --record-requests`), which has all of these. A server's `/debug/requests` and its log
in JSON have the arrivals and lengths, and so have the traces and the samples of the load test.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from oaiserve.errors import StartupError
from oaiserve.explain.step_cost import StepCost
from oaiserve.facts.recordings import block_hashes, is_recording

VOCAB = 2**60  # the scheduler takes any numbers as token ids
LEAST_OPEN = 0.9  # of the most requests that were open at once, on average, in a closed loop


@dataclass(frozen=True, slots=True)
class Arrival:
    """The arrival of a prompt, in seconds after the first one, and its answer in tokens of a choice."""

    seconds: float
    prompt: list[int]
    answer_tokens: int
    num_choices: int = 1
    client: str = ""
    drafts: list[int] = field(default_factory=list)  # its tokens in turn: alone in a step, several in one, alone, ...
    deadline_seconds: float | None = None  # from its arrival to the deadline of its end
    most_tokens: int = 0  # that its client would take; 0 if that is what it got
    is_limited: bool = True  # by its client, and not by the context
    operation: str = ""
    grammar_kind: str | None = None


@dataclass(frozen=True, slots=True)
class RecordedServer:
    """The settings of a server's speed, with the names of its flags. Times are in seconds."""

    block_size: int = 16
    kv_blocks: int = 4096
    max_running: int = 256
    max_step_tokens: int = 512
    policy: str = "fair"
    prefix_cache: bool = True
    lookahead: int = 8
    prefill_max_requests: int | None = None
    prefill_max_tokens: int | None = None
    itl_target_seconds: float | None = None
    step_target_seconds: float | None = None
    drafts: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """The costs on the machine and with the model of a server. Times are in seconds."""

    step: StepCost  # of a step that nothing disturbs
    host_seconds: float = 0.0  # between two steps
    before_queue_seconds: float = 0.0  # from the first byte of a request until its prompt is tokenized
    delivery_seconds: float = 0.0  # from the engine's thread to the client
    disturbance_share: float = 0.0  # that other programs on the machine add to the time of steps, on average


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """A load, its server, and the cost of its steps."""

    arrivals: list[Arrival]
    server: RecordedServer
    cost: Cost | None = None
    num_left_out: int = 0  # requests whose prompts are not known: they were refused before
    tpot_seconds: float | None = None  # the mean of the requests, as it was measured
    num_waiting_clients: int = 0  # as `waiting_clients` returns it

    @property
    def rate(self) -> float:
        """Return the mean number of prompts per second."""
        seconds = self.arrivals[-1].seconds if self.arrivals else 0.0
        return (len(self.arrivals) - 1) / seconds if seconds else 0.0


def read(path: Path, flag: str = "--from") -> RecordedLoad:
    """Read a recorded load in any of the formats. Raises StartupError, with the flag, for another file."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise StartupError(f"{flag} is '{path}', which cannot be read: {reason}.") from error
    try:
        rows = list(_rows(text))
        load = _recording(rows) if rows and is_recording(rows[0]) else _plain(rows)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StartupError(
            f"{flag} is '{path}', but must be a recording (serve --record-requests), an answer of /debug/requests, a "
            "log (serve --log-format json), samples of the load test (--samples), or JSON lines with timestamp, "
            f"input_length and output_length ({type(error).__name__}: {error})."
        ) from error
    if len(load.arrivals) < 2:
        raise StartupError(f"{flag} is '{path}', which has {len(load.arrivals)} requests: a plan needs at least two.")
    return load


def _rows(text: str) -> Iterator[dict[str, Any]]:
    if text.lstrip().startswith("{") and "\n{" not in text.strip():
        whole = json.loads(text)
        yield from whole.get("requests", [whole])
        return
    for line in text.split("\n"):
        if line.strip():
            yield json.loads(line)


def _recording(rows: list[dict[str, Any]]) -> RecordedLoad:
    block_tokens, settings = rows[0]["block_tokens"], rows[0]["server"]
    known = [row for row in rows if "input_length" in row and row["output_length"] > 0]
    left_out = sum("timestamp" in row for row in rows) - len(known)
    fields = {name: settings[name] for name in RecordedServer.__dataclass_fields__ if name in settings}
    arrivals = [
        Arrival(
            row["timestamp"],
            _prompt(row["input_length"], block_hashes(row), block_tokens, index),
            row["output_length"],
            row["n"],
            row["client"] or "",
            row.get("drafts", []),
        )
        for index, row in enumerate(known)
    ]
    tpots = [
        row["phases_ns"]["decode"] / (row["output_length"] - 1) / 1e9
        for row in known
        if row["outcome"] == "finished" and row["output_length"] > 1
    ]
    costs = [row["step_cost"] for row in rows if "step_cost" in row]
    cost = _cost(costs[-1], known) if costs else None
    tpot_seconds = statistics.fmean(tpots) if tpots else None
    clients = waiting_clients([(row["timestamp"], sum(row["phases_ns"].values()) / 1e9) for row in known])
    return RecordedLoad(_from_first(arrivals), RecordedServer(**fields), cost, left_out, tpot_seconds, clients)


_BEFORE_QUEUE = ("receive", "tokenize_wait", "tokenize", "encode_media")


def _cost(numbers: dict[str, Any], rows: list[dict[str, Any]]) -> Cost:
    """Return the cost of a recorded server, of which the disturbance is not known yet."""
    step = StepCost(**numbers | {"rows_ns": tuple(numbers["rows_ns"])})
    before_ns = [
        sum(row["phases_ns"].get(name, 0) for name in _BEFORE_QUEUE) for row in rows if "decode" in row["phases_ns"]
    ]
    respond_ns = [row["phases_ns"]["respond"] for row in rows if "respond" in row["phases_ns"]]
    host_ns = [row["host_ns"] / row["num_steps"] for row in rows if row.get("num_steps")]
    host, before, respond = (
        statistics.median(times_ns or [0.0]) / 1e9 for times_ns in (host_ns, before_ns, respond_ns)
    )
    return Cost(step, host, before, respond)


def _plain(rows: list[dict[str, Any]]) -> RecordedLoad:
    # A log has other lines, too, and one of a request has `completion_tokens`.
    if rows and "logger" in rows[0]:
        rows = [row for row in rows if "completion_tokens" in row]
    found = [_arrival(row) for row in rows]
    arrivals = [
        Arrival(seconds, _prompt(tokens, [], 1, index), answer)
        for index, (seconds, _, tokens, answer) in enumerate(found)
        if answer and tokens
    ]
    clients = waiting_clients([(seconds, duration) for seconds, duration, _, _ in found if duration])
    left_out = len(rows) - len(arrivals)
    return RecordedLoad(_from_first(arrivals), RecordedServer(), None, left_out, num_waiting_clients=clients)


def _arrival(row: dict[str, Any]) -> tuple[float, float, int, int]:
    """Return when a request came and how long it took, in seconds, and the tokens of its prompt and of its answer.

    The times are since any time, and 0 seconds stand for a duration that is not known.
    """
    if "received_unix_ns" in row:
        duration_ns = row.get("duration_ns", 0)
        return row["received_unix_ns"] / 1e9, duration_ns / 1e9, row["prompt_tokens"], row["completion_tokens"]
    if "intended_ns" in row:
        at_ns, end_ns = row["intended_ns"], row.get("end_ns", 0)
        return at_ns / 1e9, max(0, end_ns - at_ns) / 1e9, row["prompt_tokens"], row["completion_tokens"] or 0
    if "logger" in row:  # it was written when the request had ended
        ended, duration = datetime.fromisoformat(row["ts"]).timestamp(), row["duration_ms"] / 1e3
        return ended - duration, duration, row["prompt_tokens"], row["completion_tokens"]
    return float(row["timestamp"]), 0.0, row["input_length"], row["output_length"]


def waiting_clients(times_taken: Sequence[tuple[float, float]]) -> int:
    """Return how many clients each waited for an answer before they asked again, or 0 if requests came by themselves.

    It is told by when they came and how long they took. Of clients that wait, each has a request open nearly all the
    time: on average, nearly as many are open as ever are. Requests that come by themselves are now few and now many.
    """
    changes = sorted(itertools.chain.from_iterable(((at, 1), (at + taken, -1)) for at, taken in times_taken))
    last = max((at for at, _ in times_taken), default=0.0)
    times = [at for at, _ in changes if at <= last]
    numbers = list(itertools.accumulate(change for _, change in changes[: len(times)]))
    most = max(numbers, default=0)
    if len(times_taken) < max(2, 2 * most):
        return 0
    first = numbers.index(most)  # before, clients began one after the other
    seconds = last - times[first]
    stretches = zip(numbers[first:], times[first:], times[first + 1 :], strict=False)
    open_seconds = sum(number * (end - begin) for number, begin, end in stretches)
    is_closed = seconds >= (last - times[0]) / 2 and open_seconds >= LEAST_OPEN * most * seconds
    return most if is_closed else 0


def _prompt(length: int, hashes: list[str], block_tokens: int, index: int) -> list[int]:
    """Return ids by the hashes of a prompt's blocks: equal blocks have equal ids. The rest is of this prompt alone."""
    ids: list[int] = []
    for block in hashes:
        first = random.Random(block).randrange(VOCAB)
        ids += range(first, first + block_tokens)
    own = random.Random(index).randrange(VOCAB)
    return ids + list(range(own, own + length - len(ids)))


def _from_first(arrivals: list[Arrival]) -> list[Arrival]:
    arrivals = sorted(arrivals, key=lambda arrival: arrival.seconds)
    return [replace(arrival, seconds=arrival.seconds - arrivals[0].seconds) for arrival in arrivals]


def busiest(load: RecordedLoad, most_prompts: int) -> RecordedLoad:
    """Return the busiest stretch of a load: of as many prompts in a row, those that came in the shortest time."""
    arrivals = load.arrivals
    starts = range(max(1, len(arrivals) - most_prompts + 1))
    start = min(starts, key=lambda k: arrivals[min(k + most_prompts, len(arrivals)) - 1].seconds - arrivals[k].seconds)
    return replace(load, arrivals=_from_first(arrivals[start : start + most_prompts]))


def repeated(load: RecordedLoad, rate: float, least_seconds: float) -> Iterator[tuple[float, int, Arrival]]:
    """Yield the arrivals at another rate, in order, repeated to fill the time: the time, the copy, and the arrival.

    The gaps of the load keep their proportions. The copies share no prompts with each other.
    """
    scale = load.rate / rate if load.rate else 0.0
    gap = 1 / rate
    length = load.arrivals[-1].seconds * scale + gap
    for copy in itertools.count():
        for arrival in load.arrivals:
            yield copy * length + arrival.seconds * scale, copy, arrival
        if (copy + 1) * length >= least_seconds:
            return
