"""/dashboard: who gets it, its files, and the feed: one producer for all viewers, and none without."""

from __future__ import annotations

import asyncio
import json
import threading
from itertools import count, islice
from typing import Any

import httpx
import pytest

from oaiserve.app import routes
from oaiserve.config import Config, ServerOptions
from oaiserve.routes.dashboard import page_files
from oaiserve.routes.feed import Feed
from tests.routes.conftest import Serve, Served

KEY = "secret"


def messages(response: httpx.Response) -> Any:
    event = ""
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        if name == "event":
            event = value
        elif name == "data":
            yield event, json.loads(value)


def test_the_page_names_only_files_that_are_served(served: Served) -> None:
    page = served.http.get("/dashboard")
    assert page.headers["content-type"].startswith("text/html")
    named = [part.split('"')[0] for part in page.text.split('"/dashboard/static/')[1:]]
    assert len(named) >= 4
    for name in named:
        assert served.http.get(f"/dashboard/static/{name}").status_code == 200
    assert "://" not in page.text  # nothing from the internet


def test_modules_import_only_files_that_are_served() -> None:
    for name, file in page_files().items():
        if name.endswith(".js") and name != "uplot.js":
            imported = [
                line.split('"./')[1].split('"')[0] for line in file.content.decode().splitlines() if '"./' in line
            ]
            assert set(imported) <= page_files().keys()


def test_nothing_inline_is_allowed_or_there(served: Served) -> None:
    page = served.http.get("/dashboard")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "style=" not in page.text
    assert "<script>" not in page.text


def test_a_file_that_is_the_same_is_not_sent_again(served: Served) -> None:
    first = served.http.get("/dashboard/static/app.js")
    again = served.http.get("/dashboard/static/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "%2e%2e%2fdashboard.py", "..%2f__init__.py"])
def test_other_files_are_not_found(served: Served, name: str) -> None:
    assert served.http.get(f"/dashboard/static/{name}").status_code == 404


def test_the_chart_library_ships_with_its_licence() -> None:
    assert b"MIT License" in page_files()["uplot.LICENSE.txt"].content
    assert "uPlot" in page_files()["uplot.js"].content[:200].decode()


@pytest.mark.parametrize(
    ("options", "is_there"),
    [
        (ServerOptions(host="127.0.0.1"), True),
        (ServerOptions(host="0.0.0.0"), False),
        (ServerOptions(host="0.0.0.0", api_key=(KEY,)), True),
    ],
)
def test_it_is_there_on_loopback_or_with_a_key(options: ServerOptions, is_there: bool) -> None:
    assert ("/dashboard/feed" in {route.path for route in routes(Config("demo", options))}) == is_there


@pytest.mark.parametrize("guard_all", [False, True])
def test_with_a_key_the_page_is_open_and_the_feed_is_not(serve: Serve, guard_all: bool) -> None:
    served = serve(api_key=(KEY,), guard_all=guard_all)
    assert served.http.get("/dashboard").status_code == 200
    assert served.http.get("/dashboard/static/app.js").status_code == 200
    assert served.http.get("/dashboard/feed").status_code == 401
    assert served.http.get("/dashboard/static/../feed").status_code == 401
    with served.http.stream("GET", "/dashboard/feed", headers={"authorization": f"Bearer {KEY}"}) as feed:
        assert feed.status_code == 200
        assert next(messages(feed))[0] == "hello"


def test_the_feed_has_what_debug_requests_has(served: Served) -> None:
    served.chat(stream=True).read()
    served.telemetry.next_record()
    entry = served.http.get("/debug/requests?limit=1").json()["requests"][0]
    with served.http.stream("GET", "/dashboard/feed") as feed:
        assert feed.headers["content-type"].startswith("text/event-stream")
        (hello, first), (update, second) = islice(messages(feed), 2)
    assert (hello, update) == ("hello", "update")
    assert first["model"] == "org/demo"
    assert {"time_to_first_token", "inter_token", "duration"} == first["boundaries_seconds"].keys()
    for message in (first, second):
        row = message["requests"][0]
        assert row["phases"] == [[phase["name"], phase["duration_ns"]] for phase in entry["phases"]]
        assert all(row[name] == entry[name] for name in row.keys() - {"phases"})


def test_a_feed_ends_when_the_server_goes_down(served: Served) -> None:
    with served.http.stream("GET", "/dashboard/feed") as feed:
        found = messages(feed)
        next(found)
        served.engine.drain()
        assert len(list(found)) <= 1


def test_viewers_share_each_message_and_nobody_watching_makes_none() -> None:
    made = count()
    threads = set()

    def render() -> bytes:
        threads.add(threading.get_ident())
        return str(next(made)).encode()

    async def watch() -> None:
        feed = Feed(render, interval_seconds=0)
        for number in range(3):
            assert await asyncio.gather(*(feed.next() for _ in range(5))) == [str(number).encode()] * 5
        producer = feed._producer
        assert producer is not None
        await producer  # which ends by itself
        assert next(made) == 3
        assert await feed.next() == b"4"  # and begins again
        await feed.close()

    asyncio.run(asyncio.wait_for(watch(), 10))
    assert threading.get_ident() not in threads


def test_viewers_are_told_of_a_failure_and_the_next_one_starts_anew() -> None:
    answers = iter([ValueError("no"), b"yes"])

    def render() -> bytes:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def watch() -> None:
        feed = Feed(render, interval_seconds=0)
        with pytest.raises(ValueError, match="no"):
            await feed.next()
        await asyncio.sleep(0)
        assert await feed.next() == b"yes"
        await feed.close()

    asyncio.run(asyncio.wait_for(watch(), 10))
