"""Which runs are kept, and what follows from their turns."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from oaiserve.facts.record import RequestRecord, ToolCallOutcome
from oaiserve.plugins.runs import kept_runs
from oaiserve.plugins.runs.kept_runs import KeptRuns
from oaiserve.plugins.runs.turns import MAX_TURNS, SILENCE_SECONDS, TOOLS_SECONDS, Run, run_of
from oaiserve.runtime import THREADS
from tests.plugins.runs.records import NAMED, turn_at
from tests.records import record_at

TOOLS = {"after_tools": True}


def kept_of(*records: RequestRecord) -> KeptRuns:
    kept = KeptRuns(THREADS.unix_ns, lambda: 0)
    for record in records:
        kept.add(record)
    return kept


def shown(*records: RequestRecord, run_id: str = "run_1") -> Run:
    found = kept_of(*records).get(run_id)
    assert found is not None
    return run_of(*found[:2], found.turns[-1].ended_unix_ns, num_dropped=found.num_dropped)


def in_ms(*numbers_ns: int) -> tuple[int, ...]:
    return tuple(number // 1_000_000 for number in numbers_ns)


def test_times_of_model_tools_and_user_add_up_to_the_run() -> None:
    run = shown(turn_at(0, 100), turn_at(400, 500, turn=TOOLS), turn_at(2500, 2700), turn_at(2600, 2800))
    assert in_ms(run.model_ns, run.tools_ns, run.user_ns) == (500, 300, 2000)
    assert run.model_ns + run.tools_ns + run.user_ns == run.duration_ns
    assert [turn.gap and turn.gap.kind for turn in run.turns] == [None, "tools", "user", None]


CALLS = {"tool_calls": {ToolCallOutcome.CALLED: 1}}
UNPARSED = {"tool_calls": {ToolCallOutcome.UNPARSED: 1}}


@pytest.mark.parametrize(
    ("last", "num_open", "silent_seconds", "is_live", "awaits_tools"),
    [
        ({}, 0, 0, False, False),
        ({}, 1, 0, True, False),
        (CALLS, 0, TOOLS_SECONDS - 1, True, True),
        (CALLS, 0, TOOLS_SECONDS, False, False),
        (UNPARSED, 0, 0, False, False),
        (CALLS, 1, 1, True, False),
    ],
    ids=["ended", "open", "tools", "tools for too long", "a call that is text", "open after tools"],
)
def test_run_is_live_while_a_request_is_open_or_its_tools_may_run(
    last: dict[str, Any], num_open: int, silent_seconds: int, is_live: bool, awaits_tools: bool
) -> None:
    found = kept_of(turn_at(0, 100, **CALLS), turn_at(400, 500, turn=TOOLS, **last)).get("run_1")
    assert found is not None
    now_unix_ns = found.turns[-1].ended_unix_ns + silent_seconds * 1_000_000_000
    run = run_of(*found[:2], now_unix_ns, num_open=num_open)
    assert (run.is_live, run.awaits_tools) == (is_live, awaits_tools)


def test_run_adds_up_what_its_turns_read_again_and_the_time_of_that() -> None:
    again = {"turn": NAMED, "prompt_tokens": 100, "read_again_tokens": 50}
    prefill_ms = 80
    records = [record_at(*[start] * 5, *[start + prefill_ms] * 3, **again) for start in (0, 400)]
    run = shown(*records)
    assert (run.read_again_tokens, *in_ms(run.read_again_ns)) == (100, prefill_ms)


def test_tools_of_a_subagent_are_between_its_own_turns() -> None:
    helper = TOOLS | {"agent": "agent_1"}
    run = shown(
        turn_at(0, 100),
        turn_at(150, 200, turn=helper | {"after_tools": False}),
        turn_at(250, 300, turn=helper),
        turn_at(400, 500, turn=TOOLS),
    )
    assert run.num_agents == 2
    assert [turn.gap and in_ms(turn.gap.duration_ns)[0] for turn in run.turns] == [None, None, 50, 300]
    assert in_ms(run.model_ns, run.tools_ns, run.user_ns) == (300, 150, 50)


def test_a_turn_says_how_its_context_grew() -> None:
    first = turn_at(0, 100, prompt_tokens=100)
    sizes = {"user": 10, "answers": 10, "tool_results": 60}
    run = shown(first, turn_at(200, 300, turn=TOOLS | {"sizes": sizes}, prompt_tokens=400))
    assert run.turns[1].new_tokens == 300
    assert run.turns[1].context_tokens == {"user": 50, "answers": 50, "tool_results": 300}
    assert (run.tool_result_tokens, run.prompt_tokens) == (300, 500)


def test_the_three_dearest_turns_are_those_that_took_longest() -> None:
    run = shown(*(turn_at(start, start + took) for start, took in ((0, 5), (10, 50), (100, 7), (200, 60))))
    assert run.dearest == ["req-200", "req-10", "req-100"]


def test_requests_that_nobody_continues_are_no_runs() -> None:
    unnamed = {"is_named": False}
    kept = kept_of(turn_at(0, 10, turn=unnamed | {"run": "a"}), turn_at(20, 30, turn=unnamed | {"run": "b"}))
    assert kept.newest_first() == []
    kept.add(turn_at(40, 50, turn=unnamed | {"run": "a"}))
    assert [(run.run_id, len(run.turns)) for run in kept.newest_first()] == [("a", 2)]
    assert [run.run_id for run in kept.single(10)] == ["b"]


def test_a_request_whose_prompt_was_not_read_is_of_no_run() -> None:
    kept = kept_of(replace(turn_at(0, 10), turn=None))
    assert kept.newest_first() == []
    assert kept.single(10) == []


def test_turns_and_runs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    run = shown(*(turn_at(number, number + 1) for number in range(MAX_TURNS + 3)))
    assert (run.num_turns, run.num_dropped, len(run.turns)) == (MAX_TURNS + 3, 3, MAX_TURNS)
    monkeypatch.setattr(kept_runs, "MAX_RUNS", 2)
    kept = kept_of(*(turn_at(number, number + 1, turn={"run": str(number)}) for number in range(4)))
    assert [found.run_id for found in kept.newest_first()] == ["3", "2"]
    monkeypatch.setattr(kept_runs, "MAX_ALL_TURNS", 3)
    for number in range(4, 6):
        kept.add(turn_at(number, number + 1, turn={"run": "2"}))
    assert [found.run_id for found in kept.newest_first()] == ["2"]


def test_turns_count_whole_if_a_run_is_named_after_its_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_runs, "MAX_ALL_TURNS", 2)
    kept = kept_of(turn_at(0, 10, turn={"is_named": False}), turn_at(20, 30), turn_at(40, 50))
    assert kept.newest_first() == []


def test_five_hundred_turns_are_kept_without_text() -> None:
    turns = [turn_at(number * 10, number * 10 + 5, prompt_tokens=number) for number in range(500)]
    run = shown(*turns)
    assert len(run.turns) == 500
    assert len(msgspec.json.encode(run)) < 1024 * 500


def test_a_run_has_ended_after_its_silence_and_counts_once() -> None:
    now_ns = [0]
    kept = KeptRuns(lambda: now_ns[0], lambda: 0)
    kept.add(turn_at(0, 100))
    kept.add(turn_at(200, 300))
    found = kept.get("run_1")
    assert found is not None
    now_ns[0] = found.turns[-1].ended_unix_ns + SILENCE_SECONDS * 1_000_000_000 - 1
    assert kept.take_ended() == []
    now_ns[0] += 1
    assert [len(turns) for turns in kept.take_ended()] == [2]
    assert kept.take_ended() == []
    kept.add(turn_at(400, 500))
    now_ns[0] += 200_000_000
    assert [len(turns) for turns in kept.take_ended()] == [1]
