"""Tests /openapi.json: it has every route, it is valid, and it says what the server does."""

import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from starlette.requests import Request

from oaiserve.app import routes
from oaiserve.config import Config, ServerOptions
from oaiserve.engine.types.pooling import Pooling
from oaiserve.errors import APIError
from oaiserve.routes import openapi
from oaiserve.routes.intake.body_types import ChatBody, CompletionBody
from oaiserve.routes.intake.parameters import ranges
from oaiserve.routes.openapi import STATUSES, document
from oaiserve.routes.operation import operation_of
from tests.missing_plugins import has_plugin, is_served
from tests.published import CheckedStream, check, check_events, everything, operation, published
from tests.routes.doubles import pools
from tests.serving import Serve, Served
from tests.world.loop import World

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EVERYTHING = everything()


def walk(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk(inner)


def test_every_route_says_what_it_takes_and_what_it_answers() -> None:
    every = routes(EVERYTHING)
    described = {route.path for route in every if operation_of(route.endpoint) is not None}
    # OpenAPI has no WebSockets, so the GET that begins one is not described, but the POST of the same path is.
    assert {route.path for route in every} == described


def test_the_document_is_served_as_json(served: Served) -> None:
    response = served.http.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    served_document = response.json()
    assert served_document["openapi"] == "3.1.0"
    assert "/v1/chat/completions" in served_document["paths"]


async def test_the_document_is_made_once_and_only_when_it_is_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(openapi, "document", lambda *args, **kwargs: calls.append(args) or {})
    (route,) = [route for route in routes(EVERYTHING) if route.path == "/openapi.json"]
    assert calls == []
    for _ in range(2):
        answer = await route.endpoint(Request({"type": "http", "headers": []}))
        assert answer.body == b"{}"
    assert len(calls) == 1


def test_browsers_get_the_document_indented(served: Served) -> None:
    compact = served.http.get("/openapi.json")
    indented = served.http.get("/openapi.json", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert (compact.text.count("\n"), indented.text.count("\n") > 1000) == (0, True)
    assert indented.headers["content-type"] == "application/json"
    assert compact.headers["vary"] == indented.headers["vary"] == "accept"
    assert indented.json() == compact.json()


def test_groups_of_routes_are_listed_in_their_order() -> None:
    named = [group["name"] for group in published()["tags"]]
    used = {described["tags"][0] for methods in published()["paths"].values() for described in methods.values()}
    assert named[:2] == ["Chat", "Completions"]
    assert sorted(named) == sorted(used)  # each route is in a group that the list has


def test_all_references_and_schemas_are_valid() -> None:
    whole = published()
    for part in walk(whole):
        if "$ref" in part:
            target: Any = whole
            for name in part["$ref"].removeprefix("#/").split("/"):
                target = target[name]
            assert target
    for schema in whole["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    ids = [target["operationId"] for methods in whole["paths"].values() for target in methods.values()]
    assert len(set(ids)) == len(ids)


def test_the_status_of_every_error_is_described() -> None:
    def statuses(kind: type[APIError]) -> set[int]:
        return {kind.status}.union(*map(statuses, kind.__subclasses__()))

    # 405 is for methods that are not published; 502 and 508 only a gateway answers.
    assert statuses(APIError) - {405, 502, 508} == STATUSES.keys()


def test_a_key_is_asked_for_where_the_document_says_so(serve: Serve) -> None:
    for guard_all in (False, True):
        served = serve(api_key=("secret",), guard_all=guard_all)
        headers = {"authorization": "Bearer secret"}
        for path, methods in served.http.get("/openapi.json", headers=headers).json()["paths"].items():
            for method, described in methods.items():
                with served.http.stream(method.upper(), path.replace("{name}", "live.js")) as response:
                    assert (response.status_code == 401) == (described["security"] == [{"api_key": []}]), path


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", ChatBody), ("/v1/completions", CompletionBody)])
def test_what_is_beyond_a_published_range_is_refused_and_its_ends_are_not(
    served: Served, path: str, body: type[ChatBody]
) -> None:
    schemas = published()["components"]["schemas"]
    fields_of_body = {"messages": [{"role": "user", "content": "Hi"}]} if body is ChatBody else {"prompt": "Hi"}
    fields = {"logprobs": True} if body is ChatBody else {}
    assert len(ranges(body)) >= 15
    for name, (low, high) in ranges(body).items():
        field = schemas[body.__name__]["properties"][name]
        assert (field["minimum"], field["maximum"]) == (low, high)
        for value, is_allowed in ((low - 1, False), (low, True), (high, True), (high + 1, False)):
            more = {"max_tokens": value} if name == "min_tokens" and is_allowed and value else {}
            more |= {"n": 1, "best_of": value} if name == "best_of" else {}
            response = served.post(path, **{**fields_of_body, **fields, **more, name: value})
            refused_for = None if response.status_code == 200 else response.json()["error"]["param"]
            assert (refused_for != name) is is_allowed, (name, value, response.text[:300])


# -- examples ---------------------------------------------------------------------------------------------------------


def bodies() -> Iterator[tuple[str, str, str]]:
    """Yield each body that the documentation sends with curl: the page, the path and the JSON."""
    for page in PAGES:
        for call in re.findall(r"curl (?:[^\n]*\\\n)*[^\n]*", page.read_text()):
            path = re.search(r"http://[\w.]+:\d+(/[\w/]+)", call)
            data = re.search(r"-d '(.*)'", call, re.DOTALL)
            if path is not None and data is not None:
                yield page.name, path[1], data[1]


def answers() -> Iterator[tuple[str, str]]:
    """Yield each whole answer and each stream that the documentation shows: the page and the text."""
    for page in PAGES:
        text = page.read_text()
        for answer in re.findall(r'^\{"id":"\w+-[^\n]*$', text, re.MULTILINE):
            yield page.name, answer
        for stream in re.findall(r"(?:^data: [^\n]*\n\n)+data: \[DONE\]\n", text, re.MULTILINE):
            yield page.name, stream + "\n"


SCHEMAS = {
    "chat.completion": "ChatCompletion",
    "chat.completion.chunk": "ChatCompletionChunk",
    "text_completion": "Completion",
}


@pytest.mark.parametrize(("page", "path", "body"), list(bodies()))
def test_each_documented_body_has_the_schema_of_its_route(page: str, path: str, body: str) -> None:
    description = operation("POST", path)
    assert description is not None
    check(
        json.loads(body), description["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    )


@pytest.mark.parametrize(("page", "answer"), list(answers()))
def test_each_documented_answer_has_its_schema(page: str, answer: str) -> None:
    if answer.startswith("data: "):
        kind = json.loads(answer.split("\n")[0].removeprefix("data: "))["object"]
        check_events(answer, {"text_completion": "CompletionChunk"}.get(kind) or SCHEMAS[kind])
    else:
        check(json.loads(answer), SCHEMAS[json.loads(answer)["object"]])


def test_the_documentation_has_such_examples() -> None:
    assert len(list(bodies())) >= 2
    assert len(list(answers())) >= 2


def test_the_example_of_each_route_is_answered(served: Served) -> None:
    begun = served.post("/v1/conversations").json()["id"] if has_plugin("responses") else ""
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": b""}}
    file_id = served.http.post("/v1/files", **form).json()["id"] if has_plugin("batches") else ""
    generates = served.engine.script
    for pattern, methods in published()["paths"].items():
        path = pattern.replace("{conversation_id}", begun)
        for method, described in methods.items():
            content = described.get("requestBody", {}).get("content", {})
            if "application/json" in content and "lora" not in path:  # Only some servers have the routes of adapters.
                example = content["application/json"]["example"]
                example |= {"tokens": [97]} if "tokens" in example else {}  # the vocabulary of the tests is small
                example |= {"model": "org/demo"} if "model" in example else {}
                example |= {"input_file_id": file_id} if "input_file_id" in example else {}
                is_pooled = described["tags"] == ["Embeddings and scores"] or path.startswith("/api/embed")
                served.engine.pooling = Pooling("embed", 2, has_token_weights=True, token_size=2) if is_pooled else None
                served.engine.script = pools(*[[0.6, 0.8]] * 3) if is_pooled else generates
                assert served.http.request(method, path, json=example).status_code == 200, path


def test_an_answer_or_an_event_that_is_not_published_would_fail() -> None:
    for answer, problem in (({"version": "1", "surprise": 1}, "surprise"), ({}, "required")):
        with pytest.raises(AssertionError, match=problem):
            check(answer, "Version")
    for event, is_published in ((b"data: [DONE]\n\n", True), (b'data: {"surprise": 1}\n\n', False)):
        stream = CheckedStream(httpx.ByteStream(event), "ChatCompletionChunk")
        assert b"".join(stream) == event
        with nullcontext() if is_published else pytest.raises(AssertionError, match="surprise"):
            stream.close()


def test_documents_of_servers_differ_only_by_what_they_have() -> None:
    here = document(routes(EVERYTHING), version="1.2.3", needs_key=True)
    closed = document(routes(Config("demo", ServerOptions(host="0.0.0.0"))), version="1.2.3", needs_key=False)
    hidden = here["paths"].keys() - closed["paths"].keys()
    assert hidden >= {*filter(is_served, ("/debug/requests", "/dashboard"))}
