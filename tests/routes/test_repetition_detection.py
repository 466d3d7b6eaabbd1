"""The parameter that ends a choice in a loop, and what the routes answer then."""

from typing import Any

import pytest

from oaiserve.engine.request import FinishReason
from oaiserve.engine.types.loop_rule import USUAL, LoopRule
from tests.routes.doubles import says
from tests.serving import Served

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
ROUTES = [
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {"model": "org/demo", "max_tokens": 9, **CHAT}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (True, USUAL),
        (False, None),
        (None, None),
        ({}, None),
        ({"max_pattern_size": 0, "min_count": 3}, None),
        ({"max_pattern_size": 20, "min_count": 3}, LoopRule(20, 1, 3, 0)),
        ({"max_pattern_size": 20.0, "min_pattern_size": 0, "min_count": 3, "min_length": None}, LoopRule(20, 1, 3, 0)),
        (
            {"max_pattern_size": 1024, "min_pattern_size": 16, "min_count": 256, "min_length": 2**15},
            LoopRule(1024, 16, 256, 2**15),
        ),
    ],
)
def test_all_generation_routes_take_the_rule_of_a_loop(
    served: Served, path: str, body: dict[str, Any], value: Any, rule: LoopRule | None
) -> None:
    assert served.post(path, **body, repetition_detection=value).status_code == 200
    assert served.engine.submitted.get().params.loop_rule == rule


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("yes", "Invalid 'repetition_detection': must be "),
        ({"max_pattern_size": 1025, "min_count": 3}, ".max_pattern_size': must be 0 to 1024, got 1025."),
        ({"max_pattern_size": -1}, ".max_pattern_size': must be 0 to 1024, got -1."),
        ({"max_pattern_size": 2.5, "min_count": 3}, ".max_pattern_size': must be an integer, got 2.5."),
        ({"max_pattern_size": "9"}, ".max_pattern_size': must be an integer, got a string."),
        ({"max_pattern_size": 9}, ".min_count': must be 2 to 256, got None."),
        ({"max_pattern_size": 9, "min_count": 1}, ".min_count': must be 2 to 256, got 1."),
        ({"max_pattern_size": 9, "min_count": 257}, ".min_count': must be 2 to 256, got 257."),
        (
            {"max_pattern_size": 9, "min_count": 2, "min_length": 2**15 + 1},
            ".min_length': must be 0 to 32768, got 32769.",
        ),
        (
            {"max_pattern_size": 9, "min_pattern_size": 10, "min_count": 2},
            ".min_pattern_size': must be <= max_pattern_size (9), got 10.",
        ),
        ({"min_pattern_size": 1}, ".min_pattern_size': must be <= max_pattern_size (0), got 1."),
        ({"max_patern_size": 9}, ".max_patern_size': is not supported."),
    ],
)
def test_wrong_rule_gets_a_sentence_that_names_the_field(served: Served, value: Any, message: str) -> None:
    response = served.post("/v1/chat/completions", **CHAT, repetition_detection=value)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "repetition_detection")
    assert message in error["message"]


def loops() -> Any:
    return says("ha", " ha", finish=FinishReason.REPETITION, stop_reason="repetition_detected")


@pytest.mark.parametrize(("path", "body"), ROUTES[:2])
def test_choice_in_a_loop_has_vllms_reasons(served: Served, path: str, body: dict[str, Any]) -> None:
    served.engine.script = loops()
    (choice,) = served.post(path, **body).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    record = served.telemetry.records.get()
    assert record.finish_reasons == record.answer_reasons == ("repetition",)


def test_message_in_a_loop_ends_its_turn(served: Served) -> None:
    served.engine.script = loops()
    path, body = ROUTES[3]
    message = served.post(path, **body).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)


@pytest.mark.plugin("responses")
def test_response_in_a_loop_is_incomplete(served: Served) -> None:
    served.engine.script = loops()
    path, body = ROUTES[2]
    response = served.post(path, **body).json()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "repetition"})
