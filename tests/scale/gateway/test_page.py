"""Tests the gateway's page of its fleet: what it tells, to whom, and in a real Chromium."""

from typing import Any

import pytest

from oaiserve.config import RouteOptions
from tests.e2e.browser import DESK, PHONE, OpenPage, browser, fits_the_width, open_page, walk_to, weak_contrasts  # noqa: F401
from tests.scale.gateway.doubles import fleet
from tests.waiting import wait_until


def test_the_page_tells_numbers_and_states_of_replicas_and_no_addresses() -> None:
    with fleet(2) as running:
        (first, second) = running.replicas
        for number in range(6):
            assert running.ask(f"{number}").status_code == 200
        running.watch.exclude(first, "a test")
        running.watch.upstreams[first].out_until_ns = 2**62
        got = running.http.get("/dashboard/fleet")
        assert (got.status_code, got.headers["cache-control"]) == (200, "no-store")
        told: dict[str, Any] = got.json()
        assert told["requests"]["answered"] == 6
        assert told["continued"] == {"alike": 0, "unlike": 0, "failed": 0}
        assert [replica["number"] for replica in told["replicas"]] == [1, 2]
        states = {replica["number"]: replica["state"] for replica in told["replicas"]}
        assert states[running.watch.upstreams[first].number] == "left out, as its requests failed"
        assert states[running.watch.upstreams[second].number] == "takes requests"
        assert sum(replica["num_sent"] for replica in told["replicas"]) == 6
        assert all(replica["models"] == ["m"] and replica["num_running"] == 0 for replica in told["replicas"])
        for path in ("/dashboard/fleet", "/dashboard", "/"):
            assert not [name for name in running.replicas if name in running.http.get(path).text]
        html = {"accept": "text/html,*/*;q=0.8"}
        assert "chat-form" in running.http.get("/", headers=html).text
        assert running.http.get("/").json()["links"]["page"] == "dashboard"
        assert running.http.get("/dashboard/feed").status_code == 404


def test_the_page_is_for_this_machine_or_where_it_is_opened() -> None:
    for route, status in (
        (RouteOptions(host="0.0.0.0"), 404),
        (RouteOptions(host="0.0.0.0", open_dashboard=True), 200),
    ):
        with fleet(1, route=route) as running:
            for path in ("/dashboard", "/dashboard/fleet"):
                assert running.http.get(path).status_code == status
            assert ("--open-dashboard" in running.http.get("/dashboard").text) == (status == 404)


@pytest.mark.browser
@pytest.mark.parametrize(("scheme", "viewport"), [("light", DESK), ("dark", PHONE)], ids=["light", "dark on a phone"])
def test_the_page_follows_the_fleet(open_page: OpenPage, scheme: str, viewport: dict[str, int]) -> None:  # noqa: F811
    with fleet(2) as running:
        page = open_page(f"{running.http.base_url}/dashboard", viewport, color_scheme=scheme)
        page.wait_for_selector("#status[data-state=live]")
        for number in range(3):
            running.ask(f"{number}")
        page.wait_for_selector("#tiles div:has-text('Requests') dd:text-is('3')")
        (silent, *_) = running.replicas
        running.named = [address for address in running.named if address.name != silent]
        wait_until(lambda: silent not in running.watch.upstreams)
        page.wait_for_selector("#tiles div:has-text('Replicas') dd:text-is('1 of 1')")
        assert page.locator("#replicas tr").count() == 1
        assert weak_contrasts(page, least_texts=10) == []
        assert fits_the_width(page)
        walk_to(page, ".scroll")
        assert page.evaluate("() => document.activeElement.className") == "scroll"
        page.goto("about:blank")
