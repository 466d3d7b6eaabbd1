"""Tests the pages of runs in a real Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from oaiserve.config import ServerOptions
from tests.e2e.browser import DESK, PHONE, OpenPage, check_texts_and_controls, walk_to
from tests.e2e.live import answers_are_as_published  # noqa: F401 - a fixture
from tests.plugins.runs.asked import CALL, QUESTION, RESULT, chat, served

pytestmark = [pytest.mark.browser, pytest.mark.plugin("pages")]

HELP = {"role": "user", "content": "Look for files."}


@pytest.fixture(scope="module")
def client(small_model: Path) -> Iterator[httpx.Client]:
    """Give a client of a server with a run of three turns of its agent, and one of a subagent."""
    with served(small_model, ServerOptions(served_model_name=("small",))) as client:
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
