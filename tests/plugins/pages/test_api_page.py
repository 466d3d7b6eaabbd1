"""Tests the API page in a real Chromium: it shows the server's own schema, and its snippets and forms work."""

from __future__ import annotations

import json
import re
import subprocess
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

from tests.e2e.browser import PHONE, OpenPage, check_texts_and_controls
from tests.e2e.live import API_KEY, LiveServer
from tests.e2e.proxies import under_prefix
from tests.missing_plugins import has_plugin

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

CHAT = "#post_v1_chat_completions"
RESULT = ".result [aria-label=Answer]"
# Writes the snippets of all routes, each with its language.
ALL_SNIPPETS = """async ({ paths, components }) => {
  const { readComponents } = await import("./dashboard/static/api_schema.js");
  const { snippets } = await import("./dashboard/static/api_snippets.js");
  readComponents({ components });
  const routes = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ path, method, operation })));
  return routes.flatMap((route) =>
    Object.entries(snippets(route, "it's")).map(([language, write]) => [language, write("a-key")]));
}"""
CLIPBOARD = ["clipboard-read", "clipboard-write"]


@pytest.fixture
def page(live: LiveServer, open_page: OpenPage) -> Page:
    return with_key(open_page(f"{live.url}/docs", permissions=CLIPBOARD))


def with_key(page: Page) -> Page:
    page.get_by_label("This server requires an API key.").fill(API_KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{CHAT}[open] pre")
    return page


def open_form(page: Page) -> None:
    page.locator(f"{CHAT} summary", has_text="Try it").click()


def copied(page: Page, label: str) -> str:
    page.locator(CHAT).get_by_label(label).click()
    return page.evaluate("navigator.clipboard.readText()")


def test_page_lists_every_route_of_the_schema(live: LiveServer, page: Page) -> None:
    paths = httpx.get(f"{live.url}/openapi.json").json()["paths"]
    routes = [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]
    assert sorted(page.locator(".route h3").all_inner_texts()) == sorted(routes)
    assert page.locator("#found").inner_text() == f"{len(routes)} routes"


def test_snippets_carry_address_model_and_key_and_curl_runs(live: LiveServer, page: Page, tmp_path: Path) -> None:
    shown = page.locator(f"{CHAT} .snippet pre").inner_text()
    assert API_KEY not in shown
    assert "Bearer ••••" in shown
    command = copied(page, "Copy this snippet")
    assert f"{live.url}/v1/chat/completions" in command
    answer = json.loads(subprocess.check_output(["bash", "-euc", command], stderr=subprocess.DEVNULL))
    assert answer["choices"][0]["message"]["content"]
    page.get_by_role("button", name="Python (OpenAI)").first.click()
    program = copied(page, "Copy this snippet")
    names: dict[str, object] = {}
    exec(program, names)
    assert names["answer"].model == "demo"
    page.reload()
    page.wait_for_selector(f"{CHAT}[open] pre")
    assert "from openai import OpenAI" in page.locator(f"{CHAT} .snippet pre").inner_text()  # the last chosen


def call_in(program: str) -> str:
    found = re.search(r"client\.([\w.]+)\(", program)
    assert found is not None
    return found[1]


@pytest.mark.plugin("messages")
def test_snippets_call_the_methods_of_anthropics_client(live: LiveServer, page: Page) -> None:
    written = page.evaluate(ALL_SNIPPETS, httpx.get(f"{live.url}/openapi.json").json())
    calls = {call_in(text) for language, text in written if language == "Python (Anthropic)"}
    of_batches = {f"batches.{name}" for name in ("create", "list", "retrieve", "delete", "cancel", "results")}
    assert calls <= {f"messages.{name}" for name in ("create", "count_tokens", *of_batches)}


def test_snippets_of_all_routes_are_sound(live: LiveServer, page: Page, tmp_path: Path) -> None:
    document = httpx.get(f"{live.url}/openapi.json").json()
    written = page.evaluate(ALL_SNIPPETS, document)
    of_anthropic = {"Python (Anthropic)", "JavaScript (Anthropic)"} if has_plugin("messages") else set()
    languages = {"curl", "Python (OpenAI)", "JavaScript (OpenAI)"} | of_anthropic
    assert {language for language, _ in written} == languages
    script = []
    for language, text in written:
        if language.startswith("Python"):
            compile(text, text, "exec")
            if language == "Python (OpenAI)":
                assert callable(attrgetter(call_in(text))(openai.OpenAI(api_key="none")))
        elif language == "curl":
            script.append(text)
    assert len(script) == sum(len(methods) for methods in document["paths"].values())
    subprocess.run(["bash", "-n", "-c", "\n".join(script)], check=True)


def test_form_sends_request_and_shows_stream_as_it_comes(page: Page) -> None:
    open_form(page)
    body = page.locator(f"{CHAT} form textarea")
    endless = {"max_tokens": 4000, "ignore_eos": True}
    body.fill(json.dumps(json.loads(body.input_value()) | endless))
    page.keyboard.press("Control+Enter")
    text = page.locator(f"{CHAT} .result .text")
    text.wait_for()
    page.locator(f"{CHAT} .result summary", has_text="Events").click()
    output = page.locator(f"{CHAT} {RESULT}")
    output.get_by_text("chat.completion.chunk").wait_for()
    assert "{" not in text.inner_text()
    status = page.locator(f"{CHAT} .result [role=status]")
    assert "200 OK · headers after" in status.inner_text()
    page.locator(f"{CHAT} form").get_by_role("button", name="Stop").click()
    status.get_by_text("stopped after").wait_for()

    page.locator(f"{CHAT} form").get_by_label("Stream").uncheck()
    body.fill(json.dumps(json.loads(body.input_value()) | {"max_tokens": 4, "ignore_eos": False}))
    page.locator(f"{CHAT} form").get_by_role("button", name="Send").click()
    status.get_by_text("ended after").wait_for()
    answer = json.loads(output.inner_text())
    assert answer["usage"]["completion_tokens"] <= 4
    assert text.inner_text() == answer["choices"][0]["message"]["content"]
    page.locator(f"{CHAT} .result summary").click()
    assert "server-timing" in page.locator(f"{CHAT} .result dl").inner_text()
    page.get_by_role("link", name="Where its time went").click()
    page.wait_for_url("**/requests/req-*")


def test_form_reports_body_that_is_not_json(page: Page) -> None:
    open_form(page)
    page.locator(f"{CHAT} form textarea").fill("{")
    page.locator(f"{CHAT} form").get_by_role("button", name="Send").click()
    page.locator(f"{CHAT} form .error").get_by_text("The body is not JSON").wait_for()


def test_long_answer_is_shown_up_to_a_limit(page: Page) -> None:
    page.route("**/metrics", lambda route: route.fulfill(body="m" * 300_000))
    page.click("#get_metrics summary")
    page.locator("#get_metrics summary", has_text="Try it").click()
    page.locator("#get_metrics form").get_by_role("button", name="Send").click()
    page.locator("#get_metrics .result [role=status]").get_by_text("ended after").wait_for()
    answer = page.locator(f"#get_metrics {RESULT}").text_content()
    assert answer == "m" * 200_000 + "\n… and 100,000 more characters"


LINKED = ".linked[id='post_v1_chat_completions.response_format.type']"


def test_search_finds_routes_and_fields_and_links_lead_to_them(page: Page) -> None:
    page.keyboard.press("/")
    page.keyboard.type("response_format.type")
    assert page.locator(f"{CHAT}:visible").count() == 1
    assert page.locator("#get_health:visible").count() == 0
    page.locator(f"{CHAT} + .matches a").click()
    page.locator(LINKED).wait_for()
    page.locator("#search").focus()
    page.keyboard.press("Escape")
    assert page.locator(".route:visible").count() > 40
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    page.locator(LINKED).wait_for()


def test_page_works_under_a_prefix_and_on_a_phone(live: LiveServer, open_page: OpenPage) -> None:
    with under_prefix(live.url, "/llm") as url:
        page = with_key(open_page(f"{url}/docs", PHONE))
        assert f"curl {url}/v1/chat/completions" in page.locator(f"{CHAT} .snippet pre").inner_text()
        open_form(page)
        page.locator(f"{CHAT} form").get_by_role("button", name="Send").click()
        page.locator(f"{CHAT} .result [role=status]").get_by_text("ended after").wait_for()
        assert page.locator(f"{CHAT} .result .text").is_visible()
        check_texts_and_controls(page)
