"""Tests the live page in a real Chromium, with a real server under the load of 32 streams."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.routes.answer.feed import MOST_VIEWERS, RETRY_AFTER_SECONDS
from tests.e2e.browser import DESK, PHONE, OpenPage, check_texts_and_controls, walk_to, weak_contrasts
from tests.e2e.live import API_KEY, LiveServer, serve_process
from tests.e2e.load import streams
from tests.e2e.proxies import under_prefix
from tests.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

NUM_STREAMS = 32


@pytest.fixture(scope="module")
def server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log_file = tmp_path_factory.mktemp("dashboard") / "log"
    flags = (
        "--served-model-name",
        "small",
        "--kv-cache-memory",
        "7200KiB",
        "--recent-requests",
        "2000",
        "--drafts",
        "lookup",
    )
    with serve_process(str(small_model), log_file, *flags) as server:
        yield server


@pytest.fixture
def page(server: LiveServer, open_page: OpenPage) -> Page:
    return open_page(f"{server.url}/dashboard")


@pytest.fixture(scope="module")
def scripts(server: LiveServer, browser: Browser) -> Iterator[Page]:
    """Give a page for calls of the functions in the modules of the live page. It is no viewer of that."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{server.url}/docs")
        yield page


def complete(server: LiveServer, **body: Any) -> httpx.Response:
    body = {"prompt": "Hi", "max_tokens": 3, "ignore_eos": True} | body
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def test_the_phases_of_a_request_under_load_are_those_of_debug_requests(server: LiveServer, page: Page) -> None:
    with streams(server.url, NUM_STREAMS, max_tokens=40):
        page.wait_for_selector("#tiles div:has-text('Running') dd:not(:text-is('0'))")
        page.locator("#waterfall a").first.click()
        page.wait_for_selector("tr[data-phase]")
        request_id = page.inner_text("#title")
        shown = page.locator("tr[data-phase]").evaluate_all("rows => rows.map((row) => ({...row.dataset}))")
    entry = httpx.get(f"{server.url}/debug/requests/{request_id}", timeout=60).json()
    assert [(row["phase"], int(row["durationNs"])) for row in shown] == [
        (phase["name"], phase["duration_ns"]) for phase in entry["phases"]
    ]
    assert page.url == f"{server.url}/requests/{request_id}"
    assert page.locator("#account").get_by_text(entry["trace_id"]).count() == 1
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#copy-json")
    page.wait_for_selector("#said:text-is('Copied')")
    assert json.loads(page.evaluate("navigator.clipboard.readText()"))["phases"] == entry["phases"]
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # as without HTTPS
    page.click("#copy-id")
    page.wait_for_selector("#copy-id:text-is('Copied')")
    sentences = page.locator("#account .why p").all_text_contents()
    # Neighbours may have ended since, so that they have names now.
    assert [sentence.partition(";")[0].rstrip(".") for sentence in sentences] == [
        sentence.partition(";")[0].rstrip(".") for sentence in entry["explanation"]
    ]
    assert page.locator(".phases i.shaded").count() == sum(bool(phase["causes_ns"]) for phase in entry["phases"])


def test_bars_of_requests_lie_on_one_time_axis(server: LiveServer, page: Page) -> None:
    """One time axis shows which requests ran at the same time."""
    with streams(server.url, NUM_STREAMS, max_tokens=40):
        page.wait_for_selector("#requests a >> nth=20")
        page.click("#pause")
        listed = page.context.new_page()
        listed.goto(f"{server.url}/requests")
        listed.wait_for_selector("#number:has-text('the newest 20 open')")
        requests = httpx.get(f"{server.url}/debug/requests", timeout=60).json()["requests"]
    shown = page.locator("#requests a").evaluate_all(BARS)
    assert len(shown) > 20
    entries = {entry["request_id"]: entry for entry in requests}
    phases = {
        request_id: [
            (start_ns := entries[request_id]["received_unix_ns"] + phase["start_ns"], start_ns + phase["duration_ns"])
            for phase in entries[request_id]["phases"]
        ]
        for request_id, _ in shown
    }
    place = reference_axis([span for spans in phases.values() for span in spans])
    for request_id, bars in shown:
        for (left, width), (start_ns, end_ns) in zip(bars, phases[request_id], strict=True):
            assert left == pytest.approx(place[start_ns], abs=0.005)
            assert width == pytest.approx(place[end_ns] - place[start_ns], abs=0.005)
    lefts = [bars[0][0] for _, bars in shown]
    assert all(a >= b - 0.005 for a, b in pairwise(lefts))  # the newest first, up to parts of a pixel
    page.locator("#requests a").nth(3).hover()
    mark = page.locator("#waterfall").evaluate("all => parseFloat(all.style.getPropertyValue('--mark-from')) / 100")
    assert mark == pytest.approx(lefts[3], abs=0.005)


def test_bars_can_begin_at_zero_with_the_longest_first(server: LiveServer, page: Page) -> None:
    for max_tokens in (3, 400, 30):
        request_id = complete(server, max_tokens=max_tokens, ignore_eos=True).headers["x-request-id"]
        page.wait_for_selector(f"#requests a[data-request='{request_id}']")  # those of other tests are listed, too
    page.click("#pause")
    page.click("#by-duration")
    shown = page.locator("#requests a").evaluate_all(BARS)
    ends = [sum(bars[-1]) for _, bars in shown]
    assert all(bars[0][0] == 0 for _, bars in shown)
    assert all(a >= b - 0.005 for a, b in pairwise(ends))  # up to parts of a pixel
    assert ends[0] == pytest.approx(1, abs=0.005)
    assert ends[-1] < 0.5


# JavaScript that returns the request id of each row, and the left end and width of each part of its bar, as shares of
# the axis. A part is at least a pixel wide.
BARS = """rows => rows.map((row) => {
  const track = row.querySelector(".track").getBoundingClientRect();
  const parts = [...row.querySelectorAll(".track i")].map((part) => part.getBoundingClientRect());
  return [row.dataset.request, parts.map((part) => [(part.left - track.left) / track.width, part.width / track.width])];
})"""


def test_the_account_of_a_request_tells_of_its_drafts(server: LiveServer, open_page: OpenPage) -> None:
    """The answer is one token again and again, so drafts come true. An answer of one token has none."""
    always = {"prompt": "and so on", "temperature": 0, "ignore_eos": True, "logit_bias": {"100": 100}}
    shown = []
    for max_tokens in (100, 1):  # In 100 steps, drafts are probed however slow they are.
        request_id = complete(server, **always, max_tokens=max_tokens).headers["x-request-id"]
        url = f"{server.url}/debug/requests/{request_id}"
        wait_until(lambda url=url: httpx.get(url, timeout=60).status_code == 200)
        entry = httpx.get(url, timeout=60).json()
        page = open_page(f"{server.url}/requests?id={request_id}")
        page.click("#requests a")
        page.wait_for_selector("tr[data-phase]")
        drafted = entry["num_draft_tokens"]
        accepted = entry["num_accepted_tokens"]
        line = f"{drafted} tokens: {accepted} accepted, {drafted - accepted} rejected"
        shown.append((accepted > 0, page.locator("dl.facts dd").get_by_text(line, exact=True).count()))
    assert shown == [(True, 1), (False, 0)]


# -- the pages of requests --------------------------------------------------------------------------------------------


def test_the_address_of_the_list_carries_its_filters(server: LiveServer, open_page: OpenPage) -> None:
    served = complete(server).headers["x-request-id"]
    refused = complete(server, max_tokens=-1).headers["x-request-id"]
    page = open_page(f"{server.url}/requests?failed")
    page.wait_for_selector(f"#requests a[data-request='{refused}']")
    assert page.input_value("[name=outcome]") == "not-served"
    assert page.locator(f"#requests a[data-request='{served}']").count() == 0
    page.select_option("[name=outcome]", "finished")
    page.wait_for_selector(f"#requests a[data-request='{served}']")
    assert page.locator(f"#requests a[data-request='{refused}']").count() == 0
    page.fill("[name=id]", served)
    page.wait_for_selector("#number:text-is('0 open, 1 ended')")
    row = page.inner_text("#requests a")
    assert all(text in row for text in ("completions", "small", "finished", "2 → 3")), row
    page.select_option("[name=route]", "/v1/completions")
    assert page.url == f"{server.url}/requests?id={served}&outcome=finished&route=%2Fv1%2Fcompletions"
    page.reload()
    page.wait_for_selector("#number:text-is('0 open, 1 ended')")
    page.fill("[name=id]", "nobody")
    page.wait_for_selector("#no-requests:text-is('No request matches these filters.')")
    page.click("#clear")
    page.wait_for_selector(f"#requests a[data-request='{refused}']")
    assert page.url == f"{server.url}/requests"


def test_a_paused_list_stays_and_goes_on_later(server: LiveServer, open_page: OpenPage) -> None:
    first = complete(server).headers["x-request-id"]
    page = open_page(f"{server.url}/requests")
    page.wait_for_selector(f"#requests a[data-request='{first}']")
    page.click("#pause")
    second = complete(server).headers["x-request-id"]
    with page.expect_response(lambda answer: second in answer.text()):
        pass
    assert page.locator(f"#requests a[data-request='{second}']").count() == 0
    page.click("#pause")
    page.wait_for_selector(f"#requests a[data-request='{second}']")


def test_the_page_of_an_open_request_follows_it_to_its_account(server: LiveServer, open_page: OpenPage) -> None:
    body = {"prompt": "Hi", "max_tokens": 10_000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        request_id = stream.headers["x-request-id"]
        page = open_page(f"{server.url}/requests")
        page.wait_for_selector(f"#open-requests a[data-request='{request_id}'] .tokens:has-text('so far')")
        page.click(f"#open-requests a[data-request='{request_id}']")
        page.wait_for_selector(".open:has-text('Running')")
        check_texts_and_controls(page)
    page.wait_for_selector("#account .tiles:has-text('cancelled')")


def test_page_of_a_request_tries_again_after_a_lost_connection(server: LiveServer, open_page: OpenPage) -> None:
    request_id = complete(server).headers["x-request-id"]
    page = open_page(f"{server.url}/docs", may_log=True)
    page.route("**/debug/requests/*", lambda route: route.abort())
    page.goto(f"{server.url}/requests/{request_id}")
    page.wait_for_selector("#status:text-is('No connection; trying again')")
    page.unroute("**/debug/requests/*")
    page.wait_for_selector("tr[data-phase]")


def test_an_unknown_request_has_a_page_that_says_how_many_are_kept(server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/docs", may_log=True)
    page.goto(f"{server.url}/requests/nobody")
    page.wait_for_selector("#account:has-text('This server keeps the last 2,000')")
    assert page.is_visible("#account:has-text(\"There is no request 'nobody' here.\")")


# -- the whole page ----------------------------------------------------------------------------------------------------


def test_everything_works_from_the_keyboard(server: LiveServer, page: Page) -> None:
    complete(server)
    page.wait_for_selector("#waterfall a")
    walk_to(page, "#waterfall [data-request]")
    row = page.evaluate_handle("() => document.activeElement").as_element()
    assert row.evaluate("row => getComputedStyle(row).outlineStyle") != "none"
    page.wait_for_selector("#tip:visible")  # with the times of the row that has the focus
    page.keyboard.press("Enter")
    page.wait_for_selector("tr[data-phase]")
    walk_to(page, ".pages a[href='../docs']")
    page.keyboard.press("Enter")
    page.wait_for_url("**/docs")


@pytest.mark.parametrize(("scheme", "viewport"), [("light", DESK), ("dark", PHONE)], ids=["light", "dark on a phone"])
def test_every_text_has_enough_contrast_and_every_control_a_name_within_the_width(
    server: LiveServer, open_page: OpenPage, scheme: str, viewport: dict[str, int]
) -> None:
    complete(server)
    page = open_page(f"{server.url}/dashboard", viewport, color_scheme=scheme)
    page.wait_for_selector("#status[data-state=live]")
    page.wait_for_selector("#waterfall a")
    check_texts_and_controls(page, least_texts=20)
    page.locator("#waterfall a").first.click()
    page.wait_for_selector("tr[data-phase]")
    check_texts_and_controls(page, least_texts=20)
    page.goto(f"{server.url}/requests")
    page.wait_for_selector("#requests a")
    check_texts_and_controls(page, least_texts=20)


# -- API keys, the limit of viewers, a proxy --------------------------------------------------------------------------


def test_the_page_asks_for_a_missing_api_key_until_one_is_right(live: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{live.url}/dashboard", may_log=True)
    page.wait_for_selector("#key-form:visible")
    assert page.locator("label[for=key]").inner_text() == "This server requires an API key."
    assert page.inner_text("#status") == "Waiting for an API key"
    assert page.evaluate("() => document.activeElement.id") == "key"
    assert page.is_hidden("#problem")  # a missing key is no error
    assert page.is_hidden("#main")
    for key, message in (
        ("wrong", "The API key is not known to this server. Please enter another key."),
        ("schlüssel", "An API key has only ASCII letters, digits and punctuation, and no spaces."),
    ):
        page.fill("#key", key)
        page.keyboard.press("Enter")
        page.wait_for_selector(f"#problem:text-is('{message}')")
        assert page.get_attribute("#problem", "role") == "alert"
        assert weak_contrasts(page) == []
    page.fill("#key", API_KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#status[data-state=live]")
    assert page.is_hidden("#key-form")
    assert page.is_hidden("#problem")
    assert page.is_visible("#main")


def test_the_page_asks_for_the_key_when_any_request_finds_it_invalid(live: LiveServer, open_page: OpenPage) -> None:
    with live.http() as http:
        http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1})
    for path, needs_key in (("/requests", "[name=outcome]"), ("/", "#send")):
        visitor = open_page(f"{live.url}{path}", may_log=True)
        visitor.fill("#key", API_KEY)
        visitor.keyboard.press("Enter")
        if needs_key == "#send":
            visitor.fill("#prompt", "Hi")
        visitor.wait_for_selector(needs_key)
        visitor.evaluate("() => sessionStorage.setItem('oaiserve-api-key', 'old')")
        if needs_key == "#send":
            visitor.click(needs_key)
        else:
            visitor.select_option(needs_key, "failed")
        visitor.wait_for_selector("#key-form:visible")
        assert visitor.inner_text("#problem").startswith("The API key is not known")


@pytest.mark.parametrize(("path", "route"), [("/requests", "**/debug/requests*"), ("/dashboard", "**/feed")])
def test_page_asks_for_another_key_if_this_one_lacks_the_right(
    live: LiveServer, open_page: OpenPage, path: str, route: str
) -> None:
    page = open_page(f"{live.url}{path}", may_log=True)
    message = "The role of the key 'a' does not permit this."
    page.route(route, lambda call: call.fulfill(status=403, json={"error": {"message": message}}))
    page.fill("#key", API_KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector(f'#problem:text-is("{message} Please enter another key.")')
    page.unroute(route)
    page.fill("#key", API_KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#status[data-state=live]")
    assert page.is_hidden("#problem")


def test_right_key_after_a_wrong_one_leaves_no_message_in_the_chat(live: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{live.url}/", may_log=True)
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("#problem:visible")
    assert page.locator("#key").evaluate("box => box.clientHeight") < 50
    page.fill("#key", API_KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#status[data-state=live]")
    assert page.is_hidden("#problem")


def test_one_viewer_too_many_gets_a_message_and_is_connected_later(server: LiveServer, open_page: OpenPage) -> None:
    visitor = open_page("about:blank", may_log=True, is_alone=True)
    visitor.clock.install()
    with ExitStack() as watching:
        http = watching.enter_context(
            httpx.Client(base_url=server.url, limits=httpx.Limits(max_connections=None), timeout=60)
        )
        for _ in range(MOST_VIEWERS):
            assert watching.enter_context(http.stream("GET", "/dashboard/feed")).status_code == 200
        visitor.goto(f"{server.url}/dashboard")
        visitor.wait_for_selector("#problem:visible")
        assert visitor.inner_text("#problem").startswith(f"{MOST_VIEWERS} viewers follow the dashboard already")
        assert visitor.inner_text("#status") == "No connection; trying again"
    visitor.clock.run_for((RETRY_AFTER_SECONDS + 1) * 1000)
    visitor.wait_for_selector("#status[data-state=live]")
    assert visitor.is_hidden("#problem")


def test_live_page_needs_no_list_of_models(server: LiveServer, open_page: OpenPage) -> None:
    """A gateway without a replica that is up has no list, and its page says which replicas are down."""
    page = open_page(f"{server.url}/docs", may_log=True)
    page.route("**/v1/models", lambda call: call.fulfill(status=503, json={"error": {"message": "No replica"}}))
    page.goto(f"{server.url}/dashboard")
    page.wait_for_selector("#status[data-state=live]")


def test_everything_works_under_a_prefix(server: LiveServer, open_page: OpenPage) -> None:
    """`open_page` fails the test if a request has a URL without the prefix."""
    complete(server)
    with under_prefix(server.url, "/some/where") as url:
        page = open_page(f"{url}/dashboard")
        page.wait_for_selector("#status[data-state=live]")
        page.locator("#requests a").first.click()
        page.wait_for_selector("tr[data-phase=decode]")
        page.click("text=Chat")
        page.wait_for_selector("#status[data-state=live]")
        page.fill("#prompt", "Hi")
        page.click("#send")
        page.click("#turns:not(.busy) .account summary")
        page.click("text=Open this request")
        page.wait_for_selector("tr[data-phase=decode]")
        for name in ("Requests", "API", "Chat"):
            page.click(f".pages >> text={name}")
            page.wait_for_selector("#status[data-state=live]")
        page.goto(f"{url}/dashboard/")
        page.wait_for_selector("#status[data-state=live]")
        assert page.url == f"{url}/dashboard"
        page.goto("about:blank")  # so that the proxy can shut down without waiting for the feed


# -- the arithmetic of the page ---------------------------------------------------------------------------------------


def test_quantiles_are_those_of_prometheus(scripts: Page) -> None:
    """Prometheus interpolates within a bucket, and returns the last boundary for values above it."""
    boundaries = [0.1, 0.5, 2.0]
    cases = [{0: 4}, {1: 3, 2: 1}, {0: 1, 2: 9}, {0: 5, 3: 5}, {}]
    ask = """async ([cases, boundaries, q]) => {
      const { quantile } = await import("/dashboard/static/window.js");
      return cases.map((counts) => quantile(counts, boundaries, q));
    }"""
    for q in (0.5, 0.95, 0.99, 1):
        quantiles = scripts.evaluate(ask, [[list(map(list, counts.items())) for counts in cases], boundaries, q])
        assert quantiles == pytest.approx([reference_quantile(counts, boundaries, q) for counts in cases]), q


def reference_quantile(counts: dict[int, int], boundaries: list[float], q: float) -> float | None:
    edges = [0.0, *boundaries, boundaries[-1]]
    rank = q * sum(counts.values())
    below = 0
    if not counts:
        return None
    for bucket in range(len(edges) - 1):
        count = counts.get(bucket, 0)
        if count and below + count >= rank:
            return edges[bucket] + (edges[bucket + 1] - edges[bucket]) * (rank - below) / count
        below += count
    raise AssertionError("no bucket has this rank")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def test_json_gets_the_lines_that_pythons_would_have(scripts: Page) -> None:
    ask = 'async (all) => all.map((await import("/dashboard/static/show.js")).indented)'
    written = []
    expected = []

    @given(JSON_VALUES, st.sampled_from([(",", ":"), (" ,\n", " : ")]))
    @settings(max_examples=30)
    def write(value: Any, separators: tuple[str, str]) -> None:
        written.append(json.dumps(value, ensure_ascii=False, separators=separators))
        expected.append(json.dumps(value, ensure_ascii=False, indent=2))

    write()
    assert scripts.evaluate(ask, written) == expected


# Starts and durations in whole ms, with idle times of all sizes between them.
SPANS = st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 500)), min_size=1, max_size=6)


def test_the_time_axis_is_linear_except_for_long_idle_times(scripts: Page) -> None:
    ask = """async (all) => {
      const { Axis } = await import("/dashboard/static/axis.js");
      return all.map((spans) => {
        const axis = new Axis(spans, (ms) => `at ${ms}`);
        return [spans.map((span) => span.map((ms) => axis.share(ms))), axis.ticks(600)];
      });
    }"""
    drawn = []

    @given(SPANS)
    @settings(max_examples=50)
    def draw(spans: list[tuple[int, int]]) -> None:
        drawn.append([(start, start + duration) for start, duration in spans])

    draw()
    for spans, (shares, ticks) in zip(drawn, scripts.evaluate(ask, drawn), strict=True):
        expected = reference_axis(spans)
        for span, shown in zip(spans, shares, strict=True):
            assert shown == pytest.approx([expected[moment] for moment in span])
        check_ticks(spans, ticks)


def test_a_bar_ends_where_its_request_ends_before_an_idle_time(scripts: Page) -> None:
    """The page must not round each phase: milliseconds since 1970 have few digits left for fractions."""
    ask = """async (requests) => {
      const { Axis } = await import("/dashboard/static/axis.js");
      const { phaseSpans } = await import("/dashboard/static/show.js");
      const ends = (start, phases) => start + phases.reduce((sum, [, ns]) => sum + ns, 0) * 1e-6;
      return requests.map(([start, phases]) => {
        const axis = new Axis([[start, ends(start, phases)], [start + 1e6, start + 2e6]], () => "");
        return axis.share(phaseSpans(start, phases).at(-1)[2]);
      });
    }"""
    draw = random.Random(4)
    requests = [
        (1.78e12 + draw.random() * 1e9, [("phase", draw.randrange(10**8)) for _ in range(7)]) for _ in range(500)
    ]
    shares = scripts.evaluate(ask, requests)
    durations = [sum(ns for _, ns in phases) * 1e-6 for _, phases in requests]
    expected = [duration / ((duration + 1e6) * 1.05) for duration in durations]
    assert shares == pytest.approx(expected, abs=1e-6)


def reference_axis(spans: list[tuple[int, int]]) -> dict[int, float]:
    """Return the position of each start and end on the axis, from 0 to 1. The axis is linear in time, but an idle time
    takes at most a twentieth of the sum of all busy times."""
    moments = sorted({moment for span in spans for moment in span})
    pairs = list(pairwise(moments))
    is_busy = [any(start <= a and b <= end for start, end in spans) for a, b in pairs]
    busy = sum(b - a for (a, b), busy in zip(pairs, is_busy, strict=True) if busy)
    at = [0.0]
    for (a, b), busy_now in zip(pairs, is_busy, strict=True):
        at.append(at[-1] + (b - a if busy_now else min(b - a, busy / 20)))
    return {moment: place / at[-1] for moment, place in zip(moments, at, strict=True)}


def check_ticks(spans: list[tuple[int, int]], ticks: list[dict[str, Any]]) -> None:
    """Check that the first tick has the time of day, that each cut has a tick, that no texts overlap, and that each
    relative time (+) follows a text that it refers to."""
    moments = sorted({moment for span in spans for moment in span})
    rests = [(a, b) for a, b in pairwise(moments) if not any(start <= a and b <= end for start, end in spans)]
    busy = moments[-1] - moments[0] - sum(b - a for a, b in rests)
    ordered = sorted(ticks, key=lambda tick: tick["at"])
    assert (ordered[0]["at"], ordered[0]["text"]) == (0, f"at {moments[0]}")
    assert sum(tick["isCut"] for tick in ticks) == sum(b - a > busy / 20 for a, b in rests)
    with_text = [tick["at"] for tick in ordered if tick["text"]]
    assert all(b - a >= 0.1 for a, b in pairwise([*with_text, 1]))
    for before, after in pairwise(ordered):
        assert before["text"] or not after["text"].startswith("+")
