"""Attacks by a page of the web on a server on the same machine: DNS rebinding, simple requests, preflights.

These run against a server without keys on loopback, which trusts whoever reaches it.
"""

from __future__ import annotations

import json

from tools.attack.attack import CHAT, HI, REFUSED, Attack, Strike

FOREIGN_HOSTS = (
    "rebound.attacker.example",
    "attacker.example:8000",
    "127.0.0.1.attacker.example",
    "169.254.169.254",
    "",
)
ORIGIN = "https://attacker.example"
READS = ("/debug/requests", "/dashboard", "/dashboard/feed", "/v1/models", "/metrics")
QUESTION = {"messages": HI, "max_tokens": 1}


async def foreign_host(strike: Strike) -> None:
    """A name that resolves to this machine makes a foreign page of the same origin as the server."""
    for host in FOREIGN_HOSTS:
        for path in READS[:3]:
            await strike.ask("GET", path, headers={"host": host}, key=None)
        await strike.ask("POST", CHAT, QUESTION, {"host": host}, key=None)


async def foreign_origin(strike: Strike) -> None:
    """A browser sends these without asking first. Their effect is the point, not whether the page may read them."""
    for origin in (ORIGIN, "null", "http://127.0.0.1:1"):
        headers = {"origin": origin, "sec-fetch-site": "cross-site"}
        text = headers | {"content-type": "text/plain"}
        await strike.ask("POST", CHAT, json.dumps(QUESTION).encode(), text, key=None)
        await strike.ask("POST", "/debug/profile", b"", headers, key=None)
        await strike.ask("GET", "/dashboard/feed", headers=headers, key=None)
        await strike.ask("GET", "/debug/requests", headers=headers, key=None)
        no_type = headers | {"content-type": ""}
        await strike.ask("POST", CHAT, json.dumps(QUESTION).encode(), no_type, key=None)


async def preflight(strike: Strike) -> None:
    headers = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type, authorization",
        "access-control-request-private-network": "true",
    }
    for path in (CHAT, *READS, "/debug/profile", "*"):
        answer = await strike.ask("OPTIONS", path, headers=headers, key=None)
        allowed = [name for name in answer.headers if name.startswith("access-control-allow")]
        strike.check(not allowed, f"OPTIONS {path} allows a foreign page: {', '.join(allowed)}")


ATTACKS = (
    Attack("foreign-host", "a Host that is not this server's: DNS rebinding", foreign_host, REFUSED, server="open",
           bare=True, answer_seconds=5),
    Attack("foreign-origin", "what a foreign page sends without a preflight", foreign_origin, REFUSED, server="open",
           bare=True, answer_seconds=5),
    Attack("preflight", "preflights of a foreign page", preflight, REFUSED, server="open", bare=True),
)  # fmt: skip
