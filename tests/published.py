"""Holds what a server answers against its published schema, more strictly than the schema does: no field is unknown."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import httpx
import httpx2
from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from oaiserve.app import routes
from oaiserve.config import Config, EngineOptions
from oaiserve.errors import OLLAMA_PATHS
from oaiserve.plugins.shared.store_options import StoreOptions
from oaiserve.routes.openapi import document
from tests.missing_plugins import has_plugin

MOST_BYTES = 200_000  # bytes that are checked: the validator takes a second for a megabyte
Client = TypeVar("Client")


def everything() -> Config:
    """Return the settings of a server that has all of its routes."""
    engine = EngineOptions(lora_dir=Path("adapters"))
    if not has_plugin("keys"):
        return Config("demo", engine=engine)
    from oaiserve.plugins.keys.options import KeysOptions

    store = StoreOptions(response_store=Path("store"))
    return Config("demo", engine=engine, of_plugins=(KeysOptions(stored_keys=True), store))


@cache
def published() -> dict[str, Any]:
    """Return the document of a server that has all of its routes."""
    return document(routes(everything()), version="1.2.3", needs_key=False)


@cache
def _registry(*, is_strict: bool) -> Registry:
    whole = json.loads(json.dumps(published()))
    for schema in whole["components"]["schemas"].values():
        if is_strict and "properties" in schema:
            schema["additionalProperties"] = False
    return Registry().with_resource("urn:published", DRAFT202012.create_resource(whole))


@cache
def validator(reference: str, *, is_strict: bool = True) -> Draft202012Validator:
    """Return the validator of a schema, such as #/components/schemas/Model. One that is not strict is as published."""
    return Draft202012Validator({"$ref": f"urn:published{reference}"}, registry=_registry(is_strict=is_strict))


def check(value: object, *schemas: str) -> None:
    """Fail if the value has none of the schemas of these names."""
    problems = {
        schema: [
            f"{error.json_path}: {error.message[:300]}"
            for error in validator(f"#/components/schemas/{schema}").iter_errors(value)
        ]
        for schema in schemas
    }
    assert not all(problems.values()), problems


def tidied(path: str) -> str:
    """Return a path as routes are found by it."""
    return re.sub("/{2,}", "/", path).rstrip("/") or "/"


@cache
def operation(method: str, path: str) -> Mapping[str, Any] | None:
    """Return the published description of a route, or None if it has none."""
    tidy = tidied(path)
    for template, methods in published()["paths"].items():
        pattern = re.sub(r"\\{(\w+)\\}", lambda name: ".+" if name[1] == "model_id" else "[^/]+", re.escape(template))
        if re.fullmatch(pattern, tidy) and method.lower() in methods:
            description: Mapping[str, Any] = methods[method.lower()]
            return description
    return None


def check_answer(method: str, path: str, status: int, content_type: str, content: bytes) -> None:
    """Fail if the answer is none that is published for the route."""
    if method in ("HEAD", "OPTIONS") or status in (204, 304, 307, 308) or len(content) > MOST_BYTES:
        return
    description = operation(method, path)
    media = content_type.partition(";")[0]
    if status >= 400:
        assert media == "application/json"
        check_error(path, json.loads(content))
        # A path that is unknown, or closed on this server, and a method that the route does not have.
        assert status in (404, 405) or description is None or str(status) in description["responses"], (
            f"{method} {path} {status}"
        )
        return
    assert description is not None, f"{method} {path} is not published"
    answers = description["responses"][str(status)].get("content", {})
    if not answers:
        assert content == b""
    elif media == "text/event-stream" and (name := event_schema(method, path)) is not None:
        check_events(content.decode(), name)
    elif "schema" in answers.get(media, {}):
        schema = answers[media]["schema"]
        check(json.loads(content), *map(_name, schema.get("anyOf", [schema])))
    else:
        assert media in answers or "*/*" in answers, f"{method} {path} answered {media}"


def check_error(path: str, error: dict[str, Any]) -> None:
    """Fail if an error has not the form of its route. Those of Ollama's API have one field."""
    if tidied(path) in OLLAMA_PATHS:
        assert {name: type(value) for name, value in error.items()} == {"error": str}
    else:
        check(error, "ErrorAnswer")


def event_schema(method: str, path: str) -> str | None:
    """Return the name of the schema of the data of a route's events, or None if it has none."""
    description = operation(method, path)
    answer = (
        {} if description is None else description["responses"]["200"].get("content", {}).get("text/event-stream", {})
    )
    return _name(answer["schema"]["properties"]["data"]["anyOf"][0]["contentSchema"]) if "schema" in answer else None


class CheckedStream(httpx.SyncByteStream, httpx2.SyncByteStream):
    """The bytes of a stream. When they have come, or the client has left, the events among them are checked.

    The openai package has its own successor of httpx, which asks for a stream of its own kind.
    """

    def __init__(self, stream: httpx.SyncByteStream | httpx2.SyncByteStream, schema: str) -> None:
        self._stream = stream
        self._schema = schema
        self._text = b""

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            if len(self._text) < MOST_BYTES:
                self._text += part
            yield part

    def close(self) -> None:
        self._stream.close()
        text = self._text
        self._text = b""
        check_events(text.decode(errors="ignore"), self._schema)


def check_events(text: str, schema: str) -> None:
    """Fail if the events of a stream, which may have been cut, are not of the schema, errors, or [DONE]."""
    for block in text.split("\n\n")[:-1]:
        data = "".join(line.removeprefix("data: ") for line in block.split("\n") if line.startswith("data: "))
        if data and data != "[DONE]":  # not only a comment
            event = json.loads(data)
            check(event, "ErrorAnswer" if "error" in event else schema)


def _name(schema: Mapping[str, Any]) -> str:
    name: str = schema["$ref"].rpartition("/")[2]
    return name


def checking(send: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method `send` of an HTTP client as one that checks each answer of our server: a whole one when it is
    there, and each event of a stream when the client has read it, as far as it does."""

    def checking_send(*request: Any, stream: bool = False, **options: Any) -> Any:
        response = send(*request, stream=stream, **options)
        if "openai-processing-ms" not in response.headers:
            return response
        sent = response.request
        content_type = response.headers.get("content-type", "")
        if not stream:
            check_answer(sent.method, sent.url.path, response.status_code, content_type, response.content)
        elif (name := event_schema(sent.method, sent.url.path)) and content_type.startswith("text/event-stream"):
            response.stream = CheckedStream(response.stream, name)
        return response

    return checking_send


def checked(client: Client) -> Client:
    """Make an HTTP client check the answers that it gets."""
    client.send = checking(client.send)  # type: ignore[attr-defined]
    return client
