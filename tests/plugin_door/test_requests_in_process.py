"""Requests of plug-ins to the server that they are in."""

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.errors import Overloaded
from oaiserve.facts.record import Outcome
from oaiserve.plugin import APIError, Plugin, Server
from tests.routes.doubles import FakeEngine, FakeTelemetry, fails, starts
from tests.world.serving import Place, WorldServed

COMPLETION = {"prompt": "Say hello", "max_tokens": 3}
KEY = {"authorization": "Bearer secret"}


async def hello(request: Request) -> Response:
    """Ask for a completion: for the client, or with ?alone for nobody."""
    on_behalf = None if "alone" in request.query_params else request
    answer = await Server(request.app).ask("/v1/completions", COMPLETION, request=on_behalf)
    return JSONResponse(answer["choices"][0]["text"])


async def hello_in_pieces(request: Request) -> Response:
    async def pieces() -> AsyncIterator[str]:
        async for event in Server(request.app).stream("/v1/completions", COMPLETION, request=request):
            for choice in event["choices"]:
                yield choice["text"] + "|"

    return StreamingResponse(pieces())


async def first_piece(request: Request) -> Response:
    async with aclosing(Server(request.app).stream("/v1/completions", COMPLETION)) as events:
        async for event in events:
            return JSONResponse(event["choices"][0]["text"])
    return JSONResponse(None)


async def wrong(request: Request) -> Response:
    """Ask a route with a body that it refuses, or for one that there is not."""
    path = request.query_params["path"]
    try:
        await Server(request.app).ask(path, {"prompt": "Hi", "temperature": 9})
    except APIError as error:
        if "catch" in request.query_params:
            return JSONResponse([error.status, error.code, error.param, error.type, error.message])
        raise
    return JSONResponse(None)


async def texts(request: Request) -> Response:
    """Return the texts of a stream, and the error that ends it."""
    seen = []
    try:
        async for event in Server(request.app).stream("/v1/completions", COMPLETION):
            seen += [choice["text"] for choice in event["choices"]]
    except APIError as error:
        seen.append(error.message)
    return JSONResponse(seen)


async def tokens(request: Request) -> Response:
    server = Server(request.app)
    ids = await server.tokenize("abc")
    return JSONResponse([ids, await server.detokenize(ids), server.model_names, server.max_model_len])


ENDPOINTS = (hello, hello_in_pieces, first_piece, wrong, texts, tokens)
ROUTES = [Route(f"/x/{route.__name__}", route) for route in ENDPOINTS]
PLUGIN = Plugin(name="asking", routes=lambda config: ROUTES)


@contextmanager
def asking(place: Place, **options: Any) -> Iterator[WorldServed]:
    config = Config("org/demo", ServerOptions(drain_timeout_seconds=0, **options))
    engine = FakeEngine(runtime=place.world)
    telemetry = FakeTelemetry(place.world)
    app = create_app(config, engine, telemetry, plugins=[PLUGIN], runtime=place.world)  # type: ignore[arg-type]
    with place.running(app, config.server) as url, place.plain(url) as http:
        yield WorldServed(url, engine, telemetry, http, place=place)  # type: ignore[arg-type]


def test_a_route_asks_for_its_client_with_its_key_and_an_account_of_its_own(place: Place) -> None:
    with asking(place, api_key=("secret",)) as served:
        assert served.http.get("/x/hello").status_code == 401
        assert served.http.get("/x/hello", headers=KEY).json() == "Hello world"
        record = served.telemetry.next_record()
        assert (record.client, record.operation, record.outcome) == ("key-1", "text_completion", Outcome.FINISHED)


def test_a_request_for_nobody_is_of_the_plugins(place: Place) -> None:
    with asking(place) as served:
        assert served.http.get("/x/hello?alone").json() == "Hello world"
        assert served.telemetry.next_record().client == "plug-ins"


def test_a_stream_arrives_in_its_pieces(place: Place) -> None:
    with asking(place) as served:
        assert served.http.get("/x/hello_in_pieces").text.replace("|", "") == "Hello world"


def test_a_stream_that_is_left_is_aborted(place: Place) -> None:
    with asking(place) as served:
        served.engine.script = starts("Hello")
        assert served.http.get("/x/first_piece").json() == "Hello"
        assert served.engine.aborted.get() == served.engine.submitted.get().request_id
        assert served.telemetry.next_record().outcome is Outcome.CANCELLED


def test_a_client_that_leaves_takes_its_request_with_it(place: Place) -> None:
    with asking(place) as served:
        served.engine.script = starts("Hello")
        with served.connect() as socket:
            socket.sendall(b"GET /x/hello HTTP/1.1\r\nhost: localhost\r\n\r\n")
            submitted = served.engine.submitted.get()
        assert served.engine.aborted.get() == submitted.request_id
        assert served.telemetry.next_record().outcome is Outcome.CANCELLED


def test_an_error_keeps_its_status_and_its_words(place: Place) -> None:
    with asking(place) as served:
        caught = served.http.get("/x/wrong?path=/v1/completions&catch=1").json()
        answered = served.http.get("/x/wrong?path=/v1/completions")
    assert caught[:4] == [400, None, "temperature", "invalid_request_error"]
    error = answered.json()["error"]
    assert (answered.status_code, error["message"], error["param"]) == (400, caught[4], "temperature")


def test_a_route_that_does_not_exist_is_named(place: Place) -> None:
    with asking(place) as served:
        status, _, _, _, message = served.http.get("/x/wrong?path=/v1/nothing&catch=1").json()
    assert (status, message) == (404, "This server has no route POST /v1/nothing.")


def test_an_error_in_a_stream_is_raised_after_its_pieces(place: Place) -> None:
    with asking(place) as served:
        served.engine.script = fails(Overloaded("There is no room left."), "Hello")
        assert served.http.get("/x/texts").json() == ["Hello", "There is no room left."]


def test_texts_and_tokens(place: Place) -> None:
    with asking(place) as served:
        ids, text, names, max_model_len = served.http.get("/x/tokens").json()
    assert (text, names, max_model_len) == ("abc", ["org/demo"], 4096)
    assert ids
