"""Loads: a small one that moves every metric of a server with 20 KV blocks of 16 tokens, and streams without end.

The small one has streams that preempt each other, prompts with a common prefix, answers under a grammar, refused
requests, and clients that disconnect.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any

import httpx

SYSTEM = "You are a test. Answer with whatever bytes come to your mind, and do so at once."
CHAT = "/v1/chat/completions"
TEXTS = "/v1/completions"


@dataclass(frozen=True)
class Call:
    """A request of the load, with the status that it must get."""

    path: str
    body: dict[str, Any]
    status: int = 200
    disconnects: bool = False  # after the first bytes of the answer

    def send(self, http: httpx.Client) -> str:
        """Send the request and return its trace id."""
        with http.stream("POST", self.path, json=self.body) as answer:
            assert answer.status_code == self.status
            if self.disconnects:
                next(answer.iter_raw())
            else:
                assert (b'"error":' in answer.read()) == (self.status != 200)
            return answer.headers["traceresponse"].split("-")[1]


def calls(round_: int = 1) -> Iterator[Call]:
    """Yield the requests to send at once to a server with 320 tokens of KV cache. Two of a round have a new grammar."""
    for number in range(8):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Number {number}?"}]
        body = {"messages": messages, "max_tokens": 60, "ignore_eos": True, "stream": number % 2 == 0}
        yield Call(CHAT, body)
    for number in range(4):
        yield Call(TEXTS, {"prompt": f"{number} and", "max_tokens": 20, "ignore_eos": True, "n": 1 + number % 2})
    # Its choices need twice the cache, so some are preempted even if the other requests have ended before.
    yield Call(TEXTS, {"prompt": "So many", "max_tokens": 60, "ignore_eos": True, "n": 8})
    for _ in range(2):
        choice = {"choice": ["yes", f"no{round_}"]}
        yield Call(TEXTS, {"prompt": "Is it?", "max_tokens": 20, "structured_outputs": choice})
    for _ in range(2):
        yield Call(TEXTS, {"prompt": "I go", "max_tokens": 150, "ignore_eos": True, "stream": True}, disconnects=True)
    yield Call(TEXTS, {"prompt": "So hot", "temperature": 3}, status=400)
    yield Call(TEXTS, {"prompt": "So long" * 100, "max_tokens": 10}, status=400)
    yield Call(CHAT, {"model": "another", "messages": []}, status=404)


@contextmanager
def streams(url: str, number: int, max_tokens: int) -> Iterator[None]:
    """Keep this number of streams open: each client sends the next request when its answer has ended."""
    is_over = Event()
    body = {"prompt": "Hi", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=url, timeout=60, limits=limits) as http, ThreadPoolExecutor(number) as threads:

        def ask() -> None:
            while not is_over.is_set():
                assert http.post(TEXTS, json=body).status_code == 200

        running = [threads.submit(ask) for _ in range(number)]
        try:
            yield
        finally:
            is_over.set()
    for client in running:
        client.result()
