"""Sends thousands of generated requests to a running server: python -m tools.attack.fuzz --seed 1

They go to all routes that the server has. Bodies fit the schema that the server publishes, or nearly fit it, or are
anything. What is sent is a function of the seed. No answer may be a server error, none may fail to come, and each
refusal has OpenAI's error object. Prints the number of answers by route and status. The exit code is 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hypothesis import strategies as st

from oaiserve.app import routes
from oaiserve.config import Config
from oaiserve.routes.openapi import document
from tools.attack import schema
from tools.attack.attack import CHAT, COMPLETIONS, HI, request
from tools.attack.server import KEYS, oaiserve
from tools.attack.verdict import wrong_form
from tools.attack.wire import Answer, connect, few_at_once
from tools.markdown import as_markdown
from tools.server_process import exit_on_sigterm

# Short answers, and none that goes on: a request may ask for everything at once.
FLAGS = (*KEYS, "--max-model-len", "128", "--request-timeout-seconds", "20")
AT_ONCE, ANSWER_SECONDS, FEED_SECONDS = 16, 90.0, 0.5
MOST_SHOWN = 20
FEED = "/dashboard/feed"
UNKNOWN_METHOD = "BREW"
RESPONSES = "/v1/responses"

PUBLISHED = document(routes(Config("demo")), version="", needs_key=True)
FEW_TOKENS = st.integers(1, 4)
fitting = partial(schema.fitting, PUBLISHED)
PROMPTS = schema.TEXT | st.sampled_from(["Hi", ["Hi", "Ho"], [7, 8], [[7]]])
BODIES: dict[str, st.SearchStrategy[Any]] = {
    COMPLETIONS: fitting("CompletionBody", {"prompt": PROMPTS, "max_tokens": FEW_TOKENS}),
    CHAT: fitting("ChatBody", {"max_tokens": FEW_TOKENS})
    | fitting("ChatBody", {"messages": st.just(HI), "max_tokens": FEW_TOKENS}),
    RESPONSES: fitting("ResponsesBody", {"max_output_tokens": FEW_TOKENS})
    | fitting("ResponsesBody", {"input": st.just("Hi"), "max_output_tokens": FEW_TOKENS}),
    "/v1/conversations": fitting("ConversationBody"),
    f"{RESPONSES}/input_tokens": fitting("ResponseInputBody"),
    f"{RESPONSES}/compact": fitting("CompactionBody") | fitting("CompactionBody", {"input": st.just("Hi")}),
    "/v1/messages": fitting("MessagesBody", {"max_tokens": FEW_TOKENS})
    | fitting("MessagesBody", {"messages": st.just(HI), "max_tokens": FEW_TOKENS}),
    "/v1/messages/count_tokens": fitting("CountTokensBody"),
    "/tokenize": fitting("TokenizeBody"),
    "/detokenize": fitting("DetokenizeBody"),
}
QUERY_NAMES = ("slowest", "outcome", "id", "limit", "format", "steps", "seconds", "name[]", "")
SAFE = st.text("abcXYZ019-._~%/", max_size=12) | st.sampled_from(["%00", "%ff", "..", "%2e%2e", "%0d%0a", "index.html"])


@dataclass(frozen=True)
class Sent:
    """A generated request. `route` is the pattern of its path."""

    route: str
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def is_strange_http(self) -> bool:
        """Whether a parser of HTTP may refuse it before there is a request."""
        return self.method == UNKNOWN_METHOD or "transfer-encoding" in dict(self.headers)


def encoded(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=True).encode(errors="replace")


def contents(path: str) -> st.SearchStrategy[bytes]:
    """Return bodies: mostly of the route's own type, some with changes, a few of another type or no JSON at all."""
    own = BODIES.get(path, schema.ANYTHING)
    changed = schema.mutated(own) if path in BODIES else own
    cut = st.tuples(own.map(encoded), st.integers(0, 60)).map(lambda pair: pair[0][: -pair[1] or None])
    return st.one_of(own.map(encoded), own.map(encoded), changed.map(encoded), changed.map(encoded),
                     schema.ANYTHING.map(encoded), cut, st.binary(max_size=40))  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> Sent:
    found = [(route.path, method) for route in routes(Config("demo")) for method in sorted(route.methods or ())]
    # The routes with a body of their own get half of all requests.
    pattern, method = draw(st.sampled_from([(path, "POST") for path in BODIES]) | st.sampled_from(found))
    if draw(st.integers(0, 19)) == 0:
        method = draw(st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", UNKNOWN_METHOD]))
    path = pattern
    for name in ("{request_id}", "{name}", "{model_id:path}", "{conversation_id}", "{item_id}"):
        path = path.replace(name, draw(SAFE) if name in path else "")
    if draw(st.integers(0, 3)) == 0:
        query = draw(st.lists(st.tuples(st.sampled_from(QUERY_NAMES), SAFE), max_size=3))
        path += "?" + "&".join(f"{name}={value}" for name, value in query)
    body = draw(contents(pattern)) if method == "POST" else b""
    headers = draw(st.lists(st.sampled_from(HEADERS), max_size=2)) if draw(st.integers(0, 4)) == 0 else []
    return Sent(pattern, method, path, tuple(headers), body)


HEADERS = (
    ("content-type", "text/plain"), ("content-type", "application/json; charset=utf-16"), ("content-encoding", "gzip"),
    ("x-request-id", "a b"), ("x-request-id", "x" * 500), ("traceparent", "00-zz"), ("tracestate", "=" * 600),
    ("accept", "text/plain;q=1e9,*/*;q=x"), ("accept", "application/openmetrics-text"), ("origin", "null"),
    ("if-none-match", '"x"'), ("expect", "100-continue"), ("authorization", "Bearer wrong"), ("range", "bytes=9-1"),
    ("host", ""), ("host", "attacker.example"), ("cookie", "a=b"), ("transfer-encoding", "identity"),
)  # fmt: skip


def generate(seed: int, number: int) -> list[Sent]:
    """Return so many requests, as a function of the seed."""
    return schema.drawn(requests(), seed, number)


async def send(url: str, sent: Sent) -> Answer:
    try:
        connection = await connect(url)
    except OSError as error:
        return Answer("refused", body=str(error).encode())
    try:
        await connection.send(request(sent.method, sent.path, sent.body, dict(sent.headers)))
        return await connection.answer(
            FEED_SECONDS if sent.route == FEED else ANSWER_SECONDS, has_body=sent.method != "HEAD"
        )
    except OSError as error:
        return Answer("reset", body=str(error).encode())
    finally:
        connection.close()


def wrong(sent: Sent, answer: Answer) -> str | None:
    """Return what is wrong with the answer, or None."""
    if answer.outcome == "endless" and sent.route == FEED:
        return None
    if answer.status is None:
        return f"no answer, but: {answer.outcome}"
    if b'"internal_error"' in answer.body:
        return "an internal error in the body"
    return None if sent.method == "HEAD" else wrong_form(answer, bare=sent.is_strange_http)


async def send_all(url: str, requests: Sequence[Sent]) -> list[Answer]:
    """Send them in order, so many at once, and return their answers in the same order."""
    return await few_at_once([partial(send, url, sent) for sent in requests], AT_ONCE)


def summary(requests: Sequence[Sent], answers: Sequence[Answer]) -> str:
    counts: dict[str, Counter[str]] = {}
    for sent, answer in zip(requests, answers, strict=True):
        counts.setdefault(sent.route, Counter())[answer.outcome] += 1
    outcomes = sorted({outcome for counter in counts.values() for outcome in counter})
    rows = [[route, *(str(counts[route][outcome] or "") for outcome in outcomes)] for route in sorted(counts)]
    return "\n".join(as_markdown([["route", *outcomes], *rows]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=20_000)
    parser.add_argument("--model", default="demo")
    arguments = parser.parse_args(argv)
    exit_on_sigterm()
    requests = generate(arguments.seed, arguments.number)
    with oaiserve("keys", arguments.model, FLAGS) as server:
        answers = asyncio.run(send_all(server.url, requests))
        state = server.state()
    print(summary(requests, answers))
    failed = [
        f"{sent.method} {sent.path} {dict(sent.headers)} {sent.body[:500]!r}: {reason}"
        for sent, answer in zip(requests, answers, strict=True)
        if (reason := wrong(sent, answer)) is not None
    ]
    failed += [f"the server {state}"] if state != "alive" else []
    print(f"{len(requests):,} requests of seed {arguments.seed}, {len(failed)} wrong")
    for sentence in failed[:MOST_SHOWN]:
        print(sentence, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
