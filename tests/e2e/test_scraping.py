"""Tests that pages of /metrics are consistent and streams complete with twenty scrapes a second."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, pairwise
from threading import Event

import httpx
import pytest

from oaiserve.telemetry import names
from tests.e2e.conftest import LiveServer
from tests.telemetry.pages import FORMS, Key, key, samples_on

INTERVAL_SECONDS = 0.05  # like the endpoint picker of Kubernetes
WAIT_SECONDS = 120
NUM_STREAMS, NUM_TOKENS = 6, 16

Page = dict[Key, float]


@pytest.fixture(scope="module")
def pages(live: LiveServer) -> list[Page]:
    """Scrape in both formats in turns, from before the streams until the last stream has been recorded."""
    answers: list[httpx.Response] = []
    forms = cycle(FORMS)
    streams_are_over = Event()

    def scrape(http: httpx.Client) -> Page:
        answers.append(http.get("/metrics", headers={"accept": next(forms)}))
        return parsed(answers[-1])

    def scrape_on(http: httpx.Client) -> None:
        next_at = time.monotonic()
        while not streams_are_over.wait(max(0.0, next_at - time.monotonic())):
            answers.append(http.get("/metrics", headers={"accept": next(forms)}))
            next_at += INTERVAL_SECONDS

    def stream(number: int) -> None:
        body = {"prompt": f"{number} + {number} =", "stream": True, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        with live.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
            *_, last, done = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert (json.loads(last)["choices"][0]["finish_reason"], done) == ("length", "[DONE]")

    with httpx.Client(base_url=live.url, timeout=60) as http, ThreadPoolExecutor(NUM_STREAMS + 1) as threads:
        num_before = total(scrape(http), names.GENERATION_TOKENS.name)
        scraping = threads.submit(scrape_on, http)
        try:
            list(threads.map(stream, range(NUM_STREAMS)))
        finally:
            streams_are_over.set()
        scraping.result()
        deadline = time.monotonic() + WAIT_SECONDS
        while total(scrape(http), names.GENERATION_TOKENS.name) < num_before + NUM_STREAMS * NUM_TOKENS:
            assert time.monotonic() < deadline, "not all tokens of the streams were counted"
    return [parsed(answer) for answer in answers]


def parsed(answer: httpx.Response) -> Page:
    form = answer.request.headers["accept"]
    assert answer.headers["content-type"].startswith(form)
    return samples_on(answer.content, form)


def total(page: Page, name: str, **labels: str) -> float:
    """Return the sum of all samples with this name and these labels."""
    wanted = set(labels.items())
    return sum(value for (found, its_labels), value in page.items() if found == name and wanted <= its_labels)


def test_some_pages_were_scraped_while_streams_ran(pages: list[Page]) -> None:
    assert sum(page[key(names.ENGINE["num_running"].name)] > 0 for page in pages) > 1


def test_the_values_of_a_page_are_consistent(pages: list[Page]) -> None:
    for page in pages:
        num_requests = total(page, names.REQUESTS.name)
        assert total(page, f"{names.DURATION_SECONDS.name}_count") == num_requests
        assert total(page, f"{names.DURATION_SECONDS.name}_bucket", le="inf") == num_requests
        assert total(page, f"{names.PHASE_SECONDS.name}_count", phase="receive") == num_requests
        phases = total(page, f"{names.PHASE_SECONDS.name}_sum")
        assert round(phases * 1e9) == round(total(page, f"{names.DURATION_SECONDS.name}_sum") * 1e9)


def test_counters_and_histograms_never_decrease(pages: list[Page]) -> None:
    for earlier, later in pairwise(pages):
        for name, labels in earlier:
            if name.endswith(("_total", "_bucket", "_count", "_sum")):
                assert later[name, labels] >= earlier[name, labels], name


def test_telemetry_had_no_errors_and_the_lag_of_the_event_loop_was_measured(pages: list[Page]) -> None:
    assert total(pages[-1], names.TELEMETRY_ERRORS.name) == 0
    lag = f"{names.EVENT_LOOP_LAG_SECONDS.name}_count"
    assert total(pages[-1], lag) > total(pages[0], lag)
