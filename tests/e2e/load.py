"""A small load that moves every metric of a server with 20 KV blocks of 16 tokens.

It has streams that preempt each other, prompts that begin alike, refusals, and clients that leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

SYSTEM = "You are a test. Answer with whatever bytes come to your mind, and do so at once."
CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Ask:
    path: str
    body: dict[str, Any]
    status: int = 200
    leaves: bool = False  # after the first bytes of the answer

    def send(self, http: httpx.Client) -> str:
        """Send the request and return its trace id."""
        with http.stream("POST", self.path, json=self.body) as answer:
            assert answer.status_code == self.status
            if self.leaves:
                next(answer.iter_raw())
            else:
                assert (b'"error":' in answer.read()) == (self.status != 200)
            return answer.headers["traceresponse"].split("-")[1]


def asks() -> Iterator[Ask]:
    """Yield requests to send at once, for 320 tokens of KV cache."""
    for number in range(8):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Number {number}?"}]
        body = {"messages": messages, "max_tokens": 60, "ignore_eos": True, "stream": number % 2 == 0}
        yield Ask(CHAT, body)
    for number in range(4):
        yield Ask(TEXTS, {"prompt": f"{number} and", "max_tokens": 20, "ignore_eos": True, "n": 1 + number % 2})
    for _ in range(2):
        yield Ask(TEXTS, {"prompt": "I go", "max_tokens": 150, "ignore_eos": True, "stream": True}, leaves=True)
    yield Ask(TEXTS, {"prompt": "So hot", "temperature": 3}, status=400)
    yield Ask(TEXTS, {"prompt": "So long" * 100, "max_tokens": 10}, status=400)
    yield Ask(CHAT, {"model": "another", "messages": []}, status=404)
