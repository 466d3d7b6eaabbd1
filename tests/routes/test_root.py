"""What / answers on servers with pages and without any, and which clients get HTML."""

import pytest

from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.routes.answer.document import prefers_html
from tests.routes.doubles import FakeEngine, FakeTelemetry
from tests.world.serving import Place


def test_without_pages_browsers_get_links_and_no_answer_names_a_page(place: Place) -> None:
    config = Config("demo", ServerOptions(api_key=("secret",)))
    engine = FakeEngine(runtime=place.world)
    app = create_app(config, engine, FakeTelemetry(place.world), plugins=[], runtime=place.world)
    key = {"authorization": "Bearer secret"}
    with place.running(app) as url, place.client_of(url) as http:
        shown = http.get("/", headers={"accept": "text/html"})
        completed = http.post("/v1/completions", json={"prompt": "Hi"}, headers=key)
        pages = [http.get(f"/{path}", headers=key) for path in ("docs", "dashboard", "requests/x", "favicon.ico")]
        schema = http.get("/openapi.json").json()
    assert shown.json()["links"].keys() == {"api", "models", "health", "metrics", "schema"}
    assert completed.status_code == 200
    assert "link" not in completed.headers
    assert [page.status_code for page in pages] == [404] * 4
    assert not {"/docs", "/dashboard", "/requests"} & schema["paths"].keys()


@pytest.mark.parametrize(
    ("accept", "is_html"),
    [
        ("", False),
        ("*/*", False),
        ("text/html", True),
        ("text/*", True),
        ("text/html, */*;q=0.5", True),
        ("application/json, text/html", False),
        ("application/json;q=0.5, text/html;q=0.9", True),
        ("application/json, text/html;q=0.9", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", True),
        ("TEXT/HTML; Q=1", True),
        ("text/html;q=high", False),
        ("text/html;q=0, */*", False),
        (",;,", False),
    ],
)
def test_the_accept_header_decides_between_html_and_json(accept: str, is_html: bool) -> None:
    assert prefers_html(accept) == is_html
