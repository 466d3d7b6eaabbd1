"""Tests the gateway's page of its fleet: what it tells, to whom, and in a real Chromium."""

import json
from dataclasses import replace
from typing import Any

import pytest

from oaiserve.plugins.gateway.options import RouteOptions
from tests.e2e.browser import (  # noqa: F401
    DESK,
    PHONE,
    OpenPage,
    browser,
    fits_the_width,
    open_page,
    shared_context,
    weak_contrasts,
)
from tests.plugins.gateway.doubles import BEHIND_A_GATEWAY, Fleet, fleet
from tests.world.serving import Place


def told(running: Fleet) -> dict[str, Any]:
    """Return the first message of the feed."""
    with running.http.stream("GET", "/dashboard/feed") as feed:
        assert feed.headers["cache-control"] == "no-store"
        text = next(line for line in feed.iter_lines() if line.startswith("data: "))
    return json.loads(text.removeprefix("data: "))


def test_feed_has_numbers_states_and_addresses_of_replicas(place: Place) -> None:
    with fleet(place, 2) as running:
        (first, second) = running.replicas
        for number in range(6):
            assert running.ask(f"{number}").status_code == 200
        place.world.settle()
        assert running.metric("oaiserve_gateway_requests_total", ending="answered") == 6
        running.watch.upstreams[first].out_until_ns = 2**62  # before, so that its next report doesn't bring it back
        running.watch.exclude(first, "a test")
        found = told(running)["fleet"]
        assert all(replica["num_running"] == 0 for replica in found["replicas"])
        assert found["requests"]["answered"] == 6
        assert found["continued"] == {"alike": 0, "unlike": 0, "failed": 0}
        assert [replica["number"] for replica in found["replicas"]] == [1, 2]
        states = {replica["address"]: (replica["is_up"], replica["state"]) for replica in found["replicas"]}
        assert states == {first: (False, "Paused, because its requests failed"), second: (True, "Up")}
        assert sum(replica["num_sent"] for replica in found["replicas"]) == 6
        assert all(replica["models"] == ["m"] for replica in found["replicas"])


@pytest.mark.plugin("pages")
def test_a_gateway_has_the_pages_of_a_server(place: Place) -> None:
    with fleet(place, 1) as running:
        assert "chat-form" in running.http.get("/", headers={"accept": "text/html,*/*;q=0.8"}).text
        assert running.http.get("/").json()["links"]["page"] == "dashboard"


@pytest.mark.plugin("pages")
def test_pages_of_requests_need_a_local_gateway_or_open_dashboard_without_addresses(place: Place) -> None:
    for route, status in (
        (RouteOptions(host="0.0.0.0"), 404),
        (RouteOptions(host="0.0.0.0", open_dashboard=True), 200),
    ):
        with fleet(place, 1, route=route) as running:
            for path in ("/dashboard", "/requests", "/requests/req-1", "/debug/requests", "/clients", "/debug/clients"):
                answer = running.http.get(path)
                assert answer.status_code == status
                assert ("--open-dashboard" in answer.text) == (status == 404)
            assert ("link" in running.ask().headers) == (status == 200)
            if status == 200:
                assert "address" not in told(running)["fleet"]["replicas"][0]
            else:
                assert running.http.get("/dashboard/feed").status_code == 404


@pytest.mark.browser
@pytest.mark.plugin("pages")
@pytest.mark.parametrize(("scheme", "viewport"), [("light", DESK), ("dark", PHONE)], ids=["light", "dark on a phone"])
def test_the_page_follows_the_fleet(open_page: OpenPage, scheme: str, viewport: dict[str, int]) -> None:  # noqa: F811
    with fleet(None, 2) as running:
        page = open_page(f"{running.http.base_url}/dashboard", viewport, color_scheme=scheme)
        page.wait_for_selector("#status[data-state=live]")
        for number in range(3):
            running.ask(f"{number}")
        page.wait_for_selector("#tiles div:has-text('Answered') dd:text-is('4')")  # with the list of models
        page.wait_for_selector("#requests a >> nth=2")
        assert weak_contrasts(page, least_texts=10) == []
        assert fits_the_width(page)
        if viewport == PHONE:  # requests come first
            assert not page.is_visible("#charts")
            cut = "cells => cells.filter((cell) => cell.getBoundingClientRect().right > innerWidth).length"
            assert page.locator("#replicas td").evaluate_all(cut) == 0
        (silent, *_) = running.replicas
        running.named = [address for address in running.named if address.name != silent]
        page.wait_for_selector("#tiles div:has-text('Replicas') dd:text-is('1 of 1')")
        assert page.locator("#replicas tr").count() == 1
        page.goto("about:blank")


@pytest.mark.browser
@pytest.mark.plugin("pages")
def test_the_page_of_a_request_says_why_its_replica_was_chosen(open_page: OpenPage) -> None:  # noqa: F811
    with fleet(None, 1) as running:
        request_id = running.ask().headers["x-request-id"]
        page = open_page(f"{running.http.base_url}/requests")
        page.goto(f"{running.http.base_url}/requests/{request_id}")
        (name,) = running.replicas
        why = f"{name}, as no replica was known to have a beginning of this prompt in its cache; load "
        page.locator("#account dd", has_text=why).wait_for()
        page.goto("about:blank")


@pytest.mark.browser
@pytest.mark.plugin("pages")
def test_only_the_requests_of_replicas_with_keys_need_a_key(open_page: OpenPage) -> None:  # noqa: F811
    server = replace(BEHIND_A_GATEWAY, api_key=("secret",))
    with fleet(None, 1, server=server, route=RouteOptions(replica_key="secret")) as running:
        running.ask(headers={"authorization": "Bearer secret"})
        page = open_page(f"{running.http.base_url}/dashboard", may_log=True)
        page.wait_for_selector("#replicas tr")
        page.click("#enter-key")
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        page.wait_for_selector("#requests a")
        assert page.is_hidden("#needs-key")
        page.goto("about:blank")
