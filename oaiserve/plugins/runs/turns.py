"""The facts that are kept of each turn of a run, and those of the whole run, which follow from them.

A gateway reads the same objects from its replicas, so that it can put together a run that several of them served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from oaiserve.facts.record import RequestRecord, ToolCallOutcome
from oaiserve.facts.turn import Turn, TurnPrompt
from oaiserve.plugins.runs.programs import program_of
from oaiserve.telemetry.record_facts import phase_row
from oaiserve.telemetry.reuse_explanation import read_again

SILENCE_SECONDS = 600  # A run without requests for this long counts as ended.
TOOLS_SECONDS = 120  # how long tools of the last turn are assumed to be running
NUM_DEAREST = 3
MAX_TURNS = 1000  # maximum turns of a run

Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Text = Annotated[str, msgspec.Meta(max_length=512)]
MAX_SENTENCE_CHARACTERS = 1024
Sentence = Annotated[str, msgspec.Meta(max_length=MAX_SENTENCE_CHARACTERS)]


class KeptTurn(msgspec.Struct, kw_only=True):
    """One request of a run: hashes, lengths and times."""

    request_id: Text
    trace_id: Text
    span_id: Text
    model: Text
    client: Text | None
    outcome: Text
    agent: Text
    thread: Text
    is_named: bool
    after_tools: bool
    started_unix_ns: Number
    duration_ns: Number
    phases: Annotated[list[list[str | int]], msgspec.Meta(max_length=16)]
    prompt_tokens: Number
    cached_tokens: Number
    read_again_tokens: Number
    read_again_reason: Text | None
    read_again_ns: Number = 0  # time to compute these tokens again
    read_again_explanation: Sentence | None = None  # cause and cost, as on the request's page; None: too little
    written_tokens: Number
    completion_tokens: Number
    num_tool_calls: Number
    calls_tools: bool = False  # The client got a call, so its tools run next.
    sizes: Annotated[dict[str, Number], msgspec.Meta(max_length=16)]
    program: Text = ""  # the name of the client's program; "" if it is unknown
    replica: int | None = None  # set by a gateway

    @property
    def ended_unix_ns(self) -> int:
        return self.started_unix_ns + self.duration_ns

    @property
    def lane(self) -> str:
        """The agent, or without its name the conversation, by its first message."""
        return self.agent or self.thread

    @classmethod
    def of(cls, record: RequestRecord, turn: Turn, prompt: TurnPrompt, epoch_offset_ns: int) -> KeptTurn:
        phases = record.times.phases()
        causes_ns = record.causes_ns
        explanation = read_again(record)
        return cls(
            request_id=record.request_id[:512],
            trace_id=record.trace.trace_id_hex,
            span_id=f"{record.trace.span_id:016x}",
            model=record.model,
            client=record.client,
            outcome=record.outcome.value,
            agent=turn.agent,
            thread=prompt.thread,
            is_named=turn.is_named,
            after_tools=prompt.after_tools,
            started_unix_ns=phases[0].start_ns + epoch_offset_ns,
            duration_ns=record.times.duration_ns,
            phases=[phase_row(phase.name, phase.duration_ns, causes_ns.get(phase.name, {})) for phase in phases],
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            read_again_tokens=record.read_again_tokens,
            read_again_reason=None if record.read_again_reason is None else record.read_again_reason.value,
            read_again_ns=record.read_again_ns,
            read_again_explanation=None if explanation is None else explanation[:MAX_SENTENCE_CHARACTERS],
            written_tokens=turn.written_tokens,
            completion_tokens=record.completion_tokens,
            num_tool_calls=sum(record.tool_calls.values()),
            calls_tools=record.tool_calls.get(ToolCallOutcome.CALLED, 0) > 0,
            sizes=dict(prompt.sizes),
            program=program_of(turn.user_agent),
        )


class Gap(msgspec.Struct):
    """The time between two turns of an agent, in which its tools ran, or its user was awaited."""

    kind: Literal["tools", "user"]
    duration_ns: int


class ShownTurn(msgspec.Struct):
    """A turn with what follows from its neighbours. `context_tokens` are the prompt's tokens by the role of its parts,
    in proportion to their bytes."""

    turn: KeptTurn
    gap: Gap | None  # before it
    new_tokens: int  # growth of the prompt since the agent's previous turn
    context_tokens: dict[str, int]


class RunRow(msgspec.Struct, kw_only=True):
    """A run in a list. The times of model, tools and user add up to its duration."""

    run_id: str
    is_named: bool
    is_live: bool  # one of its requests is open, or its tools may be running
    model: str
    client: str | None
    started_unix_ns: int
    duration_ns: int
    model_ns: int
    tools_ns: int
    user_ns: int
    num_turns: int
    num_agents: int
    num_open: int
    prompt_tokens: int
    cached_tokens: int
    read_again_tokens: int
    read_again_ns: int = 0  # time to compute these tokens again
    written_tokens: int
    completion_tokens: int
    tool_result_tokens: int  # tokens of tool results in the prompts
    replicas: list[int]
    program: str = ""  # the name of the client's program; "" if it is unknown
    first_words: str = ""  # first words of its user; only with --inspect, for the server's owner
    silent_ns: int = 0  # since its last request ended; 0 while one is open
    awaits_tools: bool = False  # Its last request ended with calls of tools, not long ago.
    # Only for gateways: digests of the latest turns, and of the turns that the first one may continue
    digests: Annotated[list[Text], msgspec.Meta(max_length=64)] | UnsetType = UNSET
    before: Annotated[list[Text], msgspec.Meta(max_length=64)] | UnsetType = UNSET


class Run(RunRow, kw_only=True):
    """A run with its turns, in the order in which they began."""

    num_dropped: int  # older turns, which are not kept
    lanes: list[str]  # agents and conversations, the one with the most turns first
    dearest: list[str]  # ids of the requests that took longest
    turns: list[ShownTurn]


def words_of(turns: Sequence[KeptTurn], first_words: Mapping[str, str]) -> str:
    """Return the first words of a run with at least one turn, from those of requests by their ids: of the latest turn
    with some in the conversation that began the run."""
    lane = min(turns, key=lambda turn: turn.started_unix_ns).lane
    ids = (turn.request_id for turn in reversed(turns) if turn.lane == lane)
    return next((first_words[request_id] for request_id in ids if request_id in first_words), "")


def row_of(
    run_id: str, turns: Iterable[KeptTurn], now_unix_ns: int, *, num_dropped: int = 0, num_open: int = 0
) -> RunRow:
    """Return the row of a run with at least one turn."""
    ordered = _ordered(turns)
    return RunRow(**_facts(run_id, ordered, now_unix_ns, num_dropped, num_open))


def run_of(run_id: str, turns: Iterable[KeptTurn], now_unix_ns: int, *, num_dropped: int = 0, num_open: int = 0) -> Run:
    """Return a run with at least one turn, with what follows from them."""
    ordered = _ordered(turns)
    dearest = sorted(ordered, key=lambda turn: -turn.duration_ns)[:NUM_DEAREST]
    return Run(
        **_facts(run_id, ordered, now_unix_ns, num_dropped, num_open),
        num_dropped=num_dropped,
        lanes=[lane for lane, _ in Counter(turn.lane for turn in ordered).most_common()],
        dearest=[turn.request_id for turn in dearest],
        turns=_shown(ordered),
    )


def _ordered(turns: Iterable[KeptTurn]) -> list[KeptTurn]:
    return sorted(turns, key=lambda turn: turn.started_unix_ns)


def _facts(run_id: str, turns: Sequence[KeptTurn], now_unix_ns: int, num_dropped: int, num_open: int) -> dict[str, Any]:
    spent_ns = Counter[str]()
    ended_ns = turns[0].started_unix_ns
    for turn in turns:
        kind = "tools" if turn.after_tools else "user"
        spent_ns[kind] += max(0, turn.started_unix_ns - ended_ns)
        spent_ns["model"] += max(0, turn.ended_unix_ns - max(ended_ns, turn.started_unix_ns))
        ended_ns = max(ended_ns, turn.ended_unix_ns)
    sums = {
        name: sum(getattr(turn, name) for turn in turns)
        for name in (
            "prompt_tokens",
            "cached_tokens",
            "read_again_tokens",
            "read_again_ns",
            "written_tokens",
            "completion_tokens",
        )
    }
    silent_ns = 0 if num_open else max(0, now_unix_ns - ended_ns)
    last = max(turns, key=lambda turn: turn.ended_unix_ns)
    awaits_tools = num_open == 0 and last.calls_tools and silent_ns < TOOLS_SECONDS * 1_000_000_000
    return {
        "run_id": run_id,
        "is_named": turns[0].is_named,
        "is_live": num_open > 0 or awaits_tools,
        "model": turns[-1].model,
        "client": turns[-1].client,
        "started_unix_ns": turns[0].started_unix_ns,
        "duration_ns": ended_ns - turns[0].started_unix_ns,
        **{f"{kind}_ns": spent_ns[kind] for kind in ("model", "tools", "user")},
        "num_turns": len(turns) + num_dropped,
        "num_agents": len({turn.lane for turn in turns}),
        "num_open": num_open,
        **sums,
        "tool_result_tokens": sum(_context(turn).get("tool_results", 0) for turn in turns),
        "program": next((turn.program for turn in reversed(turns) if turn.program), ""),
        "silent_ns": silent_ns,
        "awaits_tools": awaits_tools,
        "replicas": sorted({turn.replica for turn in turns if turn.replica is not None}),
    }


def _shown(turns: Sequence[KeptTurn]) -> list[ShownTurn]:
    last: dict[str, KeptTurn] = {}  # keyed by lane
    shown = []
    for turn in turns:
        before = last.get(turn.lane)
        gap = None
        if before is not None and (gap_ns := turn.started_unix_ns - before.ended_unix_ns) > 0:
            gap = Gap("tools" if turn.after_tools else "user", gap_ns)
        num_before = 0 if before is None else before.prompt_tokens
        shown.append(ShownTurn(turn, gap, turn.prompt_tokens - num_before, _context(turn)))
        last[turn.lane] = turn
    return shown


def _context(turn: KeptTurn) -> dict[str, int]:
    num_bytes = max(1, sum(turn.sizes.values()))
    return {part: turn.prompt_tokens * size // num_bytes for part, size in turn.sizes.items()}
