"""The views that plug-ins bring: each needs its plug-in and the frame of the pages, and no page names a missing one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from oaiserve.app import create_app
from oaiserve.config import Config
from oaiserve.plugin import Plugin
from oaiserve.plugin.parts import InnerParts
from oaiserve.plugin_loading import own_plugins
from oaiserve.routes.pages import Pages, View
from tests.routes.doubles import FakeEngine, FakeTelemetry


def client_of(*plugins: Plugin, without: str = "") -> TestClient:
    """Return a client of a server with these plug-ins, and those of oaiserve without one."""
    parts = [*(each for each in own_plugins() if each.name != without), *plugins]
    app = create_app(Config("demo"), FakeEngine(), FakeTelemetry(), plugins=parts)
    return TestClient(app, base_url="http://127.0.0.1")


@pytest.mark.plugin("runs", "inspector")
@pytest.mark.parametrize(("without", "sign"), [("runs", 'href="../runs"'), ("inspector", "inspector.css")])
def test_the_page_of_a_request_names_nothing_of_a_plugin_that_is_missing(without: str, sign: str) -> None:
    with client_of() as client:
        assert sign in client.get("/requests/x").text
    with client_of(without=without) as client:
        page = client.get("/requests/x").text
        assert sign not in page
        assert "<slot" not in page
        assert client.get(f"/dashboard/static/{without}.css").status_code == 404


@pytest.mark.plugin("runs", "inspector")
def test_without_the_pages_their_plugins_serve_json_and_no_view() -> None:
    with client_of(without="pages") as client:
        assert client.get("/debug/runs").json() == {"runs": []}
        assert "--inspect" in client.get("/debug/requests/x/tokens").json()["error"]["message"]
        assert client.get("/runs").status_code == client.get("/dashboard/static/runs.js").status_code == 404


@pytest.mark.plugin("runs")
def test_the_chat_has_the_links_of_all_pages() -> None:
    with client_of() as client:
        chat = client.get("/", headers={"accept": "text/html"}).text
        links = re.findall(r'<a href="\./(\w+)" data-shows-requests>', client.get("/dashboard/static/frame.html").text)
    assert {"dashboard", "requests", "runs"} <= {*links}
    assert re.findall(r'<a href="\./(\w+)" data-shows-requests>', chat) == links
    assert "<slot" not in chat


@pytest.mark.parametrize(
    ("pages", "problem"),
    [
        (Pages(views=[View(path="/bills", file="bills.html", summary="Bills.")]), "the file 'bills.html'"),
        (Pages(parts=[("request.html", "bill.html")]), "the file 'bill.html'"),
        (Pages(folders=[Path("/nowhere/static")]), "'/nowhere/static' is not a folder"),
        (Pages(views=[View(path="bills", file="bills.html", summary="Bills.")]), "but got 'bills'"),
    ],
    ids=["view without file", "part without file", "missing folder", "path without slash"],
)
def test_pages_that_cannot_be_shown_are_named_in_the_log_and_the_others_answer(
    pages: Pages, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    with client_of(Plugin(name="bills", inner=InnerParts(pages=lambda: pages))) as client:
        assert client.get("/bills").status_code == 404
        assert client.get("/dashboard").status_code == client.get("/requests/x").status_code == 200
    assert "Plug-in 'bills' could not make its pages, and has none" in caplog.messages
    assert problem in caplog.text


def test_a_page_without_an_empty_line_after_its_head_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bills.html").write_text("<main>Bills</main>")
    views = [View(path="/bills", file="bills.html", summary="Bills.")]
    with client_of(
        Plugin(name="bills", inner=InnerParts(pages=lambda: Pages(views=views, folders=[tmp_path])))
    ) as client:
        assert client.get("/bills").status_code == 404
        assert client.get("/dashboard").status_code == 200
    assert "bills.html' needs an empty line" in caplog.text


def test_a_view_with_the_file_of_another_plugin_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "live.html").write_text("<title>Mine</title>\n\n<main>Mine</main>")
    views = [View(path="/mine", file="live.html", summary="Mine.")]
    with client_of(
        Plugin(name="mine", inner=InnerParts(pages=lambda: Pages(views=views, folders=[tmp_path])))
    ) as client:
        assert client.get("/mine").status_code == 404
        page = client.get("/dashboard").text
    assert page.count("<body>") == 1
    assert "live.js" in page
    assert "Plug-in 'mine' could not make its pages, and has none" in caplog.messages
    assert "Another plug-in has a file 'live.html', too" in caplog.text


def test_two_views_may_share_a_file(tmp_path: Path) -> None:
    (tmp_path / "bills.html").write_text("<title>Bills</title>\n\n<main>Bills</main>")
    views = [View(path=path, file="bills.html", summary="Bills.") for path in ("/bills", "/bills/{year}")]
    with client_of(
        Plugin(name="bills", inner=InnerParts(pages=lambda: Pages(views=views, folders=[tmp_path])))
    ) as client:
        pages = [client.get(path).text for path in ("/bills", "/bills/2026")]
    assert [page.count("<body>") for page in pages] == [1, 1]
    assert 'href="./docs"' in pages[0]
    assert 'href="../docs"' in pages[1]


def test_a_view_of_any_plugin_has_the_frame_and_its_file(tmp_path: Path) -> None:
    (tmp_path / "bills.html").write_text(
        '<link rel="stylesheet" href="./dashboard/static/bills.css">\n\n<main>Bills</main>'
    )
    (tmp_path / "bills.css").write_text("main { color: red }")
    (tmp_path / "base.css").write_text("replaces no file of the pages")
    views = [
        View(path="/bills/{year}", file="bills.html", summary="Bills."),
        View(path="/sums", file="sums.html", summary="Sums.", link="Sums & more"),
    ]
    (tmp_path / "sums.html").write_text("<title>Sums</title>\n\n<main>Sums</main>")
    plugin = Plugin(name="bills", inner=InnerParts(pages=lambda: Pages(views=views, folders=[tmp_path])))
    with client_of(plugin) as client:
        page = client.get("/bills/2026").text
        assert "<main>Bills</main>" in page
        assert 'href="../dashboard/static/bills.css"' in page
        assert '<a href="../sums" data-shows-requests>Sums &amp; more</a>' in page
        assert 'href="./sums" aria-current="page"' in client.get("/sums").text
        assert client.get("/dashboard/static/bills.css").text == "main { color: red }"
        assert "replaces" not in client.get("/dashboard/static/base.css").text
