"""Keys: wrong ones, strange ones, none, and a server that was given an empty one."""

from __future__ import annotations

import asyncio
import os
from functools import partial

import httpx

from tools.attack.attack import ATTACKER_KEY, CHAT, COMPLETIONS, HI, Attack, Strike, outcomes
from tools.attack.server import START_SECONDS
from tools.attack.wire import Answer, request
from tools.server_process import StartFailed, running_oaiserve

WRONG = "sk-wrong-and-secret"
MOST_LOG_LINES = 20
NUM_WRONG = 1000
QUESTION = {"messages": HI, "max_tokens": 1}
CLOSED_ROUTES = (
    ("POST", CHAT), ("POST", COMPLETIONS), ("GET", "/v1/models"), ("GET", "/v1/models/demo"), ("POST", "/tokenize"),
    ("POST", "/detokenize"), ("GET", "/debug/requests"), ("GET", "/debug/requests/x"), ("POST", "/debug/profile"),
    ("GET", "/dashboard/feed"), ("POST", "/v1/embeddings"), ("GET", "/no/such/path"), ("GET", "//v1//models"),
    ("GET", "/health/../v1/models"), ("GET", "/dashboard/static/../../v1/models"), ("GET", "/%761/models"),
    ("PUT", "/v1/models"),
)  # fmt: skip


async def wrong_keys(strike: Strike) -> None:
    number = strike.number(NUM_WRONG, 100)
    asks = [partial(strike.post, CHAT, QUESTION, key=f"{WRONG}-{i}") for i in range(number)]
    await strike.all(asks, 16)
    log = strike.log
    strike.check(WRONG.encode() not in log, "the log holds a wrong key")
    lines = sum(b"key" in line.lower() for line in log.splitlines())
    strike.check(lines <= MOST_LOG_LINES, f"{lines} lines of log about {number} wrong keys (most {MOST_LOG_LINES})")


async def strange_keys(strike: Strike) -> None:
    values = ["", "Bearer", "Bearer ", "Basic a2V5Og==", ATTACKER_KEY, f"Bearer {ATTACKER_KEY}x", "Bearer \xe9\xff",
              f"Bearer {ATTACKER_KEY[:-1]}", f"Bearer {ATTACKER_KEY.upper()}", "Bearer " + "k" * 8000,
              f"Bearer {ATTACKER_KEY},", f"Bearer, Bearer {ATTACKER_KEY}"]  # fmt: skip
    for value in values:
        await strike.ask("POST", CHAT, QUESTION, {"authorization": value}, key=None)
    await strike.ask("POST", f"{CHAT}?api_key={ATTACKER_KEY}&key={ATTACKER_KEY}", QUESTION, key=None)
    twice = request("POST", CHAT, b"{}", {"authorization": f"Bearer {WRONG}"})
    await strike.raw(twice.replace(b"\r\n\r\n", f"\r\nauthorization: Bearer {ATTACKER_KEY}\r\n\r\n".encode(), 1))


async def no_key(strike: Strike) -> None:
    for method, path in CLOSED_ROUTES:
        await strike.ask(method, path, b"{}" if method == "POST" else b"", key=None)


async def key_before_body(strike: Strike) -> None:
    """A client without a key must not make the server read, parse or keep a body."""
    body = b'{"prompt": "' + b"x" * (8 << 20) + b'"}'
    await strike.all([partial(strike.post, COMPLETIONS, body, key=None)] * strike.number(64, 8), 16)


async def empty_key(strike: Strike) -> None:
    """An operator whose variable is empty wanted a key: the start fails, or no request without a key is answered."""
    strike.num_sent += 1

    def status_without_key() -> int | str:
        environment = os.environ | {"OAISERVE_API_KEY": ""}
        try:
            with running_oaiserve(env=environment, start_limit_seconds=START_SECONDS, stop_limit_seconds=5) as server:
                body = {"messages": HI, "max_tokens": 1}
                return httpx.post(f"{server.url}{CHAT}", json=body, timeout=60, trust_env=False).status_code
        except StartFailed as error:
            return "it ended" if "ended with exit code 2" in str(error) else str(error)

    strike.answers.append(Answer(str(await asyncio.to_thread(status_without_key))))


DENIED = outcomes(401, 429)
DENIED_OR_NOT_THERE = DENIED | outcomes(404)  # below the open files of the dashboard
ATTACKS = (
    Attack("wrong-keys", "wrong keys, each another one", wrong_keys, DENIED),
    Attack("strange-keys", "keys that are cut, in another form, twice, in the query", strange_keys, DENIED, bare=True),
    Attack("no-key", "every closed route without a key", no_key, DENIED_OR_NOT_THERE),
    Attack("key-before-body", "8 MB without a key", key_before_body, DENIED | outcomes("reset")),
    Attack(
        "empty-key",
        "a start with OAISERVE_API_KEY empty",
        empty_key,
        outcomes(401, "it ended"),
        limit_seconds=START_SECONDS,
    ),
)
