"""Attacks on who may ask: keys, and pages of the web that a browser lets ask."""

from __future__ import annotations

import asyncio
import os
from functools import partial

import httpx

from tools.attack.attack import (
    ATTACKER_KEY,
    CHAT,
    COMPLETIONS,
    HI,
    REFUSED,
    Family,
    Number,
    Sent,
    Strike,
    outcomes,
    post,
    request,
)
from tools.attack.server import START_SECONDS
from tools.attack.wire import Answer
from tools.server_process import StartFailed, running_oaiserve

# -- keys: wrong ones, strange ones, none, and a server that was given an empty one -----------------------------------

KEYS = Family("keys")
WRONG = "sk-wrong-and-secret"
MOST_LOG_LINES = 20
QUESTION = {"messages": HI, "max_tokens": 1}
CLOSED_ROUTES = (
    ("POST", CHAT), ("POST", COMPLETIONS), ("GET", "/v1/models"), ("GET", "/v1/models/demo"), ("POST", "/tokenize"),
    ("POST", "/detokenize"), ("GET", "/debug/requests"), ("GET", "/debug/requests/x"), ("POST", "/debug/profile"),
    ("GET", "/dashboard/feed"), ("POST", "/v1/embeddings"), ("GET", "/no/such/path"), ("GET", "//v1//models"),
    ("GET", "/health/../v1/models"), ("GET", "/dashboard/static/../../v1/models"), ("GET", "/%761/models"),
    ("PUT", "/v1/models"),
)  # fmt: skip
DENIED = outcomes(401, 429)


@KEYS.attack("wrong keys, each another one", DENIED)
async def wrong_keys(strike: Strike) -> None:
    number = strike.number(1000, 100)
    await strike.ask_all([post(CHAT, QUESTION, key=f"{WRONG}-{i}") for i in range(number)], 16)
    log = strike.log
    strike.check(WRONG.encode() not in log, "the log holds a wrong key")
    lines = sum(b"key" in line.lower() for line in log.splitlines())
    strike.check(lines <= MOST_LOG_LINES, f"{lines} lines of log about {number} wrong keys (most {MOST_LOG_LINES})")


@KEYS.burst("keys that are cut, in another form, twice, in the query", DENIED, 1, bare=True)
def strange_keys(number: Number) -> list[Sent]:
    values = ("", "Bearer", "Bearer ", "Basic a2V5Og==", ATTACKER_KEY, f"Bearer {ATTACKER_KEY}x", "Bearer \xe9\xff",
              f"Bearer {ATTACKER_KEY[:-1]}", f"Bearer {ATTACKER_KEY.upper()}", "Bearer " + "k" * 8000,
              f"Bearer {ATTACKER_KEY},", f"Bearer, Bearer {ATTACKER_KEY}")  # fmt: skip
    in_query = post(f"{CHAT}?api_key={ATTACKER_KEY}&key={ATTACKER_KEY}", QUESTION, key=None)
    second = f"\r\nauthorization: Bearer {ATTACKER_KEY}\r\n\r\n".encode()
    twice = post(CHAT, b"{}", key=WRONG).replace(b"\r\n\r\n", second, 1)
    return [*(post(CHAT, QUESTION, {"authorization": value}, key=None) for value in values), in_query, twice]


@KEYS.burst("every closed route without a key", DENIED | outcomes(404), 1)  # 404 below the dashboard's open files
def no_key(number: Number) -> list[Sent]:
    return [request(method, path, b"{}" if method == "POST" else b"", key=None) for method, path in CLOSED_ROUTES]


@KEYS.burst("8 MB without a key", DENIED | outcomes("reset"), 16)
def key_before_body(number: Number) -> list[Sent]:
    """A client without a key must not make the server read, parse or keep a body."""
    return [post(COMPLETIONS, b'{"prompt": "' + b"x" * (8 << 20) + b'"}', key=None)] * number(64, 8)


@KEYS.attack("a start with OAISERVE_API_KEY empty", outcomes(401, "it ended"), limit_seconds=START_SECONDS)
async def empty_key(strike: Strike) -> None:
    """An operator whose variable is empty wanted a key: the start fails, or no request without a key is answered."""
    strike.num_sent += 1

    def status_without_key() -> int | str:
        environment = os.environ | {"OAISERVE_API_KEY": ""}
        try:
            with running_oaiserve(env=environment, start_limit_seconds=START_SECONDS, stop_limit_seconds=5) as server:
                return httpx.post(f"{server.url}{CHAT}", json=QUESTION, timeout=60, trust_env=False).status_code
        except StartFailed as error:
            return "it ended" if "ended with exit code 2" in str(error) else str(error)

    strike.answers.append(Answer(str(await asyncio.to_thread(status_without_key))))


# -- pages of the web, on a server on the same machine without keys, which trusts whoever reaches it ------------------

BROWSERS = Family("browsers")
page_sends = partial(BROWSERS.burst, outcomes=REFUSED, at_once=1, server="open", bare=True)
FOREIGN_HOSTS = ("rebound.attacker.example", "attacker.example:8000", "127.0.0.1.attacker.example", "169.254.169.254",
                 "")  # fmt: skip
ORIGIN = "https://attacker.example"
READS = ("/debug/requests", "/dashboard", "/dashboard/feed", "/v1/models", "/metrics")


@page_sends("a Host that is not this server's: DNS rebinding", answer_seconds=5)
def foreign_host(number: Number) -> list[Sent]:
    """A name that resolves to this machine makes a foreign page of the same origin as the server."""
    asked = [("GET", path, b"") for path in READS[:3]] + [("POST", CHAT, QUESTION)]
    return [request(*each, {"host": host}, key=None) for host in FOREIGN_HOSTS for each in asked]


@page_sends("what a foreign page sends without a preflight", answer_seconds=5)
def foreign_origin(number: Number) -> list[Sent]:
    """A browser sends these without asking first. Their effect is the point, not whether the page may read them."""
    found: list[Sent] = []
    for origin in (ORIGIN, "null", "http://127.0.0.1:1"):
        headers = {"origin": origin, "sec-fetch-site": "cross-site"}
        found += [post(CHAT, QUESTION, headers | {"content-type": kind}, key=None) for kind in ("text/plain", "")]
        found += [post("/debug/profile", headers=headers, key=None)]
        found += [
            request("GET", f"/{page}", headers=headers, key=None) for page in ("dashboard/feed", "debug/requests")
        ]
    return found


@BROWSERS.attack("preflights of a foreign page", REFUSED, server="open", bare=True)
async def preflight(strike: Strike) -> None:
    headers = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type, authorization",
        "access-control-request-private-network": "true",
    }
    for path in (CHAT, *READS, "/debug/profile", "*"):
        answer = await strike.ask(request("OPTIONS", path, headers=headers, key=None))
        allowed = [name for name in answer.headers if name.startswith("access-control-allow")]
        strike.check(not allowed, f"OPTIONS {path} allows a foreign page: {', '.join(allowed)}")
