"""Tests the pages: their files, the conditions under which it is served, and the feed that all viewers share."""

import asyncio
import json
import re
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
from starlette.applications import Starlette
from starlette.types import Message

from oaiserve.app import create_app, routes
from oaiserve.config import Config, EngineOptions, ServerOptions
from oaiserve.engine.types.pooling import Pooling
from oaiserve.plugin_loading import own_plugins, pages_of
from oaiserve.plugins.pages.files import page_files
from oaiserve.plugins.shared.feed import MOST_VIEWERS
from tests.routes.asking import refused
from tests.routes.doubles import FakeEngine, FakeTelemetry
from tests.serving import Serve, Served

KEY = "secret"


def messages(response: httpx.Response) -> Any:
    event = ""
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        if name == "event":
            event = value
        elif name == "data":
            yield event, json.loads(value)


BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
FILES = page_files(pages_of(own_plugins()))
PAGES = ("/", "/dashboard", "/requests", "/requests/req-1", "/clients", "/docs")


@pytest.mark.parametrize("path", PAGES)
def test_a_page_names_only_files_and_pages_that_are_served(served: Served, path: str) -> None:
    page = served.http.get(path, headers=BROWSER)
    assert page.headers["content-type"].startswith("text/html")
    named = re.findall(r'(?:href|src)="([^#"]+)"', page.text)
    assert {urljoin(path, name) for name in named} >= {"/", "/dashboard", "/requests", "/docs"}
    for name in named:
        assert served.http.get(urljoin(path, name)).status_code == 200
    assert "://" not in page.text  # nothing from the internet


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith(("uplot", "markdown-it", "highlight"))])
def test_all_addresses_in_the_page_are_relative(name: str) -> None:
    """Relative addresses let a proxy serve the page under any prefix."""
    assert re.findall(r"""["'`(=]/\w[^"'`]*""", FILES[name].content.decode()) == []


def test_an_address_with_a_slash_at_its_end_is_redirected(served: Served) -> None:
    """With a slash at the end, the relative addresses of the page would resolve to something else."""
    answer = served.http.get("/dashboard/")
    assert answer.status_code == 308
    assert urljoin("http://host/llm/dashboard/", answer.headers["location"]) == "http://host/llm/dashboard"
    assert served.http.get("/dashboard//").headers["location"] == "../../dashboard"
    assert served.http.get("/requests/req-1/").headers["location"] == "../req-1"


def test_the_root_is_the_chat_for_browsers_and_links_for_others(serve: Serve) -> None:
    served = serve(api_key=(KEY,), guard_all=True)
    chat = served.http.get("/", headers=BROWSER)
    assert (chat.status_code, chat.headers["vary"]) == (200, "accept")
    root = served.http.get("/").json()
    assert root["needs_key"]
    assert "version" not in root  # --guard-all
    served = serve()
    root = served.http.get("/").json()
    assert root.keys() == {"name", "version", "links", "needs_key"}
    assert not root["needs_key"]
    known = {"authorization": f"Bearer {KEY}"}
    for link in (root["links"][name] for name in ("models", "schema", "health", "metrics", "page")):
        assert served.http.get(link, headers=known).status_code == 200
    served.engine.pooling = Pooling("embed", 4)
    docs = served.http.get("/", headers=BROWSER)
    assert (docs.status_code, docs.headers["location"]) == (307, "docs")


def test_an_opened_dashboard_opens_debug_but_not_the_loading_of_adapters(serve: Serve) -> None:
    served = serve(host="0.0.0.0", open_dashboard=True)
    for path in ("/dashboard", "/debug/requests", "/debug/report"):
        assert served.http.get(path).status_code == 200
    config = Config("demo", ServerOptions(host="0.0.0.0", open_dashboard=True), EngineOptions(lora_dir=Path(".")))
    (load,) = (route for route in routes(config) if route.path == "/v1/load_lora_adapter")
    assert vars(load.endpoint)["is_closed"]


@pytest.mark.parametrize("path", PAGES)
def test_no_page_allows_or_has_inline_scripts_and_styles(served: Served, path: str) -> None:
    page = served.http.get(path, headers=BROWSER)
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "style=" not in page.text
    assert "<script>" not in page.text


def test_a_file_that_has_not_changed_is_not_sent_again(served: Served) -> None:
    first = served.http.get("/dashboard/static/base.css")
    again = served.http.get("/dashboard/static/base.css", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "%2e%2e%2fdashboard.py", "..%2f__init__.py"])
def test_other_files_are_not_found(served: Served, name: str) -> None:
    assert served.http.get(f"/dashboard/static/{name}").status_code == 404


@pytest.mark.parametrize(
    ("library", "licence"),
    [
        *(("uplot", "MIT License"), ("temml", "MIT License")),
        *(("markdown-it", "Vitaly Puzrin"), ("highlight", "BSD 3-Clause License")),
    ],
)
def test_the_libraries_ship_with_their_licences(library: str, licence: str) -> None:
    assert licence in FILES[f"{library}.LICENSE.txt"].content.decode()
    assert library in FILES[f"{library}.js"].content[:200].decode().lower()


@pytest.mark.parametrize(
    ("options", "is_there"),
    [
        (ServerOptions(host="127.0.0.1"), True),
        (ServerOptions(host="0.0.0.0"), False),
        (ServerOptions(host="0.0.0.0", open_dashboard=True), True),
        (ServerOptions(host="0.0.0.0", api_key=(KEY,)), True),
    ],
)
def test_the_dashboard_is_served_on_loopback_with_a_key_or_where_it_is_opened(
    options: ServerOptions, is_there: bool
) -> None:
    assert ("/dashboard/feed" in {route.path for route in routes(Config("demo", options))}) == is_there


@pytest.mark.parametrize(
    "path", ["/dashboard", "/requests", "/requests/req-1", "/clients", "/debug/requests", "/debug/clients"]
)
def test_a_server_that_shows_no_requests_says_why(serve: Serve, path: str) -> None:
    answer = serve(host="0.0.0.0").http.get(path)  # the server of the tests listens on 127.0.0.1 all the same
    refused(answer, None, "--api-key", status=404)


def test_a_server_that_shows_no_requests_has_the_pages_without_any(serve: Serve) -> None:
    http = serve(host="0.0.0.0").http
    assert "page" not in http.get("/").json()["links"]
    for path in ("/", "/docs", "/favicon.ico", "/dashboard/static/base.css"):
        assert http.get(path, headers=BROWSER).status_code == 200


def test_the_feed_has_the_same_numbers_as_debug_requests(served: Served) -> None:
    served.chat(stream=True).read()
    served.telemetry.next_record()
    entry = served.http.get("/debug/requests?limit=1").json()["requests"][0]
    with served.http.stream("GET", "/dashboard/feed") as feed:
        assert feed.headers["content-type"].startswith("text/event-stream")
        (hello, first), (update, second) = islice(messages(feed), 2)
    assert (hello, update) == ("hello", "update")
    assert first["model"] == "org/demo"
    assert {"time_to_first_token", "inter_token", "duration"} == first["boundaries_seconds"].keys()
    assert second.keys() <= first.keys()  # the page reads both alike
    for message in (first, second):
        row = message["requests"][0]
        assert [phase[:2] for phase in row["phases"]] == [
            [phase["name"], phase["duration_ns"]] for phase in entry["phases"]
        ]
        assert all(row[name] == entry[name] for name in row.keys() - {"phases"})


def test_a_feed_ends_when_the_server_shuts_down(served: Served) -> None:
    with served.http.stream("GET", "/dashboard/feed") as feed:
        events = messages(feed)
        next(events)
        served.engine.drain()
        assert len(list(events)) <= 1


def test_the_feed_answers_head(served: Served) -> None:
    assert served.http.head("/dashboard/feed").headers["content-type"].startswith("text/event-stream")


class Viewer:
    """A client that opens the feed of an app, and leaves once `leaving` is set."""

    def __init__(self, app: Starlette) -> None:
        self.answered = asyncio.Event()
        self.leaving = asyncio.Event()
        self.start: Message = {}
        self.body = b""
        scope = {"type": "http", "http_version": "1.1", "method": "GET", "path": "/dashboard/feed", "query_string": b""}
        scope["headers"] = [(b"host", b"localhost")]
        self.task = asyncio.create_task(app(scope, self.receive, self.send))

    async def receive(self) -> Message:
        await self.leaving.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
        else:
            self.body += message["body"]
            self.answered.set()

    @property
    async def status(self) -> int:
        await self.answered.wait()
        return self.start["status"]


async def test_the_number_of_viewers_is_limited_and_a_viewer_that_leaves_frees_its_place() -> None:
    app = create_app(Config("org/demo"), FakeEngine(), FakeTelemetry())
    async with app.router.lifespan_context(app):
        viewers = [Viewer(app) for _ in range(1000)]
        statuses = [await viewer.status for viewer in viewers]
        assert statuses == [200] * MOST_VIEWERS + [429] * (1000 - MOST_VIEWERS)
        refused = viewers[-1]
        assert (b"retry-after", b"10") in refused.start["headers"]
        said = json.loads(refused.body)["error"]["message"]
        assert said.startswith(f"{MOST_VIEWERS} viewers follow the dashboard already")
        viewers[0].leaving.set()
        await viewers[0].task
        viewers[1].task.cancel()
        await asyncio.wait([viewers[1].task])
        late = [Viewer(app) for _ in range(3)]
        assert [await viewer.status for viewer in late] == [200, 200, 429]
        for viewer in (*viewers, *late):
            viewer.leaving.set()
        await asyncio.wait([viewer.task for viewer in (*viewers, *late)])
