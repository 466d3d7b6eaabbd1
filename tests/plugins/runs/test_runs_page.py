"""Tests the pages of runs in a real Chromium."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from oaiserve.config import ServerOptions
from oaiserve.facts.times import duration
from oaiserve.runtime import THREADS
from tests.e2e.browser import DESK, PHONE, OpenPage, check_texts_and_controls, walk_to
from tests.e2e.live import answers_are_as_published  # noqa: F401 - a fixture
from tests.plugins.runs.asked import CALL, LONG, QUESTION, RESULT, app_of, chat
from tests.serving import run_server

pytestmark = [pytest.mark.browser, pytest.mark.plugin("pages")]

HELP = {"role": "user", "content": "Look for files."}


@pytest.fixture(scope="module")
def client(small_model: Path) -> Iterator[httpx.Client]:
    """Give a client of a server with a run of three turns of its agent, and one of a subagent."""
    app = app_of(small_model, ServerOptions(served_model_name=("small",)), THREADS)
    with run_server(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        chat(client, "one", QUESTION, x_session_id="main")
        chat(client, "help", HELP, x_session_id="helper", x_parent_session_id="main")
        chat(client, "two", QUESTION, CALL, RESULT, x_session_id="main")
        chat(client, "three", QUESTION, CALL, RESULT, CALL, RESULT, x_session_id="main")
        yield client


def url_of(client: httpx.Client, path: str) -> str:
    return str(client.base_url.join(path))


def test_the_list_leads_to_a_run_and_that_to_its_requests(client: httpx.Client, open_page: OpenPage) -> None:
    page = open_page(url_of(client, "/runs"))
    page.wait_for_selector("#runs a:has-text('4 turns, 2 agents')")
    walk_to(page, "#runs a")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turns")
    assert page.locator(".lane > span:first-child").all_inner_texts() == ["", "Agent", "Subagent"]
    assert page.locator(".turns tbody tr").count() == 4
    assert page.locator(".lane .phase-tools").count() == 2
    assert page.locator(".context > i").count() == 3
    assert page.locator(".dearest a").count() == 3
    page.locator(".turns a").first.click()
    page.wait_for_selector("#title:text-is('one')")
    page.get_by_text("run_").click()  # and back
    page.wait_for_selector(".turns")


def test_a_live_run_shows_its_next_turn(client: httpx.Client, open_page: OpenPage) -> None:
    chat(client, "live-1", QUESTION, session_id="live")
    page = open_page(url_of(client, "/runs"))
    page.locator("#runs a").first.click()
    page.wait_for_selector(".turns tbody tr")
    chat(client, "live-2", QUESTION, CALL, RESULT, session_id="live")
    page.wait_for_selector(".turns tbody tr:nth-child(2)")


def test_pages_name_the_program_and_how_long_it_is_silent_and_explain_what_was_read_again(
    client: httpx.Client, open_page: OpenPage
) -> None:
    for number in range(2):
        clock = {"role": "system", "content": f"{number} o'clock"}
        chat(client, f"clock-{number}", clock, LONG, session_id="clock", user_agent="codex_exec/0.171.0 (Debian)")
    page = open_page(url_of(client, "/runs"))
    row = page.locator("#runs a").first
    row.filter(has_text="Codex").wait_for()
    assert "last request less than a minute ago" in row.inner_text()
    [run] = [run for run in client.get("/debug/runs").json()["runs"] if run["program"] == "Codex"]
    assert f"{run['read_again_tokens']:,} read again, {duration(run['read_again_ns'])}" in row.inner_text()
    assert "% reused" not in row.inner_text()
    is_cut = "nodes => nodes.map((node) => node.scrollWidth > node.clientWidth)"
    assert not any(row.locator(".quiet, .quiet > span").evaluate_all(is_cut))
    row.click()
    page.wait_for_selector(".why p:has-text('Turn 2: ')")
    assert "which took" in page.inner_text(".why")
    assert "the system message differs from the one" in page.inner_text(".why")
    subtitle = page.inner_text("#subtitle")
    assert subtitle.startswith("Codex · since ")
    assert "last request less than a minute ago" in subtitle
    page.locator(".why a").first.click()
    page.wait_for_selector("#title:text-is('clock-1')")


@pytest.mark.parametrize(
    ("num_open", "awaits_tools", "silent_ns", "text"),
    [
        (1, False, 0, "running"),
        (0, True, 59_000_000_000, "waiting for its tools"),
        (0, False, 59_000_000_000, "last request less than a minute ago"),
        (0, False, 200_000_000_000, "last request 3 min ago"),
        (0, False, 7_300_000_000_000, "last request 2 h ago"),
    ],
)
def test_list_says_when_the_last_request_ended_and_not_that_a_run_lives(
    client: httpx.Client, open_page: OpenPage, num_open: int, awaits_tools: bool, silent_ns: int, text: str
) -> None:
    names = ("started_unix_ns", "duration_ns", "model_ns", "tools_ns", "user_ns", "num_turns", "num_agents")
    tokens = ("prompt_tokens", "cached_tokens", "read_again_tokens")
    row = {"run_id": "run_1", "model": "small", "program": "", "is_live": True, "replicas": []}
    row |= dict.fromkeys((*names, *tokens), 1)
    row |= {"num_open": num_open, "awaits_tools": awaits_tools, "silent_ns": silent_ns}
    page = open_page(url_of(client, "/docs"), may_log=True)
    answer = json.dumps({"runs": [row]})
    page.route("**/debug/runs", lambda route: route.fulfill(body=answer, content_type="application/json"))
    page.goto(url_of(client, "/runs"))
    page.wait_for_selector(f"#runs a:has-text('{text}')")
    assert "live" not in page.inner_text("#runs")


@pytest.mark.parametrize(
    ("program", "words", "name", "beside"),
    [
        ("Codex", "Write a poem.", "Codex", ["Write a poem."]),
        ("", "Write a poem.", "Write a poem.", []),
        ("", "", "unknown program", []),
    ],
)
def test_run_is_named_by_its_program_else_by_its_first_words(
    client: httpx.Client, open_page: OpenPage, program: str, words: str, name: str, beside: list[str]
) -> None:
    [row, *_] = client.get("/debug/runs").json()["runs"]
    answer = json.dumps({"runs": [row | {"program": program, "first_words": words}]})
    page = open_page(url_of(client, "/docs"), may_log=True)
    page.route("**/debug/runs", lambda route: route.fulfill(body=answer, content_type="application/json"))
    page.goto(url_of(client, "/runs"))
    columns = page.locator("#runs a > span")
    assert columns.nth(1).inner_text().splitlines()[0] == name
    assert columns.nth(2).locator("span").all_inner_texts() == beside


def test_row_of_a_run_is_whole_on_a_phone(client: httpx.Client, open_page: OpenPage) -> None:
    [row, *_] = client.get("/debug/runs").json()["runs"]
    texts = {"program": "my-agent-with-a-long-name-of-32-c", "first_words": 10 * "Write it "}
    answer = json.dumps({"runs": [row | texts, row | texts | {"program": ""}]})
    page = open_page(url_of(client, "/docs"), PHONE, may_log=True)
    page.route("**/debug/runs", lambda route: route.fulfill(body=answer, content_type="application/json"))
    page.goto(url_of(client, "/runs"))
    page.wait_for_selector("#runs a")
    is_cut = "nodes => nodes.map((node) => node.scrollWidth > node.clientWidth)"
    assert not any(page.locator("#runs a > span, #runs a > span > span").evaluate_all(is_cut))


def test_a_run_is_saved_for_perfetto(client: httpx.Client, open_page: OpenPage) -> None:
    page = open_page(url_of(client, "/runs"))
    page.locator("#runs a").first.click()
    page.wait_for_selector(".turns")
    with page.expect_download() as saved:
        page.get_by_text("Save for Perfetto").click()
    assert saved.value.suggested_filename == page.inner_text("#title") + ".json"


def test_an_unknown_run_has_a_page_that_says_so(client: httpx.Client, open_page: OpenPage) -> None:
    page = open_page(url_of(client, "/docs"), may_log=True)
    page.goto(url_of(client, "/runs/nobody"))
    page.wait_for_selector("#run:has-text(\"There is no run 'nobody' here.\")")


@pytest.mark.parametrize(("scheme", "viewport"), [("light", DESK), ("dark", PHONE)], ids=["light", "dark on a phone"])
def test_every_text_has_enough_contrast_and_every_control_a_name_within_the_width(
    client: httpx.Client, open_page: OpenPage, scheme: str, viewport: dict[str, int]
) -> None:
    page = open_page(url_of(client, "/runs"), viewport, color_scheme=scheme)
    page.wait_for_selector("#runs a")
    check_texts_and_controls(page, least_texts=10)
    page.locator("#runs a").last.click()
    page.wait_for_selector(".turns")
    check_texts_and_controls(page, least_texts=20)
