"""Decides what each random client does, as a function of the seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = ("a", "the", "fox", "sea", "hill", "old", "river", "sings", "under", "then", "why", "seven", "Once", "Question")


@dataclass(frozen=True)
class Action:
    """One request, with all random choices made. The last four fields are for clients that leave early."""

    kind: str
    path: str
    body: bytes
    statuses: frozenset[int] = frozenset({200, 429})
    method: str = "POST"
    num_answers: int = 1  # choices, over all prompts
    body_bytes: int | None = None  # sends only so many bytes of its body, and leaves
    leave_after_events: int | None = None  # leaves after so many events of its stream
    leave_after_seconds: float | None = None  # leaves then, having read nothing
    by_reset: bool = False  # resets the connection instead of closing it

    @property
    def reads_whole_answer(self) -> bool:
        return self.body_bytes is self.leave_after_events is self.leave_after_seconds is None

    @property
    def reaches_a_generation_route(self) -> bool:
        return self.method == "POST" and self.path in (CHAT, COMPLETIONS)


@dataclass(frozen=True)
class Turn:
    """The requests that a client sends at once, after a pause."""

    pause_seconds: float
    actions: tuple[Action, ...]


def bad(kind: str, status: int, body: bytes | dict[str, Any], path: str = COMPLETIONS, method: str = "POST") -> Action:
    """Make a request that must be refused. A full server may answer 429 if only the tokenizer finds the error."""
    return Action(f"bad: {kind}", path, as_bytes(body), frozenset({status, 429}), method)


def as_bytes(body: bytes | dict[str, Any]) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


HI = [{"role": "user", "content": "Hi"}]
BAD_ACTIONS = (
    bad("half an object", 400, b'{"prompt": "Hi"'),
    bad("not UTF-8", 400, b'{"prompt": "\xff\xfe"}'),
    bad("a list", 400, b'["Hi"]', CHAT),
    bad("a prompt of a wrong type", 400, {"prompt": 5}),
    bad("max_tokens of a wrong type", 400, {"messages": HI, "max_tokens": "5"}, CHAT),
    bad("temperature out of range", 400, {"prompt": "Hi", "temperature": 3}),
    bad("an id outside the vocabulary", 400, {"prompt": [2**31 - 1]}),
    bad("a prompt that is too long", 400, {"prompt": "one two three " * 4000}),
    bad("an unknown role", 400, {"messages": [{"role": "king", "content": "Hi"}]}, CHAT),
    bad("a tool of an unknown type", 400, {"messages": HI, "tools": [{"type": "custom"}]}, CHAT),
    bad("an unknown model", 404, {"model": "gpt-9", "prompt": "Hi"}),
    bad("an unknown model, streamed", 404, {"model": "gpt-9", "messages": HI, "stream": True}, CHAT),
    bad("an unknown path", 404, {}, "/v1/nothing"),
    bad("a wrong method", 405, b"", COMPLETIONS, "GET"),
)


def turns(seed: int, client: int) -> Iterator[Turn]:
    """Yield the turns of a client without end, as a function of these two numbers."""
    rng = random.Random(f"{seed}/{client}")
    yield Turn(rng.uniform(0, 2), ())  # clients start at different times
    if client == 0:  # so that labels take all their values early
        yield Turn(0.0, BAD_ACTIONS)
        yield Turn(0.0, tuple(kind(rng) for kind in KINDS))
    while True:
        if rng.random() < 0.04:
            yield Turn(0.0, tuple(valid(rng, "burst") for _ in range(rng.randint(16, 32))))
        else:
            (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
            yield Turn(rng.expovariate(5), (kind(rng),))


def is_refused(rng: random.Random) -> Action:
    return rng.choice(BAD_ACTIONS)


def reads_all(rng: random.Random) -> Action:
    return valid(rng, "reads all of it")


def valid(rng: random.Random, kind: str, **fields: Any) -> Action:
    is_chat = rng.random() < 0.5
    body: dict[str, Any] = {"max_tokens": rng.choice((1, 2, 4, 8, 16, 32)), "n": rng.choices((1, 2, 3), (8, 1, 1))[0]}
    body["stream"] = rng.random() < 0.5
    body |= rng.choice(({"temperature": 0}, {"temperature": 1.2, "top_p": 0.9}, {"seed": rng.randrange(1000)}, {}))
    extras: tuple[dict[str, Any], ...] = (
        {"stop": rng.sample([" the", "\n", "e", ". "], 2)},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"logit_bias": {str(rng.randrange(1000)): 5}},
        {"ignore_eos": True},
        {"logprobs": True, "top_logprobs": rng.randint(0, 20)} if is_chat else {"logprobs": rng.randint(0, 5)},
        {"stream_options": {"include_usage": True}} if body["stream"] else {},
    )
    for extra in extras:
        if rng.random() < 0.2:
            body |= extra
    prompts = prompts_of(rng) if not is_chat else [text(rng)]
    body |= {"messages": [{"role": "user", "content": prompts[0]}]} if is_chat else {"prompt": prompts}
    body |= fields
    num_answers = body["n"] * len(prompts)
    return Action(kind, CHAT if is_chat else COMPLETIONS, as_bytes(body), num_answers=num_answers)


def prompts_of(rng: random.Random) -> list[Any]:
    """Make prompts of text or token ids. Some share a beginning, some are long."""
    num_prompts = rng.choices((1, 2), (6, 1))[0]
    if rng.random() < 0.3:
        return [[rng.randrange(100, 40_000) for _ in range(rng.randint(1, 300))] for _ in range(num_prompts)]
    return [text(rng) for _ in range(num_prompts)]


def text(rng: random.Random) -> str:
    prefix = "The same words at the start of many prompts, so that they can be shared. " * rng.choice((0, 0, 1, 4))
    return prefix + " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))


def leaves_while_it_sends(rng: random.Random) -> Action:
    action = valid(rng, "leaves while it sends its body")
    return leaving(action, body_bytes=rng.randrange(len(action.body)), by_reset=rng.random() < 0.5)


def leaves_at_any_moment(rng: random.Random) -> Action:
    action = valid(rng, "leaves at any moment")
    return leaving(action, leave_after_seconds=rng.expovariate(3), by_reset=rng.random() < 0.5)


def leaves_its_stream(rng: random.Random) -> Action:
    action = valid(rng, "leaves its stream", stream=True)
    return leaving(action, leave_after_events=rng.randrange(16), by_reset=rng.random() < 0.5)


def does_not_read(rng: random.Random) -> Action:
    """Ask for more than the buffers hold, so that the server has to wait. Some clients stay until they are cut off."""
    kind, body = "does not read", {"prompt": text(rng), "max_tokens": 120, "ignore_eos": True, "logprobs": 20}
    action = Action(kind, COMPLETIONS, as_bytes(body | {"stream": rng.random() < 0.7}))
    return leaving(action, leave_after_seconds=rng.uniform(2, 8), by_reset=rng.random() < 0.5)


def leaving(asked: Action, **how: Any) -> Action:
    return Action(asked.kind, asked.path, asked.body, **how)


# The weight of each kind.
KINDS: dict[Callable[[random.Random], Action], int] = {
    reads_all: 8,
    is_refused: 3,
    leaves_while_it_sends: 1,
    leaves_at_any_moment: 2,
    leaves_its_stream: 2,
    does_not_read: 1,
}
