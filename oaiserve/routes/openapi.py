"""/openapi.json: the schema of all routes, generated from the types of bodies and answers."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from oaiserve.routes.answer.document import document_response
from oaiserve.routes.intake.object_types import REF, InputItem, Message
from oaiserve.routes.operation import ErrorAnswer, Operation, operation_of

STATUSES = {
    400: "The request is invalid, or uses something that is not supported. `param` names it.",
    401: "No API key, or an unknown one.",
    403: "The server does not answer to that host name, or to web pages of that origin.",
    404: "There is no such model, or nothing else of that name.",
    408: "The headers, the body or the answer took too long.",
    413: "The body is too large (`--body-limit`).",
    415: "The body is compressed, but not in zstd, gzip or deflate.",
    429: "Too many requests are waiting. The header `retry-after` says when to try again.",
    431: "The headers are too many or too large.",
    500: "A fault of the server. Its log says more under the request id.",
    503: "The server loads, drains or has failed. The header `retry-after` says when to try again.",
}


def published(
    routes: Sequence[Route], *, version: str, needs_key: bool, is_open: Callable[[str], bool]
) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint that serves the document of a server's routes. The first request generates the document."""

    @cache
    def content() -> bytes:
        open_paths = {route.path for route in routes if is_open(route.path)}
        return msgspec.json.encode(document(routes, version=version, needs_key=needs_key, open_paths=open_paths))

    @Operation(summary="This document.", group="Server", answer="application/json")
    async def answer(request: Request) -> Response:
        return document_response(await run_in_threadpool(content), request.headers.get("accept", ""))

    return answer


def document(
    routes: Iterable[Route], *, version: str, needs_key: bool, open_paths: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the document in OpenAPI 3.1, without closed routes. Where no key is needed, sending one is allowed."""
    described = [(route, operation) for route in routes if (operation := operation_of(route.endpoint)) is not None]
    operations = [operation for _, operation in described]
    bodies = [operation.body for operation in operations if operation.body is not None]
    answers: list[type[msgspec.Struct]] = [ErrorAnswer]
    for operation in operations:
        kinds = (operation.answer, operation.answer_of_anthropic, operation.event)
        answers += [kind for kind in (*kinds, operation.error) if isinstance(kind, type)]
    errors = {name: each for operation in operations for name, each in _errors(operation).items()}
    paths: dict[str, Any] = {}
    for route, operation in described:
        key: dict[str, list[str]] = {"api_key": []}
        if needs_key and route.path not in open_paths:
            requires = [key]
        else:
            requires = [{}, key]
        method = next(iter((route.methods or set()) - {"HEAD"})).lower()
        path = re.sub(r":\w+\}", "}", route.path)
        paths.setdefault(path, {})[method] = _operation(path, method, operation) | {"security": requires}
    used = {operation["tags"][0] for methods in paths.values() for operation in methods.values()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "oaiserve",
            "version": version,
            "description": "OpenAI's API for a language model, with an account of where the time of each request went.",
        },
        "tags": [{"name": name} for name in _GROUPS if name in used],
        "paths": paths,
        "components": {
            "schemas": _schemas([*bodies, Message, InputItem], is_answer=False) | _schemas(answers, is_answer=True),
            "responses": {name: errors[name] for name in sorted(errors)},
            "securitySchemes": {
                "api_key": {"type": "http", "scheme": "bearer", "description": "A key of `--api-key`, if there is one."}
            },
        },
    }


# The groups of routes in order. Routes under a prefix belong to its group, whatever group their code states.
_GROUPS = {
    "Chat": "/v1/chat/",
    "Completions": "/v1/completions",
    "Responses": "/v1/responses",
    "Messages": "/v1/messages",
    "Ollama": "/api/",
    "Conversations": "/v1/conversations",
    "Embeddings and scores": None,
    "Speech": "/v1/audio/",
    "Batches": None,
    "Files": "/v1/files",
    "Models": None,
    "Tokenizer": None,
    "Server": None,
    "Debugging": None,
    "Pages": None,
}


def _group(path: str, operation: Operation) -> str:
    return next((name for name, start in _GROUPS.items() if start and path.startswith(start)), operation.group)


def _operation(path: str, method: str, operation: Operation) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    for parameter in operation.query:
        text = {"description": parameter.meaning, "schema": parameter.schema()}
        parameters.append({"name": parameter.name, "in": "query", **text})
    described: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method}{path}").strip("_"),
        "summary": operation.summary,
        "tags": [_group(path, operation)],
        "responses": {"200": _answer(operation)}
        | {name[:3]: {"$ref": f"#/components/responses/{name}"} for name in _errors(operation)},
    }
    if parameters:
        described["parameters"] = parameters
    if operation.form:
        fields = {part.name: {"description": part.meaning, **part.schema()} for part in operation.form}
        form = {
            "type": "object",
            "properties": fields,
            "required": [part.name for part in operation.form if not part.is_optional],
        }
        described["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    if operation.body is not None:
        content: dict[str, Any] = {"schema": _reference(operation.body)}
        if operation.example is not None:
            content["example"] = operation.example
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    return described


def _answer(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if isinstance(operation.answer, str):
        content[operation.answer] = {}
    elif operation.answer is not None:
        schema: dict[str, Any] = _reference(operation.answer)
        if operation.answer_of_anthropic is not None:
            schema = {"anyOf": [schema, _reference(operation.answer_of_anthropic)]}
        content["application/json"] = {"schema": schema}
    for media_type in operation.alternatives:
        content[media_type] = {}
    if operation.event is not None:
        # OpenAPI 3.2 describes streams like this, and tools for 3.1 read it, too.
        kinds = (operation.event, ErrorAnswer)
        data = {"type": "string", "contentMediaType": "application/json"}
        text = {
            "description": "JSON, or the ErrorAnswer of a stream that fails. `[DONE]` is the last one.",
            "anyOf": [*(data | {"contentSchema": _reference(kind)} for kind in kinds), {"const": "[DONE]"}],
        }
        event = {"description": "An event.", "type": "object", "properties": {"data": text}, "required": ["data"]}
        content["text/event-stream"] = {"schema": event}
    return {"description": "The answer."} | ({"content": content} if content else {})


def _errors(operation: Operation) -> dict[str, Any]:
    """Return the errors of a route, keyed by their names in the document, which begin with the status."""
    form = operation.error or ErrorAnswer
    more = "" if form is ErrorAnswer else f"_{form.__name__}"
    return {
        f"{status}{more}": _error(status, form) for status in sorted({each.status for each in operation.all_errors})
    }


def _error(status: int, form: type[msgspec.Struct]) -> dict[str, Any]:
    described: dict[str, Any] = {"description": STATUSES[status]}
    if status in (429, 503):
        seconds = {"description": "Seconds after which to try again.", "schema": {"type": "integer"}}
        described["headers"] = {"retry-after": seconds}
    return described | {"content": {"application/json": {"schema": _reference(form)}}}


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": REF.format(name=kind.__name__)}


def _schemas(kinds: Iterable[type[msgspec.Struct]], *, is_answer: bool) -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(dict.fromkeys(kinds), ref_template=REF)
    return {name: _tidied(schema, is_answer=is_answer) for name, schema in schemas.items()}


def _tidied(value: Any, *, is_answer: bool) -> Any:
    """Return a schema of the JSON that is sent: an integer may be written as a float, null in a body counts as absent,
    and an answer includes its defaults."""
    if isinstance(value, list):
        return [_tidied(item, is_answer=is_answer) for item in value]
    if not isinstance(value, Mapping):
        return value
    schema = {key: _tidied(item, is_answer=is_answer) for key, item in value.items()}
    if isinstance(text := schema.get("description"), str):
        schema["description"] = " ".join(text.split())
    properties = value.get("properties")
    if isinstance(properties, Mapping) and "type" in value and is_answer:
        sent = {name for name, field in properties.items() if "default" in field} | set(value["required"])
        schema["required"] = [name for name in properties if name in sent]
    if "type" in value or "anyOf" in value or "$ref" in value or "enum" in value:
        schema.pop("default", None)
    if "anyOf" in schema:
        schema |= _union(schema.pop("anyOf"))
    return schema


def _union(members: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a union without Raw, which stands for pieces of JSON, and with the integers of JSON Schema, among which is
    2.0."""
    schemas = [member for member in members if member]
    if {"type": "integer"} in schemas:
        schemas = [member for member in schemas if member != {"type": "number"}]
    if len(schemas) == 1:
        return schemas[0]
    if all(member.keys() == {"type"} for member in schemas):
        return {"type": [member["type"] for member in schemas]}
    return {"anyOf": schemas}
