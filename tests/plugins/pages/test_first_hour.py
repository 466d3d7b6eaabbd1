"""What a new user does in the first hour: with a model, with a picture, and with math, a table and code.

The model is the demo, or the one that FIRST_HOUR_MODEL names, such as a path. FIRST_HOUR_PICTURES names a folder for
screenshots.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from loadtest.metrics_page import values_of
from oaiserve.checkpoints import demo
from tests import forking
from tests.e2e.browser import OpenPage, check_texts_and_controls, fits_the_width, walk_to
from tests.e2e.live import clean_environment
from tests.models.pictures import png
from tests.plugins.pages.chat_page import LAST, Script, ask, ended, ready, send, settings, stored
from tools.server_process import ServerProcess, free_port, running_process

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

MODEL = os.environ.get("FIRST_HOUR_MODEL", "demo")
PICTURES = os.environ.get("FIRST_HOUR_PICTURES")
SMALL_PHONE = {"width": 390, "height": 844}
TEXT = f"{LAST} .markdown"
# The demo answers with a hundred tokens or more; other models need to be asked for more.
LONG = "Describe a forest in the morning." if MODEL == "demo" else "Write a story of 100 words about a forest."


@contextmanager
def model_server(port: int, log_file: Path, *flags: str, model: str = MODEL) -> Iterator[ServerProcess]:
    command = [sys.executable, "-m", "oaiserve", "serve", model, "--port", str(port), "--kv-cache-memory", "256MiB"]
    command += flags
    options = {"env": clean_environment(), "start_limit_seconds": 300, "stop_limit_seconds": 0, "start": forking.start}
    with running_process(command, port, log_file=log_file, **options) as server:
        yield server


def show(page: Page, name: str) -> None:
    """Save a screenshot, if somebody wants to see it."""
    if PICTURES is not None:
        page.screenshot(path=Path(PICTURES) / f"{name}.png")


def begun(page: Page) -> str:
    """Send a message, and return the beginning of its answer as soon as there is one."""
    ask(page, LONG)
    page.wait_for_selector(f"{TEXT}:not(:empty)")
    return page.inner_text(TEXT)


def test_answers_survive_a_reload_and_a_killed_server(open_page: OpenPage, tmp_path: Path) -> None:
    if MODEL == "demo":
        demo.fetched()
    port = free_port()
    with model_server(port, tmp_path / "first.log") as server:
        page = open_page(f"{server.url}/", may_log=True)
        page.wait_for_selector("#status[data-state=live]")
        if MODEL == "demo":
            page.wait_for_selector("#welcome-note:has-text('small model')")
        send(page, "What is the capital of France?")
        assert "Paris" in page.inner_text(TEXT)
        show(page, "first-chat")

        beginning = begun(page)
        page.reload()
        page.wait_for_selector("#status[data-state=live]")
        ended(page)
        assert page.inner_text(TEXT).startswith(beginning)
        assert page.inner_text(f"{LAST} .end") == ""
        show(page, "reloaded")

        beginning = begun(page)
        server.process.send_signal(signal.SIGKILL)
        page.wait_for_selector("#status[data-state=lost]")
        ended(page)
        assert page.inner_text(f"{LAST} .error") == "The connection to the server was lost."
        show(page, "killed")
        assert page.inner_text(TEXT).startswith(beginning)
    with model_server(port, tmp_path / "second.log"):
        page.wait_for_selector("#status[data-state=live]")
        page.click(f"{LAST} .end button:text-is('Continue')")
        ended(page)
        assert page.inner_text(f"{LAST} .end") == ""
        assert page.inner_text(TEXT).startswith(beginning)
        assert page.locator("#turns > li").count() == 3
        show(page, "continued")


@pytest.mark.plugin("gateway")
def test_an_answer_behind_a_gateway_survives_its_killed_server(open_page: OpenPage, tmp_path: Path) -> None:
    with ExitStack() as running:
        trust = ("--trusted-proxy", "127.0.0.1")
        logs = (tmp_path / "first.log", tmp_path / "second.log")
        servers = [running.enter_context(model_server(free_port(), log, *trust)) for log in logs]
        port = free_port()
        command = [sys.executable, "-m", "oaiserve", "route", "--port", str(port)]
        command += [part for server in servers for part in ("--replica", server.url)]
        options = {"env": clean_environment(), "stop_limit_seconds": 0, "start": forking.start}
        gateway = running.enter_context(running_process(command, port, log_file=tmp_path / "gateway.log", **options))
        page = open_page(f"{gateway.url}/")
        page.wait_for_selector("#status[data-state=live]")
        settings(page, temperature="0")
        beginning = begun(page)
        servers.sort(key=is_busy)
        idle, busy = servers
        assert is_busy(busy)
        busy.process.send_signal(signal.SIGKILL)
        ended(page)
        assert page.inner_text(f"{LAST} .end") == ""
        assert page.inner_text(TEXT).startswith(beginning)
        show(page, "gateway")
        (chat,) = stored(page)
        body = {"model": chat["turns"][0]["answers"][0]["model"], "temperature": 0}
        body["messages"] = [{"role": "user", "content": LONG}]
        undisturbed = httpx.post(f"{idle.url}/v1/chat/completions", json=body, timeout=300).json()["choices"][0]
        assert chat["turns"][0]["answers"][0]["steps"][0]["message"]["content"] == undisturbed["message"]["content"]
        page.close()  # It asks every two seconds whether the server is there.


def is_busy(server: ServerProcess) -> bool:
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    return sum(values_of(metrics, "oaiserve_requests_running")) > 0


@pytest.mark.plugin("media")
def test_a_model_reads_the_colour_of_each_picture_also_after_a_reload(open_page: OpenPage, tmp_path: Path) -> None:
    from tests.plugins.media.colours import filled, save_reader_of_colours  # of a plug-in that may be missing

    model = tmp_path / "reader-of-colours"
    save_reader_of_colours(model)
    with model_server(free_port(), tmp_path / "log", model=str(model)) as server:
        page = open_page(f"{server.url}/")
        page.wait_for_selector("#status[data-state=live]")
        settings(page, temperature="0")
        for number, colour in enumerate(("red", "blue"), 1):
            file = {"name": f"{colour}.png", "mimeType": "image/png", "buffer": png(filled(colour))}
            page.set_input_files("#attach", file)
            page.wait_for_selector(f"#attached img[alt='{colour}.png']")
            send(page, "Repeat the word above.")  # The model reads a picture of a colour as that word.
            assert re.findall("red|green|blue", page.inner_text(TEXT)) == [colour]
            show(page, f"picture-{colour}")
            page.reload()
            page.wait_for_selector("#status[data-state=live]")
            assert page.locator(".asked img").count() == number
        page.close()  # as above


ANSWER = r"""
The roots of $ax^2 + bx + c = 0$, for $5 or $6 each, are

\[ x_{1,2} = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a} \]

$$\begin{pmatrix} a & b \\ c & d \end{pmatrix} = 0$$

| number | square |
| -----: | -----: |
|      2 |      4 |
|     12 |    144 |

- [x] explained

```python
print(12 ** 2)
```
"""


def test_math_and_tables_fit_a_phone_in_the_dark_without_a_mouse(
    script: Script, scripted_url: str, open_page: OpenPage
) -> None:
    page = ready(open_page(scripted_url, SMALL_PHONE))
    walk_to(page, "#theme")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert page.get_attribute("#theme", "aria-label") == "Theme: dark. Change to system"
    walk_to(page, "#examples button")
    question = page.evaluate("() => document.activeElement.textContent")
    script.answer(*ANSWER.splitlines(keepends=True))
    page.keyboard.press("Enter")
    ended(page)
    assert page.inner_text(".asked .text") == question

    page.wait_for_selector(f"{LAST} mfrac")
    assert page.locator(f"{LAST} math").count() == 3
    assert "for $5 or $6 each" in page.inner_text(TEXT)
    assert page.locator(f"{LAST} td").all_inner_texts() == ["2", "4", "12", "144"]
    assert fits_the_width(page)
    show(page, "phone")
    check_texts_and_controls(page, least_texts=10)
    walk_to(page, f"{LAST} [aria-label='Copy code']")
    colour = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.reload()
    ready(page)
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") == colour == "rgb(23, 24, 26)"
