"""The front of several models: its page, and what it lacks where others reach it and there is no key."""

from __future__ import annotations

import httpx
import pytest

from oaiserve.config import Config, ModelsOptions, ServerOptions
from oaiserve.scale.several.app import create_app
from tests.routes.conftest import RunningServer


@pytest.mark.parametrize(("is_open", "status"), [(False, 404), (True, 200)])
def test_nothing_of_the_page_is_passed_on_where_the_page_is_closed(is_open: bool, status: int) -> None:
    options = ServerOptions(host="0.0.0.0", open_dashboard=is_open, drain_timeout_seconds=0)
    configs = {name: Config("demo", options) for name in ("one", "two")}
    app, _, _ = create_app(options, configs, ModelsOptions(load_on_demand=True))  # so that nothing is loaded
    with RunningServer(app, options) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        for path in ("/dashboard", "/dashboard/static/app.js"):
            assert http.get(path).status_code == status
        for path in ("/dashboard/feed", "/debug/requests", "/debug/report", "/debug/requests/x"):
            answer = http.get(path)
            assert answer.status_code == (503 if is_open else 404)
            assert ("--open-dashboard" in answer.text) != is_open
        assert ("page" in http.get("/").json()["links"]) == is_open
