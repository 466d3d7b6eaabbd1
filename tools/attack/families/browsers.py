"""Attacks by a page of the web on a server on the same machine: DNS rebinding, simple requests, preflights.

These run against a server without keys on loopback, which trusts whoever reaches it.
"""

from __future__ import annotations

from tools.attack.attack import CHAT, HI, REFUSED, Number, Sent, Strike, attack, burst, post, request

FOREIGN_HOSTS = ("rebound.attacker.example", "attacker.example:8000", "127.0.0.1.attacker.example", "169.254.169.254",
                 "")  # fmt: skip
ORIGIN = "https://attacker.example"
READS = ("/debug/requests", "/dashboard", "/dashboard/feed", "/v1/models", "/metrics")
QUESTION = {"messages": HI, "max_tokens": 1}


@burst("a Host that is not this server's: DNS rebinding", REFUSED, 1, server="open", bare=True, answer_seconds=5)
def foreign_host(number: Number) -> list[Sent]:
    """A name that resolves to this machine makes a foreign page of the same origin as the server."""
    asked = [("GET", path, b"") for path in READS[:3]] + [("POST", CHAT, QUESTION)]
    return [request(*each, {"host": host}, key=None) for host in FOREIGN_HOSTS for each in asked]


@burst("what a foreign page sends without a preflight", REFUSED, 1, server="open", bare=True, answer_seconds=5)
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


@attack("preflights of a foreign page", REFUSED, server="open", bare=True)
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
