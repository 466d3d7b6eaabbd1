"""What a client sends costs time in proportion to its size: here are forms that once cost the square of it.

`tools.attack.growth` sends all forms to a real server.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from oaiserve.app import routes
from oaiserve.config import Config
from oaiserve.engine.text.template_abilities import in_turns, one_call_each
from oaiserve.routes.responses.request_input import _cuts
from tests.growth import is_linear
from tests.routes.conftest import Served
from tools.attack.forms import FILES, forms, grown

NUMBER = 1000
NUM_BYTES = 2**17
QUADRATIC = (  # what once was
    ("/v1/messages", "added tools"),
    ("/v1/messages", "thoughts"),
    ("/v1/chat/completions", "results without calls"),
)


def test_each_route_with_a_body_has_forms_that_grow() -> None:
    posted = {route.path for route in routes(Config("demo")) if "POST" in (route.methods or ())}
    assert posted == {form.path for form in forms()}


def test_a_form_is_as_large_as_asked() -> None:
    assert grown('«[»[«{"#":##},»]«]»', 22) == '[[[{"0":1},{"1":2}]]]'
    for form in forms():
        body = form.body(3000)
        packed = form.headers.get("content-encoding") is not None
        assert packed or 1500 < len(body) < 6000, form
        if not packed and not form.name.startswith("any:") and form.path != FILES:
            json.loads(body)


@pytest.mark.parametrize(("path", "name"), QUADRATIC)
def test_time_grows_with_the_bytes(served: Served, path: str, name: str) -> None:
    form = next(form for form in forms() if (form.path, form.name) == (path, name))

    def send(num_bytes: int) -> None:
        served.http.post(path, content=form.body(num_bytes), headers={"content-type": "application/json"})

    assert is_linear(send, NUM_BYTES)


Message = dict[str, Any]


def said(number: int) -> list[Message]:
    return [{"role": "user", "content": [{"type": "text", "text": "a"}], f"field_{each}": 1} for each in range(number)]


def called(number: int) -> list[Message]:
    calls = [{"id": f"c{each}", "function": {"name": "f", "arguments": "{}"}} for each in range(number)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in calls]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]


def answered(number: int) -> list[Message]:
    call = {"type": "function_call", "id": "c", "call_id": "c"}
    return [call, *({"type": "function_call_output", "id": f"o{each}", "call_id": "c"} for each in range(number))]


@pytest.mark.parametrize(("change", "made"), [(in_turns, said), (one_call_each, called), (_cuts, answered)])
def test_messages_are_repaired_in_linear_time(
    change: Callable[[Sequence[Message]], list[Any]], made: Callable[[int], list[Message]]
) -> None:
    assert is_linear(lambda number: change(made(number)), NUMBER)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/messages", "messages"),
        ("/v1/messages/count_tokens", "messages"),
        ("/tokenize", "messages"),
        ("/v1/responses", "input"),
        ("/v1/responses/input_tokens", "input"),
        ("/v1/responses/compact", "input"),
    ],
)
def test_too_many_messages_are_refused_before_they_are_read(served: Served, path: str, field: str) -> None:
    needed = {"model": "demo", "max_tokens": 5} if "messages" in path else {}
    error = served.post(path, **needed, **{field: [{"role": "user", "content": ""}] * 16385}).json()["error"]
    assert error["message"] == (
        f"Invalid '{field}': must have at most 16384 entries, got 16385. Send fewer, or join some of them."
    )


@pytest.mark.parametrize(("num_bytes", "turns"), [(4_000, 0), (12_000, 1)])
def test_work_on_all_but_small_bodies_keeps_off_the_event_loop(served: Served, num_bytes: int, turns: int) -> None:
    while not served.engine.turns.empty():
        served.engine.turns.get()
    assert served.chat(user="a" * num_bytes).status_code == 200
    assert served.engine.turns.qsize() == turns
