"""The sentences on an answer in a loop, and the metrics and fields that count it."""

from typing import Any

import pytest

from oaiserve.facts.record import EngineAccount
from oaiserve.telemetry.explanation import sentences
from oaiserve.telemetry.record_facts import json_of, log_fields
from tests.records import record_at

LOOP = {"num_loops": 1, "loop_tokens": 6300, "loop_period_tokens": 18, "num_choices": 1}
REPEATED = "The last 6,300 tokens of the answer repeat 18 tokens again and again."
STOPS = 'makes this rarer; "repetition_detection": true ends such an answer.'


@pytest.mark.parametrize(
    ("account", "record", "expected"),
    [
        ({}, {}, f"{REPEATED} A repetition_penalty of 1.1 {STOPS}"),
        (
            {},
            {"sampling": {"temperature": 0, "repetition_penalty": 1}},
            f"{REPEATED} A repetition_penalty of 1.1, or a temperature above 0, {STOPS}",
        ),
        (
            {},
            {"sampling": {"repetition_penalty": 1.1}},
            f"{REPEATED} A repetition_penalty a little above its 1.1, or a larger model, {STOPS}",
        ),
        (
            {},
            {"sampling": {"repetition_penalty": 1}, "params": {"repetition_penalty": 1.0}},
            f"{REPEATED} The request set repetition_penalty to 1: a model's own, or 1.1, {STOPS}",
        ),
        (
            {"num_choices": 2, "loop_period_tokens": 1},
            {},
            f"The last 6,300 tokens of an answer repeat 1 token again and again. A repetition_penalty of 1.1 {STOPS}",
        ),
    ],
)
def test_sentences_name_the_loop_and_what_helps(account: dict[str, int], record: dict[str, Any], expected: str) -> None:
    ended = record_at(0, 0, 0, 0, 0, 0, 0, 0, account=EngineAccount(**LOOP | account), **record)
    first, *_ = sentences(ended, [])
    assert first == expected


def test_json_and_log_line_have_the_loop() -> None:
    loops = record_at(0, 0, 0, 0, 0, 0, 0, 0, account=EngineAccount(**LOOP))
    assert json_of(loops)["loop"] == {"choices": 1, "tokens": 6300, "period_tokens": 18}
    line = log_fields(loops)
    assert [line[name] for name in ("num_loops", "loop_tokens", "loop_period_tokens")] == [1, 6300, 18]


def test_request_without_a_loop_has_no_field_of_one() -> None:
    plain = record_at(0, 0, 0, 0, 0, 0, 0, 0, account=EngineAccount())
    assert json_of(plain)["loop"] is None
    assert not [name for name in log_fields(plain) if "loop" in name]
    assert not any("again and again" in sentence for sentence in sentences(plain, []))
