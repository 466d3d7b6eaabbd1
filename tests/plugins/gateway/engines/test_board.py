"""Each panel of the dashboard Engines has data in a real Prometheus, in front of an engine that reports as vLLM."""

import json
import math
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from oaiserve.config import ServerOptions
from oaiserve.plugins.gateway.engines.app import create_engine_gateway
from oaiserve.plugins.gateway.options import EnginesOptions, RouteOptions
from tests.deploy.boards import panels
from tests.deploy.paths import DEPLOY
from tests.e2e.prometheus import running_prometheus
from tests.plugins.gateway.engines.doubles import CHAT, DONE, event, piece
from tests.serving import RunningServer
from tests.waiting import wait_until

pytestmark = pytest.mark.prometheus

BOARD = json.loads((DEPLOY / "grafana/dashboards/oaiserve-engines.json").read_text())
VALUES = {"$__rate_interval": "5m", "$model": "m", "$instance": ".*", "$job": ".*", "$namespace": ".*"}
USAGE = {"prompt_tokens": 300, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
ASK = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Once upon a time. " * 50}]}
COUNTED = ("num_requests_running", "num_requests_waiting", "num_preemptions_total", "prefix_cache_queries_total",
           "prefix_cache_hits_total")  # fmt: skip


def engine() -> Starlette:
    """Return an engine whose every number grows with each look at it."""
    number = count(1)

    async def metrics(_: Request) -> Response:
        value = next(number)
        return PlainTextResponse("# TYPE vllm:x gauge\n" + "".join(f"vllm:{name} {value}\n" for name in COUNTED))

    async def chat(_: Request) -> Response:
        parts = [piece("Hel"), piece("lo", finish_reason="stop"), event({"choices": [], "usage": USAGE}), DONE]
        return StreamingResponse(iter(parts), media_type="text/event-stream")

    async def models(_: Request) -> Response:
        return JSONResponse({"data": [{"id": "m", "owned_by": "vllm"}]})

    routes = [Route("/metrics", metrics), Route(CHAT, chat, methods=["POST"]), Route("/v1/models", models)]
    return Starlette(routes=routes)


def filled_in(query: str) -> str:
    for name, value in VALUES.items():
        query = query.replace(name, value)
    return query


def test_each_panel_has_data(tmp_path: Path) -> None:
    options = ServerOptions(drain_timeout_seconds=0)
    with RunningServer(engine(), options) as other:
        app, fleet = create_engine_gateway(RouteOptions(), EnginesOptions(engine=(other.url,)))
        with (
            RunningServer(app, options, on_drain=fleet.drain) as gateway,
            running_prometheus(tmp_path, {"oaiserve": gateway.url}) as prometheus,
            httpx.Client(base_url=gateway.url, timeout=60) as http,
        ):
            wait_until(lambda: fleet.is_ready)
            for number in (1, 2):  # A rate needs a series that exists before it grows.
                for _ in range(3):
                    assert http.post(CHAT, json=ASK).status_code == 200
                prometheus.wait_for("sum(oaiserve_requests_total)", {frozenset(): 3 * number})
            grown = "count(increase(oaiserve_engine_reported_preemptions_total[5m]) > 0)"
            prometheus.wait_for(grown, {frozenset(): 1})  # The gateway has looked at the engine twice.
            targets = [
                (panel["title"], target["expr"]) for panel in panels(BOARD) for target in panel.get("targets", ())
            ]
            answers: dict[tuple[str, str], Any] = {
                target: prometheus.query(filled_in(target[1])).values() for target in targets
            }
            empty = [title for (title, _), answer in answers.items() if not any(map(math.isfinite, answer))]
            models = prometheus.get("label/model/values", **{"match[]": "oaiserve_engine_info"})
    assert empty == []
    assert models == ["m"]
