"""The live page in a real Chromium, in front of a real server under the load of 64 streams."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import API_KEY, LiveServer, serve_process

# Left out where there is no Chromium, and then this need not be installed either.
playwright = pytest.importorskip("playwright.sync_api")

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120, func_only=True)]

NUM_STREAMS = 64
WAIT_MS = 30_000
PHONE = {"width": 360, "height": 740}
DESK = {"width": 1280, "height": 900}

CONTRASTS = (Path(__file__).parent / "contrast.js").read_text()


@contextmanager
def load(server: LiveServer, num_streams: int) -> Iterator[None]:
    """So many streams at any time; each asks again when its answer has ended."""
    is_over = threading.Event()
    body = {"prompt": "Say something", "max_tokens": 40, "ignore_eos": True, "stream": True}

    def ask(http: httpx.Client) -> None:
        while not is_over.is_set():
            assert http.post("/v1/completions", json=body).status_code == 200

    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=server.url, timeout=60, limits=limits) as http:
        threads = [threading.Thread(target=ask, args=(http,)) for _ in range(num_streams)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            for thread in threads:
                thread.join()


@pytest.fixture(scope="module")
def server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log_file = tmp_path_factory.mktemp("dashboard") / "log"
    env = {"OMP_NUM_THREADS": "1"}
    flags = ("--served-model-name", "small", "--kv-blocks", "600", "--recent-requests", "2000")
    with serve_process(str(small_model), log_file, *flags, env=env) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as running:
        # The sandbox does not start for root, as in a container; the pages are our own.
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


OpenPage = Callable[..., "playwright.Page"]


@pytest.fixture
def open_page(browser: playwright.Browser) -> Iterator[OpenPage]:
    """Opens the live page in a context of its own. In the end no page may have complained."""
    contexts, complaints = [], []

    def open_page(server: LiveServer, viewport: dict[str, int] = DESK, **options: str) -> playwright.Page:
        context = browser.new_context(viewport=viewport, **options)
        context.set_default_timeout(WAIT_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda sent: complaints.append(sent.url) if not sent.url.startswith(server.url) else None)
        page.goto(f"{server.url}/dashboard")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def test_a_request_s_waterfall_under_load_is_that_of_debug_requests(server: LiveServer, open_page: OpenPage) -> None:
    with load(server, NUM_STREAMS):
        page = open_page(server)
        row = page.locator("#waterfall button").first
        row.click()
        page.wait_for_selector("dialog[open] tr[data-phase]")
        request_id = page.text_content("#detail-title")
        shown = page.locator("tr[data-phase]").evaluate_all("rows => rows.map((row) => ({...row.dataset}))")
        page.wait_for_selector("#status[data-state=live]")
        page.wait_for_selector("#tiles div:has-text('Running') dd:not(:text-is('0'))")
    entry = httpx.get(f"{server.url}/debug/requests/{request_id}").json()
    assert [(row["phase"], int(row["durationNs"])) for row in shown] == [
        (phase["name"], phase["duration_ns"]) for phase in entry["phases"]
    ]
    assert page.locator("#detail-body").get_by_text(entry["trace_id"]).count() == 1


def test_the_playground_shows_the_server_s_phases(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(server)
    page.click("#tab-playground")
    page.fill("#max-tokens", "30")
    page.click("#send")
    page.wait_for_selector("#chat-detail:visible")
    assert "as the server measured it" in page.text_content("#chat-summary")
    named = page.locator("#chat-phases tbody tr").all_inner_texts()
    assert [text.split("\t")[0].strip() for text in named] == [
        *("receive", "tokenize wait", "tokenize", "queue", "prefill", "decode"),
    ]
    page.click("#chat-detail")
    page.wait_for_selector("dialog[open] tr[data-phase=decode]")


def test_everything_works_from_the_keyboard(server: LiveServer, open_page: OpenPage) -> None:
    httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hi", "max_tokens": 3})
    page = open_page(server)
    page.wait_for_selector("#waterfall button")
    focused = page.evaluate_handle
    for _ in range(10):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement.closest('#waterfall') !== null"):
            break
    row = focused("() => document.activeElement").as_element()
    assert row.get_attribute("data-request")
    assert row.evaluate("row => getComputedStyle(row).outlineStyle") != "none"
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open] tr[data-phase]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="hidden")
    assert row.evaluate("row => row === document.activeElement")
    page.focus("#tab-live")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#playground")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast_enough(server: LiveServer, open_page: OpenPage, scheme: str) -> None:
    httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hi", "max_tokens": 3})
    page = open_page(server, color_scheme=scheme)
    page.wait_for_selector("#status[data-state=live]")
    page.wait_for_selector("#waterfall button")
    found = page.evaluate(CONTRASTS)
    page.locator("#waterfall button").first.click()
    page.wait_for_selector("dialog[open] tr[data-phase]")
    found += page.evaluate(CONTRASTS)
    assert len(found) > 50
    assert [named for ratio, named in found if ratio < 4.5] == []


def test_nothing_sticks_out_on_a_phone(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(server, PHONE)
    page.wait_for_selector("#status[data-state=live]")
    for tab in ("#tab-live", "#tab-playground"):
        page.click(tab)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"]


def test_every_control_has_a_name(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(server)
    page.wait_for_selector("#status[data-state=live]")
    for tab in ("#tab-live", "#tab-playground"):
        page.click(tab)
        nameless = "nodes => nodes.filter((node) => !(node.labels?.length || node.textContent.trim())).length"
        assert page.locator("button, input, textarea").evaluate_all(nameless) == 0


def test_it_asks_for_the_api_key(live: LiveServer, browser: playwright.Browser) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{live.url}/dashboard")
        page.fill("#key", API_KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("#status[data-state=live]")
        assert page.is_hidden("#key-form")


@pytest.mark.parametrize("q", [0.5, 0.95, 0.99, 1])
def test_quantiles_are_those_of_prometheus(server: LiveServer, open_page: OpenPage, q: float) -> None:
    """Linear within a bucket; the last boundary for what is above it."""
    boundaries = [0.1, 0.5, 2.0]
    cases = [{0: 4}, {1: 3, 2: 1}, {0: 1, 2: 9}, {0: 5, 3: 5}, {}]
    page = open_page(server)
    ask = """async ([cases, boundaries, q]) => {
      const { quantile } = await import("/dashboard/static/window.js");
      return cases.map((counts) => quantile(counts, boundaries, q));
    }"""
    found = page.evaluate(ask, [[list(map(list, counts.items())) for counts in cases], boundaries, q])
    assert found == pytest.approx([reference_quantile(counts, boundaries, q) for counts in cases])


def reference_quantile(counts: dict[int, int], boundaries: list[float], q: float) -> float | None:
    edges = [0.0, *boundaries, boundaries[-1]]
    rank, below = q * sum(counts.values()), 0
    if not counts:
        return None
    for bucket in range(len(edges) - 1):
        count = counts.get(bucket, 0)
        if count and below + count >= rank:
            return edges[bucket] + (edges[bucket + 1] - edges[bucket]) * (rank - below) / count
        below += count
    raise AssertionError("the ranks end with the values")
