"""What a client sends costs time in proportion to its size: here are forms that once cost the square of it.

`tools.attack.growth` sends all forms.
"""

import json

import pytest

from oaiserve.app import routes
from oaiserve.config import Config
from tests.missing_plugins import is_served
from tests.serving import Served
from tools.attack.forms import forms, grown
from tools.attack.functions.linear import is_linear

NUM_BYTES = 2**17
QUADRATIC = (  # what once was
    ("/v1/messages", "added tools"),
    ("/v1/messages", "thoughts"),
    ("/v1/chat/completions", "results without calls"),
)


def test_each_route_with_a_body_has_forms_that_grow() -> None:
    posted = {route.path for route in routes(Config("demo")) if "POST" in (route.methods or ())}
    assert posted == {form.path for form in forms() if is_served(form.path)}


def test_a_form_is_as_large_as_asked() -> None:
    assert grown('«[»[«{"#":##},»]«]»', 22) == '[[[{"0":1},{"1":2}]]]'
    for form in forms():
        body = form.body(3000)
        packed = form.headers.get("content-encoding") is not None
        assert packed or 1500 < len(body) < 6000, form
        if not packed and not form.name.startswith("any:") and "multipart" not in form.headers.get("content-type", ""):
            json.loads(body)


@pytest.mark.parametrize(("path", "name"), QUADRATIC)
def test_time_grows_with_the_bytes(served: Served, path: str, name: str) -> None:
    form = next(form for form in forms() if (form.path, form.name) == (path, name))

    def send(num_bytes: int) -> None:
        served.http.post(path, content=form.body(num_bytes), headers={"content-type": "application/json"})

    assert is_linear(send, NUM_BYTES)


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
