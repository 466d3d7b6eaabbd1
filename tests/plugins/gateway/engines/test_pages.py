"""The pages of a gateway in front of an engine of another kind, in a real Chromium."""

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oaiserve.facts.record import EngineAccount, OthersTime, Whose
from oaiserve.plugins.gateway.engines.app import create_engine_gateway
from oaiserve.plugins.gateway.options import EnginesOptions, RouteOptions
from tests.e2e.browser import OpenPage, browser, open_page, shared_context  # noqa: F401 - fixtures
from tests.plugins.gateway.doubles import OPTIONS
from tests.plugins.gateway.engines.doubles import ASK, CHAT, DONE, MODELS, USAGE, event, piece
from tests.records import MS, record_at
from tests.serving import RunningServer
from tests.waiting import wait_until


async def models(request: Request) -> Response:
    return JSONResponse(MODELS)


async def chat(request: Request) -> Response:
    thought = event({"choices": [{"index": 0, "delta": {"reasoning_content": "Hm."}}]})
    last = event({"choices": [], "usage": USAGE, "timings": {"prompt_ms": 4.0}})  # as llama.cpp
    content = thought + piece("Hel") + piece("lo", finish_reason="stop") + last + DONE
    return Response(content, media_type="text/event-stream")


@pytest.mark.browser
@pytest.mark.plugin("pages")
def test_pages_show_a_request_to_another_engine(open_page: OpenPage) -> None:  # noqa: F811
    engine_app = Starlette(routes=[Route("/v1/models", models), Route(CHAT, chat, methods=["POST"])])
    engine_app.state.count_refusal_delay = lambda delay_ns: None
    with RunningServer(engine_app, OPTIONS) as engine:
        app, fleet = create_engine_gateway(RouteOptions(), EnginesOptions(engine=(engine.url,)))
        with RunningServer(app, OPTIONS, on_drain=fleet.drain) as server:
            wait_until(lambda: fleet.is_ready)
            headers = {"x-request-id": "shown"}
            httpx.post(f"{server.url}{CHAT}", json=ASK | {"stream": True}, headers=headers, timeout=60)
            page = open_page(f"{server.url}/requests")
            page.goto(f"{server.url}/requests/shown")
            page.locator("#account dd", has_text="engine 1 (unknown)").wait_for()
            phases = page.locator("#account tr[data-phase]").evaluate_all(
                "rows => rows.map((row) => row.dataset.phase)"
            )
            assert phases == ["receive", "wait", "connect", "first_byte", "stream", "respond"]
            assert page.locator("dt", has_text="Steps").count() == 0
            shades = page.locator("[aria-label='Shades of bars'] li").all_inner_texts()
            assert shades[:2] == ["what it would have taken alone", "added by other requests"]
            assert "the machine was busy elsewhere" not in shades
            page.goto(f"{server.url}/dashboard")
            page.wait_for_selector("#status[data-state=live]")
            page.locator("[aria-label=Phases] li", has_text="first byte").wait_for()
            assert page.locator("[aria-label=Phases] li", has_text="prefill").is_hidden()
            assert page.locator("#tiles div", has_text="KV cache").is_hidden()
            assert page.locator(".legend li", has_text="computed in steps").is_hidden()
            tiles = page.locator("#tiles dt:visible").all_inner_texts()
            assert tiles[1:4] == ["Tokens/s", "First token", "Between pieces"]
            assert tiles[5:] == ["At the engines", "Waiting"]
            assert page.locator("#tiles div:visible", has_text="in the batch").count() == 0
            shades = page.locator("[aria-label='Shades of bars'] li:visible").all_inner_texts()
            assert shades[-1] == "not known from outside"
            others = {"first_byte": [OthersTime(Whose.OTHER_CLIENT, "batchjob", MS, 0, 0)]}
            for client, others_ns in (("anna", others), ("batchjob", {})):
                account = EngineAccount(others_ns=others_ns)
                record = record_at(0, 0, 0, 0, 5, 6, 7, 8, client=client, account=account)
                app.state.serving.telemetry.clients.add(record)
            page.goto(f"{server.url}/clients")
            page.locator("#advice-text", has_text="batchjob made others wait 1 ms in all").wait_for()
            heads = page.locator("#clients thead th:visible").all_inner_texts()
            assert heads[1:] == ["Made others wait", "Waited for others", "Prompts", "Answers", "Requests"]
            assert page.locator("#client-rows tr:first-child td").count() == 5
            limits = page.locator("#commands code").all_inner_texts()
            assert limits == ["oaiserve keys limit batchjob --requests-per-minute 1"]
            page.goto(server.url)
            page.get_by_role("textbox", name="Message").fill("Hi")
            page.keyboard.press("Enter")
            page.get_by_text("Hello", exact=True).wait_for()
            page.get_by_text("2 tokens").wait_for()  # The answer is complete.
            assert page.get_by_text("Cannot convert").count() == 0
            assert page.get_by_text("Thought").is_visible()
            assert page.get_by_role("link", name="API").count() == 0
            page.goto("about:blank")
