"""The benchmark of structured outputs: which requests it sends, how it reads answers, and what it makes of them."""

from __future__ import annotations

import asyncio
import json
from itertools import islice
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from loadtest.ceiling import null_server
from oaiserve.engine.grammars.notations import translate
from tools.bench.structured_figures import OURS, OURS_FREE, PEER, fault_of, figures, report
from tools.bench.structured_load import Answer, Run, run_load
from tools.bench.structured_requests import SCHEMAS, Ask, asks

COLOR = {"type": "object", "properties": {"color": {"enum": ["red", "blue"]}}, "required": ["color"]}


def first(slot: int, number: int = 8, **options: Any) -> list[Ask]:
    return list(islice(asks(slot, 7, **options), number))


# -- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schemas_are_ones_that_this_server_obeys(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    translate("json_schema", json.dumps(SCHEMAS[name]))


def test_every_other_stream_is_constrained_and_goes_through_all_schemas() -> None:
    assert len(SCHEMAS) == 8
    for slot in range(4):
        found = [ask.schema for ask in first(slot, with_constraints=True)]
        assert found == [None] * 8 if slot % 2 == 0 else all(schema in found for schema in SCHEMAS.values())


def test_without_constraints_the_prompts_are_the_same_and_the_lengths_are_drawn() -> None:
    constrained, free = first(3, with_constraints=True), first(3, with_constraints=False, stand_in_tokens=[50, 60])
    for one, other in zip(constrained, free, strict=True):
        assert one.body["messages"] == other.body["messages"]
        assert "response_format" in one.body
        assert "response_format" not in other.body
        assert other.body["max_tokens"] in (50, 60)
        assert other.body["ignore_eos"]
        assert not other.is_measured
    assert first(2, with_constraints=True) == first(2, with_constraints=False)


def test_no_prompt_comes_twice() -> None:
    prompts = [ask.body["messages"][0]["content"] for slot in range(4) for ask in first(slot, with_constraints=True)]
    assert len(set(prompts)) == len(prompts)


# -- answers ----------------------------------------------------------------------------------------------------------


def load(streams: list[list[Ask]], *flags: str) -> Run:
    with null_server(*flags) as url:
        return asyncio.run(run_load(url, list(map(iter, streams)), warm_up_seconds=0, seconds=0))


def ask(num_tokens: int) -> Ask:
    return Ask({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": num_tokens, "stream": True})


def test_answers_are_read_with_their_texts_tokens_and_times() -> None:
    run = load([[ask(6)], [ask(4)]], "--tokens-per-event", "2")
    three, two = sorted(run.answers, key=lambda answer: -answer.num_tokens)
    assert (three.text, three.num_tokens, len(three.event_ns)) == (" token" * 6, 6, 3)
    assert (two.text, two.num_tokens, len(two.event_ns)) == (" token" * 4, 4, 2)
    assert all(answer.problem is None for answer in run.answers)
    assert three.sent_ns <= three.event_ns[0] <= three.event_ns[-1]


@pytest.mark.parametrize(("flag", "problem"), [("--fail-every", "503: "), ("--cut-every", "RemoteProtocolError")])
def test_an_answer_that_does_not_come_whole_has_its_problem(flag: str, problem: str) -> None:
    (answer,) = load([[ask(4)]], flag, "1").answers
    assert (answer.problem or "").startswith(problem)


# -- figures ----------------------------------------------------------------------------------------------------------


def answered(schema: Any, event_seconds: list[float], num_tokens: int, text: str = "", **more: Any) -> Answer:
    event_ns = [round(at * 1e9) for at in event_seconds]
    return Answer(Ask({}, schema), 0, event_ns, text, num_tokens, **{"finish_reason": "stop", **more})


VALID = '{"color":"red"}'


def test_tokens_count_in_the_time_in_which_their_events_come() -> None:
    free = answered(None, [1.0, 1.5, 2.0, 2.5], 4)  # two of four within
    constrained = answered(COLOR, [1.5, 1.7], 10, VALID)  # all of ten within
    found = figures(Run([free, constrained], round(1.2e9), round(2.2e9), 0.1))
    assert found["tokens_per_second"] == 12
    assert found["constrained_tokens"] == 10
    assert found["valid_per_second"] == 1


def test_times_between_tokens_are_those_of_unconstrained_streams_alone() -> None:
    stand_in = answered(None, [1.0, 1.9], 2)
    stand_in.ask = Ask({}, is_measured=False)
    answers = [answered(None, [1.0, 1.1, 1.4, 9.0], 4), answered(COLOR, [1.0, 2.0], 2, VALID), stand_in]
    found = figures(Run(answers, 0, round(5e9), 0.1))
    assert found["itl_p50_ms"] == pytest.approx(200)
    assert found["ttft_p50_ms"] == pytest.approx(1000)


def test_a_run_without_an_answer_within_its_time_has_no_times() -> None:
    found = figures(Run([answered(None, [9.0, 9.1], 2)], round(5e9), round(6e9), 0.1))
    assert found["tokens_per_second"] == 0
    assert not {"ttft_p50_ms", "itl_p99_ms"} & found.keys()


@pytest.mark.parametrize(
    ("text", "more", "fault"),
    [
        (VALID, {}, None),
        ('{ "color": "blue" }', {}, None),
        ('{"color":"green"}', {}, "not valid under its schema"),
        ('{"color":', {}, "no JSON"),
        ("NaN", {}, "no JSON"),
        (VALID, {"finish_reason": "length"}, "cut at its most tokens"),
        (VALID, {"problem": "503: busy"}, "no answer"),
    ],
)
def test_an_answer_is_valid_if_it_is_whole_and_obeys_its_schema(
    text: str, more: dict[str, Any], fault: str | None
) -> None:
    answer = answered(COLOR, [1.0], 5, text, **more)
    assert fault_of(answer) == fault
    found = figures(Run([answer, answered(COLOR, [1.0], 5, VALID)], 0, round(2e9), 0.1))
    assert found["valid_percent"] == (100 if fault is None else 50)


def test_formats_count_as_well() -> None:
    date = {"type": "string", "format": "date"}
    assert fault_of(answered(date, [1.0], 5, '"2026-02-28"')) is None
    assert fault_of(answered(date, [1.0], 5, '"2026-02-30"')) == "not valid under its schema"


def test_a_report_compares_within_rounds_and_says_what_was_wrong() -> None:
    run = {"client_cores": 0.1, "other_cores": 0.05, "failed": 0}
    rounds = [
        {
            OURS: run | {"tokens_per_second": ours, "valid_percent": 100, "constrained": 20, "wrong": {}},
            OURS_FREE: run | {"tokens_per_second": 100},
            PEER: run | {"tokens_per_second": 50, "valid_percent": 90.0, "constrained": 20, "wrong": {"no JSON": 2}},
        }
        for ours in (98, 110)
    ]
    servers = {"oaiserve": {"version": "1", "command": "serve"}}
    results = {"machine": "M", "created": "D", "streams": 64, "seconds": 40.0, "warm_up_seconds": 10.0}
    text = report(results | {"servers": servers, "rounds": rounds})
    (row,) = [line for line in text.splitlines() if line.startswith("| output")]
    assert row.endswith("| **1.04 (0.98..1.10)** | ≥ 0.95 | **2.08 (1.96..2.20)** | ≥ 2 |")
    assert f"- {PEER}: of 40 constrained answers 4 no JSON." in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    alone = report(
        results | {"servers": servers, "rounds": [{key: each[key] for key in (OURS, OURS_FREE)} for each in rounds]}
    )
    assert PEER not in alone


def test_the_documentation_has_the_markers() -> None:
    page = (Path(__file__).parents[2] / "docs/benchmarks.md").read_text()
    assert "<!-- structured -->" in page
    assert "<!-- end of structured -->" in page
