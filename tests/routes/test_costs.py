"""The header `x-include-cost`: the usage says what a request costs, by the account of its record."""

import json
from typing import Any

import pytest

from oaiserve.facts.record import EngineAccount
from tests.routes.asking import BODIES, CHAT
from tests.routes.doubles import says
from tests.serving import Served

COST = {
    "core_ns": 7_000_001,
    "machine_ns": 3_000_001,
    "alone_ns": 9_000_001,
    "alone_core_ns": 17_000_001,
    "kv_byte_seconds": 2.5,
    "weight_bytes": 10**8,
    "joules": None,
    "price": 0.125,
}


def usage_of(served: Served, route: str, headers: dict[str, str], **more: Any) -> dict[str, Any]:
    response = served.http.post(route, json={**BODIES[route], **more}, headers=headers)
    assert response.status_code == 200, response.text
    if not more:
        return response.json()["usage"]
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    events = [event.get("response", event) for event in map(json.loads, data)]
    return [event["usage"] for event in events if event.get("usage")][-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
def test_the_usage_has_the_cost_for_whoever_asks_and_for_nobody_else(served: Served, route: str, stream: bool) -> None:
    served.engine.script = says("Hello", account=EngineAccount(**COST))
    more: dict[str, Any] = {"stream": True} if stream else {}
    if stream and route in (CHAT, "/v1/completions"):
        more["stream_options"] = {"include_usage": True}
    assert usage_of(served, route, {"x-include-cost": "true"}, **more)["oaiserve_cost"] == COST
    for headers in ({}, {"x-include-cost": "false"}):
        assert "oaiserve_cost" not in usage_of(served, route, headers, **more)
