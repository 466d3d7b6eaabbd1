"""Tests the live page in a real Chromium, with a real server under the load of 32 streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from oaiserve.engine.types.pooling import Pooling
from oaiserve.facts.times import duration
from oaiserve.plugins.shared.feed import MOST_VIEWERS, RETRY_AFTER_SECONDS
from tests.e2e.browser import DESK, PHONE, OpenPage, check_texts_and_controls, walk_to
from tests.e2e.live import LiveServer, serve_process
from tests.e2e.load import streams
from tests.e2e.proxies import under_prefix
from tests.plugins.pages.time_axis import reference_axis
from tests.serving import Served
from tests.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

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


def complete(server: LiveServer, **body: Any) -> httpx.Response:
    body = {"prompt": "Hi", "max_tokens": 3, "ignore_eos": True} | body
    return server.post("/v1/completions", **body)


def test_the_phases_of_a_request_under_load_are_those_of_debug_requests(server: LiveServer, page: Page) -> None:
    with streams(server.url, NUM_STREAMS, max_tokens=40):
        page.wait_for_selector("#tiles div:has-text('Running') dd:not(:text-is('0'))")
        page.locator("#waterfall a").first.click()
        page.wait_for_selector("tr[data-phase='respond']")  # The first row may be of an open request.
        request_id = page.inner_text("#title")
        shown = page.locator("tr[data-phase]").evaluate_all("rows => rows.map((row) => ({...row.dataset}))")
    entry = server.get(f"/debug/requests/{request_id}").json()
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
    num_known = sum(bool(phase["causes_ns"]) for phase in entry["phases"])
    assert page.locator(".phases i.shaded").count() == num_known


def test_pages_show_a_time_as_logs_and_explanations_do(page: Page) -> None:
    times_ns = [0, 50, 7_300, 999_400, 999_600, 24_316_000, 131_000_000, 1_308_000_000, 98_764_000_000, 1e12, 6e13]
    script = "async (all) => all.map((await import('./dashboard/static/show.js')).duration)"
    assert page.evaluate(script, [ns / 1e9 for ns in times_ns]) == [duration(ns) for ns in times_ns]


def test_bars_of_requests_lie_on_one_time_axis(server: LiveServer, page: Page) -> None:
    """One time axis shows which requests ran at the same time. Open ones would lengthen it until they end."""
    with streams(server.url, NUM_STREAMS, max_tokens=40):
        listed = page.context.new_page()
        listed.goto(f"{server.url}/requests")
        listed.wait_for_selector("#number:has-text('the newest 20 open')")
    page.wait_for_selector("#requests a >> nth=20")
    page.wait_for_selector("#open-requests:empty", state="attached")
    page.click("#pause")
    requests = server.get("/debug/requests").json()["requests"]
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
        path = f"/debug/requests/{request_id}"
        wait_until(lambda path=path: server.get(path).status_code == 200)
        entry = server.get(path).json()
        page = open_page(f"{server.url}/requests?id={request_id}")
        page.click("#requests a")
        page.wait_for_selector("tr[data-phase]")
        drafted = entry["num_draft_tokens"]
        accepted = entry["num_accepted_tokens"]
        line = f"{drafted} tokens: {accepted} accepted, {drafted - accepted} rejected"
        shown.append((accepted > 0, page.locator("dl.facts dd").get_by_text(line, exact=True).count()))
    assert shown == [(True, 1), (False, 0)]


def test_figures_of_a_drafted_request_fit_together(server: LiveServer, open_page: OpenPage) -> None:
    request_id = complete(server).headers["x-request-id"]
    entry = server.get(f"/debug/requests/{request_id}").json()
    entry |= {"num_draft_tokens": 10_976, "num_accepted_tokens": 7_378, "mean_event_tokens": 9.3}
    entry["token_gaps"] = {"p50_ns": 166_000_000, "p99_ns": 200_000_000, "max_ns": 300_000_000}
    entry["cost"] |= {"machine_ns": 84 * 10**9, "core_ns": 10**9, "alone_ns": 207 * 10**9, "alone_core_ns": 10**9}
    page = open_account(open_page, server, entry)
    facts = page.inner_text("dl.facts")
    assert "10,976 tokens: 7,378 accepted, 3,598 rejected" in facts
    assert "Between tokens" not in facts
    assert "p50 166 ms, p99 200 ms, at most 300 ms; 9.3 tokens in each" in facts
    assert "84 s, alone without drafts 207 s" in facts


def test_numbers_of_an_account_have_commas_but_for_its_seed(server: LiveServer, open_page: OpenPage) -> None:
    request_id = complete(server).headers["x-request-id"]
    entry = server.get(f"/debug/requests/{request_id}").json()
    entry["params"] = {"max_tokens": 10_976, "temperature": 0.75, "seed": 446_121}
    entry["events"] = [{"name": "prefill_chunk", "at_ns": 1000, "details": {"start": 2048, "tokens": 512}}]
    page = open_account(open_page, server, entry)
    assert "max tokens 10,976, temperature 0.75, seed 446121" in page.inner_text("dl.facts")
    assert page.get_by_text("start 2,048, tokens 512", exact=True).count() == 1


def test_live_page_names_the_gaps_of_streams_by_what_they_are_between(page: Page) -> None:
    """With drafts, a piece has several tokens, so the gaps are not those of tokens."""
    page.wait_for_selector("#tiles dt")
    assert "Between pieces" in page.locator("#tiles dt").all_inner_texts()
    assert page.get_by_text("Between tokens").count() == 0


def test_numbers_of_tiles_and_charts_have_commas_like_counts(page: Page) -> None:
    script = "async (all) => all.map((await import('./dashboard/static/show.js')).number)"
    assert page.evaluate(script, [0, 7, 7.25, 999.6, 8265, 9999.4, 10_976]) == [
        "0",
        "7",
        "7.3",
        "1,000",
        "8,265",
        "9,999",
        "11k",
    ]


def test_details_have_the_time_alone_of_the_causes(server: LiveServer, open_page: OpenPage) -> None:
    request_id = complete(server).headers["x-request-id"]
    entry = server.get(f"/debug/requests/{request_id}").json()
    entry |= {"num_draft_tokens": 0, "num_accepted_tokens": 0, "media": None}
    for phase in entry["phases"]:
        phase["causes_ns"] = {"alone": 600_000_000} if phase["name"] in ("prefill", "decode") else {}
    entry["cost"] |= {"machine_ns": 2 * 10**9, "core_ns": 10**9, "alone_ns": 10**9, "alone_core_ns": 10**9}
    page = open_account(open_page, server, entry)
    assert "2 s, alone 1.2 s" in page.inner_text("dl.facts")


def open_account(open_page: OpenPage, server: LiveServer, entry: dict[str, Any]) -> Page:
    """Open the page of a request whose account is this entry."""
    page = open_page(f"{server.url}/docs")
    page.route("**/debug/requests/*", lambda route: route.fulfill(json=entry))
    page.goto(f"{server.url}/requests/{entry['request_id']}")
    page.wait_for_selector("tr[data-phase]")
    return page


def test_machine_and_unexplained_have_shades_of_their_own_in_bar_legend_and_table(
    server: LiveServer, open_page: OpenPage
) -> None:
    request_id = complete(server).headers["x-request-id"]
    entry = server.get(f"/debug/requests/{request_id}").json()
    for phase in entry["phases"]:
        phase["causes_ns"] = {}
    causes_ns = {"alone": 100, "neighbour_decodes": 100, "machine": 500, "unexplained": 200, "host": 100}
    entry["phases"][-2] |= {"duration_ns": 1000, "causes_ns": causes_ns}
    page = open_account(open_page, server, entry)
    bar = page.locator("tr[data-phase=decode] .track i")
    ends = [bar.evaluate(f"bar => bar.style.getPropertyValue('--{name}')") for name in ("alone", "shared", "machine")]
    assert ends == ["10%", "20%", "70%"]
    legend = page.locator("[aria-label='Shades of bars'] li")
    names = dict(zip(legend.locator("i").evaluate_all(CLASSES), legend.all_inner_texts(), strict=True))
    assert names["shade-machine"] == "the machine was busy elsewhere"
    assert names["shade-rest"] == "unexplained, host"
    rows = page.locator("tr:has(td [class^=shade-])")
    shades = dict(zip(rows.evaluate_all(FIRST_WORDS), rows.locator("i").evaluate_all(CLASSES), strict=True))
    assert shades == {
        "alone": "shade-alone",
        "neighbour": "shade-others",
        "machine": "shade-machine",
        "unexplained": "shade-rest",
        "host": "shade-rest",
    }


CLASSES = "nodes => nodes.map((node) => node.className)"
FIRST_WORDS = "nodes => nodes.map((node) => node.innerText.split(/\\s/)[0])"


def test_bar_shows_the_machine_where_the_time_alone_is_not_known_yet(server: LiveServer, open_page: OpenPage) -> None:
    request_id = complete(server).headers["x-request-id"]
    entry = server.get(f"/debug/requests/{request_id}").json()
    for phase in entry["phases"]:
        phase["causes_ns"] = {}
    entry["phases"][-2] |= {"duration_ns": 1000, "causes_ns": {"machine": 400, "not_known_yet": 600}}
    page = open_account(open_page, server, entry)
    bar = page.locator("tr[data-phase=decode] .track i")
    ends = [bar.evaluate(f"bar => bar.style.getPropertyValue('--{name}')") for name in ("alone", "shared", "machine")]
    assert ends == ["0%", "0%", "40%"]
    assert page.locator("[aria-label='Shades of bars'] li").last.inner_text() == "not known yet"


def test_tip_of_a_row_says_what_others_the_machine_and_the_rest_added(server: LiveServer, open_page: OpenPage) -> None:
    complete(server)
    entries = server.get("/debug/requests?form=row&limit=1").json()
    ns = 1_000_000_000
    entries["requests"][0] |= {
        "duration_ns": 11 * ns,
        "phases": [["receive", ns], ["decode", 10 * ns, ns, 2 * ns, 7 * ns, "host"]],
    }
    page = open_page(f"{server.url}/docs")
    page.route("**/debug/requests?*", lambda route: route.fulfill(json=entries))
    page.goto(f"{server.url}/requests")
    page.hover("#requests .track")
    tip = page.locator("#tip li").all_inner_texts()
    assert tip == ["receive 1 s", "decode 10 s, 1 s for others, 5 s while the machine was busy elsewhere, 3 s host"]
    shades = page.locator("[aria-label='Shades of bars'] li").all_inner_texts()
    assert shades[2:] == ["the machine was busy elsewhere", "unexplained, and other causes"]


def test_a_request_has_one_row_while_it_runs_and_after(server: LiveServer, open_page: OpenPage) -> None:
    """A click that has begun finds its row, and a row with the focus keeps it."""
    complete(server)
    listed = server.get("/debug/requests?form=row&limit=1").json()
    (ended,) = listed["requests"]
    running = {name: ended[name] for name in ("request_id", "received_unix_ns", "route", "model", "client")} | {
        "phase": "prefill",
        "phases": [{"name": "receive", "duration_ns": 1_000_000}],
        "elapsed_ns": 2_000_000,
        "prompt_tokens": 4000,
        "computed_prompt_tokens": 1000,
        "completion_tokens": 0,
    }
    later = running | {"request_id": "later", "received_unix_ns": ended["received_unix_ns"] + 1_000_000}
    states = [
        {"open": [running], "requests": []},
        {"open": [later, running | {"phase": "decode", "completion_tokens": 5}], "requests": []},
        {"open": [later], "requests": [ended]},
    ]
    page = open_page(f"{server.url}/docs")
    shown: dict[str, Any] = states[0]
    page.route("**/debug/requests?*", lambda route: route.fulfill(json=listed | shown))
    page.goto(f"{server.url}/requests")
    row = page.wait_for_selector("#open-requests a:has-text('1,000 of 4,000 read')")
    row.focus()
    name = row.query_selector(".tokens")
    assert name is not None
    shown = states[1]
    page.wait_for_selector("#open-requests a:has-text('5 tokens so far')")
    assert "5 tokens so far" in name.inner_text()
    assert row.evaluate("row => row === document.activeElement")
    assert page.locator("#open-requests a").first.get_attribute("data-request") == "later"
    shown = states[2]
    page.wait_for_selector("#requests a")
    assert row.inner_text() == page.inner_text("#requests a")
    assert "finished" in row.inner_text()
    assert row.evaluate("row => row === document.activeElement")
    assert page.locator("#open-requests a").count() == 1


def test_bar_of_the_time_in_which_a_model_was_loaded_has_a_shade(server: LiveServer, open_page: OpenPage) -> None:
    request_id = complete(server).headers["x-request-id"]
    entry = server.get(f"/debug/requests/{request_id}").json()
    entry["phases"][0] |= {"duration_ns": 1000, "causes_ns": {"model_load": 1000}}
    page = open_account(open_page, server, entry)
    bar = page.locator("tr[data-phase=receive] .track i")
    assert "gradient" in bar.evaluate("bar => getComputedStyle(bar).backgroundImage")


# -- the pages of requests --------------------------------------------------------------------------------------------


def test_the_address_of_the_list_carries_its_filters(server: LiveServer, open_page: OpenPage) -> None:
    served = complete(server).headers["x-request-id"]
    refused = complete(server, temperature=-1).headers["x-request-id"]
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
    ended = complete(server).headers["x-request-id"]
    page = open_page(f"{server.url}/requests")
    page.click(f"#requests a[data-request='{ended}']")  # the next one is short, so warm its pages up
    page.wait_for_selector("#account .tiles:has-text('finished')")
    page.goto(f"{server.url}/requests")
    page.wait_for_selector(f"#requests a[data-request='{ended}']")
    # Eight long answers, for which the cache has too little room, outlast the page however slow its browser is.
    body = {"prompt": "Hi", "max_tokens": 10_000, "n": 8, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        request_id = stream.headers["x-request-id"]
        progress = f"#open-requests a[data-request='{request_id}'] .tokens"
        page.wait_for_selector(f"{progress}:has-text('so far')")
        page.click("#pause")
        track = f"#open-requests a[data-request='{request_id}'] .track"
        assert {"phase-queue", "phase-prefill shaded", "phase-decode shaded"} <= {
            *page.locator(f"{track} i").evaluate_all("all => all.map((i) => i.className)")
        }
        assert page.locator(f"{track} i").first.evaluate("node => node.offsetLeft") > 0  # others have begun before
        longest = "node => (node.textContent = '102,320 of 126,868 read', node.scrollWidth <= node.clientWidth)"
        assert page.locator(progress).evaluate(longest)
        page.click(f"#open-requests a[data-request='{request_id}']")
        page.wait_for_selector(".open:has-text('Running')")
        page.wait_for_selector(".phases tr[data-phase='decode'] .track .shaded")
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
    walk_to(page, "#requests [data-request]")
    row = page.evaluate_handle("() => document.activeElement").as_element()
    assert row.evaluate("row => getComputedStyle(row).outlineStyle") != "none"
    page.wait_for_selector("#tip:visible")  # with the times of the row that has the focus
    page.keyboard.press("Enter")
    page.wait_for_selector("tr[data-phase]")
    walk_to(page, "#theme")
    for theme in ("light", "dark", "light dark"):
        page.keyboard.press("Enter")
        assert page.evaluate("() => document.documentElement.style.colorScheme") == theme
    walk_to(page, ".pages a[href='../docs']", "Shift+Tab")
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


# -- the limit of viewers, a gateway, a proxy --------------------------------------------------------------------------


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


def test_a_server_that_only_embeds_shows_nothing_of_answers(served: Served, open_page: OpenPage) -> None:
    served.engine.pooling = Pooling("embed", 4)
    page = open_page(f"{served.url}/dashboard")
    page.wait_for_selector("#status[data-state=live]")
    tiles = page.locator("#tiles dt:visible").all_inner_texts()
    assert tiles == ["Requests/s", "Tokens/s", "Whole answer", "Running", "Waiting"]
    titles = page.locator("#charts h2:visible").all_inner_texts()
    assert [title.split(" ")[0] for title in titles] == ["Requests", "Tokens", "Running"]
    page.goto("about:blank")


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
