"""Reads a recorded load: when requests arrived, how long they were, what they shared, and on what server.

The source is a recording (`serve --record-requests`), which has all of it. A server's `/debug/requests` and a trace for
the load test (lines with `timestamp`, `input_length` and `output_length`) have the arrivals and lengths.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oaiserve.engine.step_cost import StepCost
from oaiserve.errors import StartupError

HASH_DIGITS = 10  # hexadecimal digits of a block's hash in a recording
VOCAB = 2**60  # what the scheduler takes for token ids may be any numbers


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt that arrived, in seconds after the first one, and its answer in tokens of a choice."""

    seconds: float
    prompt: list[int]
    answer_tokens: int
    num_choices: int = 1
    client: str = ""


@dataclass(frozen=True, slots=True)
class Server:
    """The settings that decide how fast a server is, with the names of its flags. Times are in seconds."""

    block_size: int = 16
    kv_blocks: int = 4096
    max_model_len: int = 1 << 20
    max_running: int = 256
    max_step_tokens: int = 512
    policy: str = "fair"
    prefix_cache: bool = True
    lookahead: int = 8
    prefill_max_requests: int | None = None
    prefill_max_tokens: int | None = None
    itl_target_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """A load, the server that had it, and what its steps cost."""

    arrivals: list[Arrival]
    server: Server
    cost: StepCost | None = None
    host_seconds: float = 0.0  # between two steps
    before_queue_seconds: float = 0.0  # from the first byte of a request until its prompt is tokenized
    num_left_out: int = 0  # requests whose prompts are not known: they were refused before
    served: list[tuple[float, float]] = field(default_factory=list)  # measured TTFT and time per output token

    @property
    def rate(self) -> float:
        """The mean number of prompts that arrived in a second."""
        seconds = self.arrivals[-1].seconds if self.arrivals else 0.0
        return (len(self.arrivals) - 1) / seconds if seconds else 0.0


def read(path: Path) -> RecordedLoad:
    """Read a recorded load of any of the forms. Raises StartupError if the file has none of them."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise StartupError(f"--from is '{path}', which cannot be read: {reason}.") from error
    try:
        rows = list(_rows(text))
        load = _recording(rows) if rows and "recording" in rows[0] else _plain(rows)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StartupError(
            f"--from is '{path}', but must be a recording (serve --record-requests), an answer of /debug/requests, or "
            f"JSON lines with timestamp, input_length and output_length ({type(error).__name__}: {error})."
        ) from error
    if len(load.arrivals) < 2:
        raise StartupError(f"--from is '{path}', which has {len(load.arrivals)} requests: a plan needs at least two.")
    return load


def _rows(text: str) -> Iterator[dict[str, Any]]:
    if text.lstrip().startswith("{") and "\n{" not in text.strip():
        whole = json.loads(text)
        yield from whole.get("requests", [whole])
        return
    for line in text.splitlines():
        if line.strip():
            yield json.loads(line)


def _recording(rows: list[dict[str, Any]]) -> RecordedLoad:
    block_tokens, settings = rows[0]["block_tokens"], rows[0]["server"]
    known = [row for row in rows if "input_length" in row and row["output_length"] > 0]
    left_out = sum("timestamp" in row for row in rows) - len(known)
    costs = [row["step_cost"] for row in rows if "step_cost" in row]
    fields = {name: settings[name] for name in Server.__dataclass_fields__ if name in settings}
    arrivals = [
        Arrival(
            row["timestamp"],
            _prompt(row["input_length"], row["blocks"], block_tokens, index),
            row["output_length"],
            row["n"],
            row["client"] or "",
        )
        for index, row in enumerate(known)
    ]
    phases = [row["phases_ns"] for row in known if row["outcome"] == "finished" and "decode" in row["phases_ns"]]
    return RecordedLoad(
        _from_first(arrivals),
        Server(**fields),
        StepCost(**costs[-1] | {"rows_ns": tuple(costs[-1]["rows_ns"])}) if costs else None,
        _median([row["host_ns"] / row["num_steps"] for row in known if row.get("num_steps")]) / 1e9,
        _median([sum(phase_ns.get(name, 0) for name in _BEFORE_QUEUE) for phase_ns in phases]) / 1e9,
        left_out,
        [_served(row) for row in known if "decode" in row["phases_ns"]],
    )


_BEFORE_QUEUE = ("receive", "tokenize_wait", "tokenize")


def _served(row: Mapping[str, Any]) -> tuple[float, float]:
    phases_ns = row["phases_ns"]
    ttft_ns = sum(phases_ns[name] for name in (*_BEFORE_QUEUE, "queue", "prefill"))
    return ttft_ns / 1e9, phases_ns["decode"] / max(1, row["output_length"] - 1) / 1e9


def _plain(rows: list[dict[str, Any]]) -> RecordedLoad:
    arrivals = []
    for index, row in enumerate(rows):
        if "received_unix_ns" in row:
            if not row["completion_tokens"]:
                continue
            seconds, tokens, answer = row["received_unix_ns"] / 1e9, row["prompt_tokens"], row["completion_tokens"]
        else:
            seconds, tokens, answer = float(row["timestamp"]), row["input_length"], row["output_length"]
        arrivals.append(Arrival(seconds, _prompt(tokens, "", 1, index), answer))
    return RecordedLoad(_from_first(arrivals), Server(), num_left_out=len(rows) - len(arrivals))


def _prompt(length: int, hashes: str, block_tokens: int, index: int) -> list[int]:
    """Return ids that are alike as far as the blocks of two prompts are. The rest is of this prompt alone."""
    ids: list[int] = []
    for start in range(0, len(hashes), HASH_DIGITS):
        rng = random.Random(hashes[start : start + HASH_DIGITS])
        first = rng.randrange(VOCAB)
        ids += range(first, first + block_tokens)
    own = random.Random(index).randrange(VOCAB)
    return ids + list(range(own, own + length - len(ids)))


def _from_first(arrivals: list[Arrival]) -> list[Arrival]:
    arrivals = sorted(arrivals, key=lambda arrival: arrival.seconds)
    return [replace(arrival, seconds=arrival.seconds - arrivals[0].seconds) for arrival in arrivals]


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def repeated(load: RecordedLoad, rate: float, least_seconds: float) -> Iterator[tuple[float, int, Arrival]]:
    """Yield the arrivals at another rate, in order, as often as it takes to fill the time: when, which copy, and what.

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
