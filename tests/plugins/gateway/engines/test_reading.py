"""Reading answers never fails, whatever an engine sends, and in whatever parts."""

import json
import random
from typing import Any

from oaiserve.plugins.gateway.engines.body import body_of
from oaiserve.plugins.gateway.engines.read_again import prompt_in
from oaiserve.plugins.gateway.engines.reading import Event, Reading

ODD = (None, True, 0, -1, 7, 2**70, 1e300, -0.5, "", "text", "é\ud83d", [], {}, [[]], [None], [{}], {"content": 1})
NAMES = (
    *Event.__struct_fields__,
    *("index", "finish_reason", "text", "content", "tool_calls", "prompt_tokens", "completion_tokens", "input_tokens"),
    *("cached_tokens", "prompt_tokens_details", "input_tokens_details", "completion_tokens_details", "stop_reason"),
    *("cache_read_input_tokens", "prompt_ms", "predicted_ms", "prompt_n", "cache_n", "predicted_n", "role", "messages"),
    *(
        "prompt",
        "input",
        "system",
        "tools",
        "model",
        "metadata",
        "session_id",
        "image_url",
        "n",
        "max_tokens",
        "stream",
    ),
)


def odd(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 3 or kind < 0.4:
        return rng.choice(ODD)
    if kind < 0.6:
        return [odd(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice(NAMES): odd(rng, depth + 1) for _ in range(rng.randrange(6))}


def test_odd_answers_and_bodies_are_read_or_left_unread() -> None:
    rng = random.Random(5)
    for _ in range(3000):
        content = {rng.choice(NAMES): odd(rng) for _ in range(rng.randrange(8))}
        body = json.dumps(content, ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass")
        prompt_in(body, "m")
        found = body_of(body)
        assert found.num_choices > 0
        assert all(type(value) in (int, float) for value in found.params.values())
        events = b"data: " + body + rng.choice((b"\n\n", b"\r\n\r\n"))
        for kind, answer in ((b"application/json", body), (b"text/event-stream", events * 2)):
            reading = Reading(kind, is_coded=False)
            start = 0
            while start < len(answer):
                end = start + rng.randrange(1, len(answer) + 1)
                reading.push(answer[start:end], start)
                start = end
            reading.end(start)
            told = reading.told
            numbers = (told.prompt_tokens, told.cached_tokens, told.completion_tokens, told.prompt_ns, told.load_ns)
            assert all(number is None or 0 <= number < 2**62 for number in numbers)


def test_a_line_without_an_end_is_given_up() -> None:
    reading = Reading(b"text/event-stream", is_coded=False)
    for _ in range(40):
        reading.push(b"data: " + b"x" * 50_000, 1)
    assert reading.unread.startswith("more than 1048576 bytes")
