"""Tests what the pages compute, by calls of the functions in their scripts."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plugins.pages.time_axis import reference_axis

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


def test_quantiles_are_those_of_prometheus(scripted_page: Page) -> None:
    """Prometheus interpolates within a bucket, and returns the last boundary for values above it."""
    boundaries = [0.1, 0.5, 2.0]
    cases = [{0: 4}, {1: 3, 2: 1}, {0: 1, 2: 9}, {0: 5, 3: 5}, {}]
    ask = """async ([cases, boundaries, q]) => {
      const { quantile } = await import("/dashboard/static/window.js");
      return cases.map((counts) => quantile(counts, boundaries, q));
    }"""
    for q in (0.5, 0.95, 0.99, 1):
        quantiles = scripted_page.evaluate(ask, [[list(map(list, counts.items())) for counts in cases], boundaries, q])
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


@pytest.mark.parametrize(
    ("whose", "client", "expected"),
    [
        ("other_client", "batchjob", "1.5 s in prefill went to prompts of batchjob."),
        ("other_client", None, "1.5 s in prefill went to prompts of other clients."),
        ("other_client", "other", "1.5 s in prefill went to prompts of further clients."),
        ("same_client", "alice", "1.5 s in prefill went to prompts of other requests of the same client."),
    ],
)
def test_an_open_request_says_whose_requests_took_its_time(
    scripted_page: Page, whose: str, client: str | None, expected: str
) -> None:
    most = {"whose": whose, "client": client, "prompts_ns": 1_200_000_000, "decodes_ns": 300_000_000, "media_ns": 0}
    phase = {"causes_ns": {"alone": 10**9}, "others": [most, {**most, "client": "carol"}]}
    entry = {"phase": "prefill", "phases": [{}, phase]}
    ask = 'async (entry) => (await import("/dashboard/static/open.js")).sentencesOf(entry)'
    assert scripted_page.evaluate(ask, entry)[-1] == expected
    assert len(scripted_page.evaluate(ask, {**entry, "phases": [phase, {**phase, "others": []}]})) == 1


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def test_json_gets_the_lines_that_pythons_would_have(scripted_page: Page) -> None:
    ask = 'async (all) => all.map((await import("/dashboard/static/show.js")).indented)'
    written = []
    expected = []

    @given(JSON_VALUES, st.sampled_from([(",", ":"), (" ,\n", " : ")]))
    @settings(max_examples=30)
    def write(value: Any, separators: tuple[str, str]) -> None:
        written.append(json.dumps(value, ensure_ascii=False, separators=separators))
        expected.append(json.dumps(value, ensure_ascii=False, indent=2))

    write()
    assert scripted_page.evaluate(ask, written) == expected


# Starts and durations in whole ms, with idle times of all sizes between them.
SPANS = st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 500)), min_size=1, max_size=6)


def test_the_time_axis_is_linear_except_for_long_idle_times(scripted_page: Page) -> None:
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
    for spans, (shares, ticks) in zip(drawn, scripted_page.evaluate(ask, drawn), strict=True):
        expected = reference_axis(spans)
        for span, shown in zip(spans, shares, strict=True):
            assert shown == pytest.approx([expected[moment] for moment in span])
        check_ticks(spans, ticks)


def test_a_bar_ends_where_its_request_ends_before_an_idle_time(scripted_page: Page) -> None:
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
    shares = scripted_page.evaluate(ask, requests)
    durations = [sum(ns for _, ns in phases) * 1e-6 for _, phases in requests]
    expected = [duration / ((duration + 1e6) * 1.05) for duration in durations]
    assert shares == pytest.approx(expected, abs=1e-6)


def test_bar_of_an_older_chat_has_no_share_of_the_machine(scripted_page: Page) -> None:
    ask = """async (phases) => {
      const { Axis } = await import("/dashboard/static/axis.js");
      const { phaseSpans, placeBar } = await import("/dashboard/static/show.js");
      const track = document.createElement("span");
      placeBar(track, phaseSpans(0, phases), new Axis([[0, 1e-3]], () => ""));
      const names = ["--alone", "--shared", "--machine"];
      return [...track.children].map(({ style }) => names.map((name) => style.getPropertyValue(name)));
    }"""
    older = ["prefill", 500, 50, 100]
    newer = ["decode", 500, 50, 100, 400, "unexplained"]
    assert scripted_page.evaluate(ask, [older, newer]) == [["10%", "20%", "20%"], ["10%", "20%", "80%"]]


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


def test_an_answer_whose_connection_was_lost_has_decoded_since_its_first_token(scripted_page: Page) -> None:
    ask = 'async (steps) => steps.map((await import("/dashboard/static/ask.js")).phasesOf)'
    prefill = ["prefill", 200e6]
    lost = {"phases": [prefill], "eventsMs": [210, 3000], "tookMs": 3100, "error": {"message": "lost"}}
    closed = {"phases": [prefill], "eventsMs": [210, 3000], "isCut": True}  # with its page
    refused = {"phases": [], "eventsMs": [], "tookMs": 5, "error": {"message": "no"}}
    whole = {"phases": [prefill, ["decode", 1e9]], "eventsMs": [210, 1300], "tookMs": 1300, "hasAccount": True}
    assert scripted_page.evaluate(ask, [lost, closed, refused, whole, {**whole, "isStopped": True}]) == [
        [prefill, ["decode", 2900e6]],
        [prefill, ["decode", 2800e6]],
        [["open", 5e6]],
        whole["phases"],
        whole["phases"],
    ]
