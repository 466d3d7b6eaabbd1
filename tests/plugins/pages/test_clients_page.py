"""Tests the page of clients in a real Chromium."""

from __future__ import annotations

import pytest

from oaiserve.facts.record import EngineAccount, OthersTime, Whose
from tests.e2e.browser import DESK, PHONE, OpenPage, check_texts_and_controls
from tests.records import MS, record_at
from tests.serving import Served

pytestmark = pytest.mark.browser


@pytest.mark.parametrize(("scheme", "viewport"), [("light", DESK), ("dark", PHONE)], ids=["light", "dark on a phone"])
def test_who_made_others_wait_comes_first_with_the_command_that_ends_it(
    served_on_a_port: Served, open_page: OpenPage, scheme: str, viewport: dict[str, int]
) -> None:
    waited = [OthersTime(Whose.OTHER_CLIENT, "batchjob", 5900 * MS, 0, 0)]
    for client, machine_ms, others in (("alice", 40, waited), ("batchjob", 900, []), (None, 20, [])):
        account = EngineAccount(machine_ns=machine_ms * MS, kv_byte_seconds=2e9, others_ns={"queue": others})
        served_on_a_port.telemetry.clients.add(record_at(0, 0, 0, 0, 5, 6, 7, 8, client=client, account=account))
    page = open_page(f"{served_on_a_port.url}/clients", viewport, color_scheme=scheme)
    page.wait_for_selector("#client-rows tr")
    rows = [row.split() for row in page.locator("#client-rows tr").all_inner_texts()]
    assert [row[0] for row in rows] == ["batchjob", "alice", "without"]
    assert [word for word in rows[0] if word in ("5.9", "s")][:2] == ["5.9", "s"]
    assert "batchjob made others wait 5.9 s in all." in page.inner_text("#advice")
    assert "oaiserve keys limit batchjob --share 0.25" in page.inner_text("#commands")
    assert page.get_attribute("#client-rows a", "href").endswith("/requests?client=batchjob")
    check_texts_and_controls(page)
    with page.expect_request(lambda request: request.url.endswith("/debug/clients?seconds=60")):
        page.click("text=1 min")


def test_no_limit_of_requests_is_proposed_for_a_client_whose_requests_have_not_ended(
    served_on_a_port: Served, open_page: OpenPage
) -> None:
    """A limit of 0 would be none."""
    others = {"queue": [OthersTime(Whose.OTHER_CLIENT, "batchjob", 5900 * MS, 0, 0)]}
    account = EngineAccount(machine_ns=MS, others_ns=others)
    served_on_a_port.telemetry.clients.add(record_at(0, 0, 0, 0, 5, 6, 7, 8, client="alice", account=account))
    page = open_page(f"{served_on_a_port.url}/clients")
    page.wait_for_selector("#commands code")
    assert page.locator("#commands code").all_inner_texts() == ["oaiserve keys limit batchjob --share 0.25"]
