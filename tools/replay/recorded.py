"""Reads a recording (`serve --record-requests`): the arrivals, lengths and shared prefixes of its requests, and the
server."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oaiserve.errors import StartupError
from oaiserve.explain.step_cost import StepCost
from oaiserve.facts.recordings import block_hashes, is_recording

VOCAB = 2**60  # the scheduler takes any numbers as token ids


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
    most_tokens: int = 0  # tokens that its client would take; 0 if that is what it got
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
    itl_target_seconds: float | None = None
    drafts: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """The costs on the machine and with the model of a server. Times are in seconds."""

    step: StepCost  # cost of a step that nothing disturbs
    host_seconds: float = 0.0  # between two steps
    before_queue_seconds: float = 0.0  # from the first byte of a request until its prompt is tokenized
    delivery_seconds: float = 0.0  # from the engine's thread to the client
    disturbance_share: float = 0.0  # share that other programs on the machine add to the time of steps, on average


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """A load, its server, and the cost of its steps."""

    arrivals: list[Arrival]
    server: RecordedServer
    cost: Cost | None = None
    tpot_seconds: float | None = None  # the mean of the requests, as it was measured


def read(path: Path) -> RecordedLoad:
    """Read a recording. Requests that were refused before their prompts were known are left out. Raises StartupError
    for another file."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        if not rows or not is_recording(rows[0]):
            raise ValueError("its first line has no version")
        load = _recording(rows)
    except OSError as error:
        raise StartupError(f"--from is '{path}', which cannot be read: {error.strerror}.") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise StartupError(
            f"--from is '{path}', but must be a recording (serve --record-requests) ({reason})."
        ) from error
    if len(load.arrivals) < 2:
        raise StartupError(f"--from is '{path}', which has {len(load.arrivals)} requests, but needs at least two.")
    return load


def _recording(rows: list[dict[str, Any]]) -> RecordedLoad:
    block_tokens = rows[0]["block_tokens"]
    settings = rows[0]["server"]
    known = [row for row in rows if "input_length" in row and row["output_length"] > 0]
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
    return RecordedLoad(from_first(arrivals), RecordedServer(**fields), cost, tpot_seconds)


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


def _prompt(length: int, hashes: list[str], block_tokens: int, index: int) -> list[int]:
    """Return ids by the hashes of a prompt's blocks: equal blocks have equal ids. The rest is of this prompt alone."""
    ids: list[int] = []
    for block in hashes:
        first = random.Random(block).randrange(VOCAB)
        ids += range(first, first + block_tokens)
    own = random.Random(index).randrange(VOCAB)
    return ids + list(range(own, own + length - len(ids)))


def from_first(arrivals: list[Arrival]) -> list[Arrival]:
    arrivals = sorted(arrivals, key=lambda arrival: arrival.seconds)
    return [replace(arrival, seconds=arrival.seconds - arrivals[0].seconds) for arrival in arrivals]
