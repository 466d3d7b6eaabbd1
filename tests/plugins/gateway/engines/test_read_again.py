"""What an engine could have had cached: prompts compared as texts and turns, and with what the engine says."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oaiserve.plugins.gateway.client_request import LARGE_BYTES
from oaiserve.plugins.gateway.engines.read_again import PromptReader
from oaiserve.plugins.gateway.engines.times import PassedTimes
from tests.plugins.gateway.engines.doubles import CHAT, Front, RawEngine, before, whole
from tests.world.serving import Place

LONG = "It is a truth universally acknowledged, that a single man must be in want of a wife. " * 20
TOKENS = 500
SYSTEM = {"role": "system", "content": LONG}
HELLO = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Good morning"}
Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def engine(place: Place) -> RawEngine:
    return RawEngine(place)


@pytest.fixture
def front(place: Place, engine: RawEngine, tmp_path: Path) -> Iterator[Front]:
    file = tmp_path / "keys"
    file.write_text("anna a\nbert b\n")
    with before(place, engine, api_key_file=(file,)) as running:
        running.http.headers["authorization"] = "Bearer a"
        yield running


@pytest.fixture
def ask(front: Front, engine: RawEngine) -> Ask:
    """Send messages to an engine that says how many of their tokens were cached, and return the account."""
    numbers = iter(range(100))

    def asked(*messages: dict[str, str], cached: int | None = 0, key: str = "a", **headers: str) -> dict[str, Any]:
        details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
        usage = {"prompt_tokens": TOKENS, "completion_tokens": 2, **details}
        engine.answers[CHAT] = whole({"choices": [], "usage": usage})
        request_id = f"request-{next(numbers)}"
        of_client = {"authorization": f"Bearer {key}", "x-request-id": request_id}
        front.chat(body={"messages": [*messages]}, headers=of_client | headers)
        return front.account(request_id)

    return asked


def test_an_engine_without_a_cache_is_asked_for_it(ask: Ask) -> None:
    ask(SYSTEM, HELLO)
    found = ask(SYSTEM, HELLO, ANSWER, HELLO)
    said = found["explanation"][0]
    common = found["reuse"]["common_tokens"]
    assert 0.9 * TOKENS < common <= TOKENS
    assert said.startswith(f"About {common} of 500 prompt tokens could have been cached, as ")
    assert said.endswith(" before in request-0; the engine says 0: is its prefix cache on?")
    assert found["read_again_tokens"] == pytest.approx(common, abs=2)


def test_a_part_that_the_engine_had_cached_is_not_read_again(ask: Ask) -> None:
    ask(SYSTEM, HELLO)
    found = ask(SYSTEM, HELLO, ANSWER, HELLO, cached=480)
    assert (found["read_again_tokens"], found["read_again_reason"]) == (0, None)
    assert not any("cache" in said for said in found["explanation"])
    found = ask(SYSTEM, HELLO, ANSWER, HELLO, cached=200)
    assert "the engine says 200: is its prefix cache too small?" in found["explanation"][0]


def test_a_clock_in_the_system_message_is_found(ask: Ask) -> None:
    ask({"role": "system", "content": f"It is 12:00:01. {LONG}"}, HELLO)
    found = ask({"role": "system", "content": f"It is 12:00:07. {LONG}"}, HELLO)
    assert found["read_again_reason"] == "system"
    assert "prompt tokens were read again: the system message differs from the one" in found["explanation"][0]
    assert "Put what changes, such as a clock, at the end" in found["explanation"][0]


def test_an_engine_that_says_nothing_of_its_cache_gets_no_blame(ask: Ask) -> None:
    ask(SYSTEM, HELLO, cached=None)
    found = ask(SYSTEM, HELLO, ANSWER, HELLO, cached=None)
    assert found["explanation"][0].endswith("The engine does not say how many of them it had cached.")
    assert found["read_again_tokens"] == 0


def test_prompts_of_other_clients_are_not_compared(ask: Ask) -> None:
    ask(SYSTEM, HELLO)
    assert ask(SYSTEM, HELLO, key="b")["reuse"] == {}


@pytest.mark.parametrize("is_named", [True, False])
def test_turns_of_an_agent_are_one_run(front: Front, ask: Ask, is_named: bool) -> None:
    headers = {"x-session-id": "s"} if is_named else {}
    ask(SYSTEM, HELLO, **headers)
    ask(SYSTEM, HELLO, ANSWER, HELLO, **headers)
    front.settle(0.2)
    (run,) = front.http.get("/debug/runs").json()["runs"]
    assert run["num_turns"] == 2


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b"[1]",
        b'{"messages": 7}',
        b'{"messages": [1, null, "x"]}',
        b"\xff",
    ],
    ids=["deep", "a list", "a number", "no messages", "no UTF-8"],
)
def test_bodies_that_cannot_be_compared_pass(front: Front, engine: RawEngine, body: bytes) -> None:
    engine.answers[CHAT] = whole({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}})
    for _ in range(2):
        assert front.http.post(CHAT, content=body, headers={"content-type": "application/json"}).status_code == 200
    assert engine.questions()[-1].body == body


def test_a_small_prompt_is_read_when_its_answer_has_ended() -> None:
    body = bytearray(msgspec.json.encode({"prompt": "one"}))
    reader = PromptReader(body, "m")
    body[:] = msgspec.json.encode({"prompt": "two"})
    found = reader.result()
    assert found is not None
    assert found == PromptReader(body, "m").result()


def test_a_large_prompt_is_read_in_a_thread_while_the_engine_works() -> None:
    async def main() -> None:
        reader = PromptReader(msgspec.json.encode({"prompt": "x" * LARGE_BYTES}), "m")
        assert reader.result() is None
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        assert reader.result() is not None

    asyncio.run(main())


def test_no_body_is_kept_with_the_last_requests_of_an_engine(ask: Ask) -> None:
    ask(SYSTEM, HELLO)
    assert not [kept for kept in gc.get_objects() if type(kept) is PromptReader]


def test_a_request_ends_when_the_client_has_its_answer() -> None:
    times = PassedTimes(received=1)
    assert times.ended(lambda: 9).responded == 9
    times.responded = 5
    assert times.ended(lambda: 9).responded == 5
