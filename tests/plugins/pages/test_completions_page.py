"""The chat page of a model without a chat template, in a real Chromium: it continues texts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.browser import DESK, PHONE, OpenPage, check_texts_and_controls
from tests.e2e.live import LiveServer, serve_process
from tests.plugins.pages.chat_page import LAST, bodies, ended, send, settings, stored

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("completions")
    model = shutil.copytree(small_model, folder / "tiny")
    (model / "chat_template.jinja").unlink()
    with serve_process(str(model), folder / "log", "--kv-cache-memory", "14400KiB") as server:
        yield server


@pytest.fixture
def page(server: LiveServer, open_page: OpenPage) -> Page:
    page = open_page(f"{server.url}/")
    page.wait_for_selector("body.completes")
    return page


def test_the_page_says_that_the_model_continues_texts_and_suggests_some(page: Page) -> None:
    assert page.inner_text("#welcome-title") == "Continue texts with tiny"
    assert page.inner_text("#welcome-note").startswith("The model has no chat template, so it only continues texts")
    assert page.get_attribute("#prompt", "placeholder") == "Begin a text, and tiny continues it"
    sent = bodies(page)
    text = page.locator("#examples button").first.text_content()
    settings(page, max_completion_tokens="5")
    page.locator("#examples button").first.click()
    ended(page)
    assert [(body["prompt"], body["max_tokens"]) for body in sent] == [(text, 5)]
    assert page.locator("[name=system]").is_hidden()


def test_a_text_is_shown_with_its_continuation_which_can_go_on(page: Page) -> None:
    settings(page, max_completion_tokens="6", seed="1")
    send(page, "Once upon ")
    (step,) = stored(page)[0]["turns"][0]["answers"][0]["steps"]
    shown = page.text_content(f"{LAST} .markdown")
    assert shown == f"Once upon {step['message']['content']}"
    assert page.locator(f"{LAST} .given").text_content() == "Once upon "
    assert page.locator("#turns .bubble").is_hidden()
    sent = bodies(page)
    page.click(f"{LAST} >> text=Continue")
    ended(page)
    assert sent[0]["prompt"] == shown
    assert page.text_content(f"{LAST} .markdown").startswith(shown or "?")


def test_the_tokens_of_a_continuation_can_be_shaded(page: Page) -> None:
    settings(page, max_completion_tokens="6", seed="1")
    send(page, "Once upon ")
    page.click(f"{LAST} .account summary")
    page.click(f"{LAST} .views [value=certainty]")
    assert page.locator(f"{LAST} .markdown [data-token]").count() > 0
    assert page.locator(f"{LAST} .given [data-token]").count() == 0


@pytest.mark.parametrize("size", [DESK, PHONE])
def test_texts_and_controls_can_be_read_and_reached(size: dict[str, int], page: Page) -> None:
    page.set_viewport_size(size)
    send(page, "Once upon ")
    check_texts_and_controls(page)
