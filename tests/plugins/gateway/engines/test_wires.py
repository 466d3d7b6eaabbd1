"""The streams of Ollama and SGLang, as their sources write them: every byte passes, and all that they tell is read.

Ollama: api/types.go. SGLang: srt/entrypoints/openai/protocol.py, with --enable-cache-report, and its own /generate.
MIXED_ANSWERS=500 tries as many mixed answers of each as `python -m tools.engines` sends to real engines.
"""

import json
import os
import random
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest

from oaiserve.plugins.gateway.engines.reading import EVENT_STREAM, JSON, LINES
from tests.plugins.gateway.engines.doubles import (
    ASK,
    CHAT,
    DONE,
    OLLAMA,
    SGLANG,
    Part,
    RawEngine,
    before,
    body_of,
    event,
    stream,
    whole,
)
from tests.world.serving import Place

MIXED = int(os.environ.get("MIXED_ANSWERS", "50"))  # answers of each engine, a multiple of LISTED
LISTED = 25  # accounts to check at a time
AT = {"model": "llama3.2", "created_at": "2023-08-04T08:52:19.385406455-07:00"}
OLLAMA_END = {
    **AT,
    "done": True,
    "done_reason": "stop",
    "total_duration": 4883583458,
    "load_duration": 1334875,
    "prompt_eval_count": 26,
    "prompt_eval_cached_count": 16,
    "prompt_eval_duration": 342546000,
    "eval_count": 282,
    "eval_duration": 4535599000,
}


def line(content: Any) -> bytes:
    return json.dumps(content).encode() + b"\n"


@pytest.mark.parametrize(
    ("path", "parts", "last"),
    [
        (
            "/api/chat",
            [{"message": {"role": "assistant", "content": text, "images": None}} for text in ("The", " sky")],
            {"message": {"role": "assistant", "content": ""}},
        ),
        (
            "/api/chat",
            [{"message": {"role": "assistant", "content": "", "thinking": text}} for text in ("Hm", ".")],
            {"message": {"role": "assistant", "content": ""}},
        ),
        ("/api/generate", [{"response": text} for text in ("The", " sky")], {"response": "", "context": [1, 2, 3]}),
        ("/api/generate", [{"response": "", "thinking": text} for text in ("Hm", ".")], {"response": ""}),
    ],
    ids=["chat", "chat-thinking", "generate", "generate-thinking"],
)
def test_ollamas_lines_are_read(place: Place, path: str, parts: list[dict[str, Any]], last: dict[str, Any]) -> None:
    engine = RawEngine(place, dict(OLLAMA))
    lines = [line(AT | part | {"done": False}) for part in parts]
    answer = stream(0.5, lines[0], 0.1, lines[1], 0.1, line(OLLAMA_END | last), kind=b"application/x-ndjson")
    engine.answers[path] = answer
    with before(place, engine) as front:
        got = front.http.post(path, json=ASK, headers={"x-request-id": "ollama"})
        account = front.account("ollama")
    assert got.content == body_of(answer)
    assert (account["prompt_tokens"], account["completion_tokens"], account["finish_reasons"]) == (26, 282, ["stop"])
    assert account["cached_tokens"] == 16
    assert (account["stream"], account["token_gaps"]["number"]) == (True, 1)
    assert account["time_to_first_token_ns"] == pytest.approx(5e8, rel=0.02)
    causes_ns = next(phase for phase in account["phases"] if phase["name"] == "first_byte")["causes_ns"]
    assert (causes_ns["model_load"], causes_ns["alone"]) == (1334875, 342546000)


def test_sglangs_stream_is_read(place: Place) -> None:
    engine = RawEngine(place, dict(SGLANG))
    base = {"id": "e1b2", "object": "chat.completion.chunk", "created": 1, "model": "m"}

    def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, "matched_stop": None}
        return event(base | {"choices": [choice]} | more)

    details = {"cached_tokens": 20}
    usage = {"prompt_tokens": 33, "total_tokens": 35, "completion_tokens": 2, "prompt_tokens_details": details}
    answer = stream(
        chunk({"role": "assistant", "content": ""}),
        0.4,
        chunk({"role": None, "content": None, "reasoning_content": "Hm"}),
        0.1,
        chunk({"role": None, "content": "Hi"}),
        chunk({"role": None, "content": None}, "stop"),
        event(base | {"choices": [], "usage": usage | {"reasoning_tokens": 1}}),
        DONE,
    )
    engine.answers[CHAT] = answer
    with before(place, engine) as front:
        got = front.chat(body={"stream": True}, headers={"x-request-id": "sglang"})
        account = front.account("sglang")
    assert got.content == body_of(answer)
    assert (account["prompt_tokens"], account["cached_tokens"], account["completion_tokens"]) == (33, 20, 2)
    assert account["reasoning_tokens"] == 1
    assert (account["response_id"], account["finish_reasons"]) == ("e1b2", ["stop"])
    assert account["time_to_first_token_ns"] == pytest.approx(4e8, rel=0.02)  # The part with the role has no text.
    assert account["token_gaps"]["number"] == 1
    assert account["routing"] | {"engine_kind": "sglang", "engine_version": "0.5.23"} == account["routing"]


@pytest.mark.parametrize("is_stream", [True, False])
def test_sglangs_own_api_is_read(place: Place, is_stream: bool) -> None:
    engine = RawEngine(place, dict(SGLANG))
    numbers = {"id": "e1b2", "prompt_tokens": 33, "cached_tokens": 20, "reasoning_tokens": 1}

    def part(text: str, completion_tokens: int, reason: dict[str, Any] | None) -> dict[str, Any]:
        meta_info = numbers | {"completion_tokens": completion_tokens, "finish_reason": reason}
        return {"text": text, "output_ids": [1], "meta_info": meta_info}

    last = part("Hello", 3, {"type": "length", "length": 3})
    parts = [part(text, number, None) for number, text in enumerate(("H", "Hel"), start=1)]
    if is_stream:
        engine.answers["/generate"] = stream(0.4, *map(event, parts), 0.1, event(last), DONE)
    else:
        engine.answers["/generate"] = whole(last)
    with before(place, engine) as front:
        headers = {"x-request-id": "own"}
        front.http.post("/generate", json={"text": "Hi", "stream": is_stream}, headers=headers)
        account = front.account("own")
    assert (account["prompt_tokens"], account["cached_tokens"], account["completion_tokens"]) == (33, 20, 3)
    assert (account["reasoning_tokens"], account["finish_reasons"]) == (1, ["length"])
    if is_stream:
        assert account["time_to_first_token_ns"] == pytest.approx(4e8, rel=0.02)
        assert account["token_gaps"]["number"] == 2


def test_an_anthropic_stream_is_read(place: Place) -> None:
    engine = RawEngine(place)
    usage = {"input_tokens": 5, "cache_read_input_tokens": 20, "output_tokens": 1}
    events = [
        {"type": "message_start", "message": {"id": "msg_1", "usage": usage}},
        {"type": "content_block_start", "index": 0},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 9}},
        {"type": "message_stop"},
    ]
    answer = stream(*[b"event: " + one["type"].encode() + b"\n" + event(one) for one in events])
    engine.answers["/v1/messages"] = answer
    with before(place, engine) as front:
        got = front.http.post("/v1/messages", json=ASK | {"stream": True}, headers={"x-request-id": "claude"})
        account = front.account("claude")
    assert got.content == body_of(answer)
    assert (account["prompt_tokens"], account["cached_tokens"], account["completion_tokens"]) == (25, 20, 9)
    assert (account["response_id"], account["finish_reasons"]) == ("msg_1", ["end_turn"])


def ollama_answer(rng: random.Random, number: int) -> tuple[str, bytes, bytes, int | None]:
    """Return the path, content type and bytes of an answer of Ollama, and the tokens of its prompt."""
    kind = rng.randrange(5)
    end = OLLAMA_END | {"prompt_eval_count": number}
    texts = [rng.choice(("The", " sky", "\u00e9\U0001f600", "\n\n", '"{', "")) for _ in range(rng.randrange(1, 9))]
    if kind == 0:
        return "/api/chat", JSON, json.dumps(end | {"message": {"content": "".join(texts)}}).encode(), number
    if kind == 1:
        return "/api/chat", JSON, b'{"error":"model requires more system memory"}', None
    if kind == 2:
        parts = [{"response": text} for text in texts]
        return "/api/generate", LINES, b"".join(line(AT | part | {"done": False}) for part in parts) + line(end), number
    name = rng.choice(("content", "thinking"))
    parts = [{"message": {"role": "assistant", name: text}} for text in texts]
    last = line(end | {"message": {"role": "assistant", "content": ""}})
    return "/api/chat", LINES, b"".join(line(AT | part | {"done": False}) for part in parts) + last, number


def sglang_answer(rng: random.Random, number: int) -> tuple[str, bytes, bytes, int | None]:
    """Return the same of SGLang."""
    kind = rng.randrange(5)
    texts = [rng.choice(("The", " sky", "\u00e9\U0001f600", "\n\n", '"{', "")) for _ in range(rng.randrange(1, 9))]
    usage = {"prompt_tokens": number, "completion_tokens": len(texts), "prompt_tokens_details": None}
    if kind == 0:
        return CHAT, JSON, json.dumps({"id": "a", "choices": [], "usage": usage}).encode(), number
    if kind == 1:
        return CHAT, JSON, b'{"object":"error","message":"too long","type":"BadRequestError","code":400}', None
    if kind == 2:
        events = [event({"text": text, "meta_info": usage}) for text in accumulate(texts)]
        return "/generate", EVENT_STREAM, b"".join(events) + DONE, number
    name = rng.choice(("content", "reasoning_content"))
    choices = [{"index": 0, "delta": {name: text}, "finish_reason": None} for text in texts]
    more = {"usage": usage} if rng.random() < 0.5 else {}  # with `continuous_usage_stats`
    events = [event({"id": "a", "choices": [choice]} | more) for choice in choices]
    return CHAT, EVENT_STREAM, b"".join(events) + event({"id": "a", "choices": [], "usage": usage}) + DONE, number


@pytest.mark.parametrize(
    ("engine_answers", "answer_of"), [(OLLAMA, ollama_answer), (SGLANG, sglang_answer)], ids=["ollama", "sglang"]
)
def test_mixed_answers_pass_in_any_parts(
    place: Place, engine_answers: dict[str, list[Part]], answer_of: Callable[[random.Random, int], Any]
) -> None:
    engine = RawEngine(place, dict(engine_answers))
    rng = random.Random(11)
    told: dict[str, int | None] = {}
    with before(place, engine) as front:
        for number in range(MIXED):
            path, kind, content, told[f"mixed-{number}"] = answer_of(rng, number + 1)
            cuts = sorted({0, len(content), *(rng.randrange(len(content)) for _ in range(rng.randrange(6)))})
            parts: list[Part] = [content[start:end] for start, end in pairwise(cuts)]
            parts.insert(rng.randrange(len(parts) + 1), rng.choice((0.0, 0.01)))
            engine.answers[path] = stream(*parts, kind=kind)
            got = front.http.post(path, json=ASK, headers={"x-request-id": f"mixed-{number}"})
            assert got.content == content
            if number % LISTED == LISTED - 1:
                accounts = {one["request_id"]: one for one in front.listed()[:LISTED]}
                for request_id, account in accounts.items():
                    assert sum(phase["duration_ns"] for phase in account["phases"]) == account["duration_ns"]
                    assert account["prompt_tokens"] == (told.pop(request_id) or 0), request_id
    assert not told
