"""The published description of a route, with its query: `Operation` decorates its function, and `openapi` reads it.

The types of bodies and answers are those of the code. The parameters of a query are checked as they are published.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from oaiserve import errors
from oaiserve.errors import APIError, NotFound
from oaiserve.routes.intake.decode import decoder_of
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.parameters import ranges

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

ERRORS = (
    *(errors.InvalidRequest, errors.Unauthorized, errors.Forbidden, errors.HeadersTooLarge, errors.RequestTimeout),
    *(errors.InternalError, errors.Unavailable),
)
ERRORS_OF_BODIES = (NotFound, errors.BodyTooLarge, errors.UnsupportedMedia, errors.Overloaded)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter: a text, one of the texts in `allowed`, an integer from `least` to `most`, or a file of a form."""

    name: str
    meaning: str
    allowed: tuple[str, ...] | None = None
    is_integer: bool = False
    is_file: bool = False
    is_optional: bool = False  # whether a form may omit it
    least: int = 1
    most: int | None = None

    def schema(self) -> dict[str, Any]:
        if self.is_integer:
            return {"type": "integer", "minimum": self.least} | ({} if self.most is None else {"maximum": self.most})
        if self.is_file:
            return {"type": "string", "format": "binary"}
        return {"type": "string"} | ({} if self.allowed is None else {"enum": list(self.allowed)})

    def value(self, text: str) -> Any:
        """Return the value of a given text. Raises InvalidRequest."""
        if self.is_integer:
            is_integer = text.isascii() and text.isdecimal() and len(text) <= 9
            if not is_integer or int(text) < self.least or (self.most is not None and int(text) > self.most):
                if self.most is None:
                    allowed = f">= {self.least}"
                else:
                    allowed = f"from {self.least} to {self.most}"
                raise invalid(self.name, f"must be an integer {allowed}, got {show(text)}")
            return int(text)
        if self.allowed is not None and text not in self.allowed:
            raise invalid(self.name, f"must be one of {', '.join(self.allowed)}, got {show(text)}")
        return text


def read_query(query: QueryParams, parameters: Sequence[Parameter]) -> dict[str, Any]:
    """Return the value of each parameter, or None without one. Raises InvalidRequest."""
    known = {parameter.name for parameter in parameters}
    for name in query:
        if name not in known:
            raise invalid(name[:80], f"this route takes {', '.join(parameter.name for parameter in parameters)}")
    texts = {parameter: query.get(parameter.name) for parameter in parameters}
    return {parameter.name: None if text is None else parameter.value(text) for parameter, text in texts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A route as its users see it. Any route may answer with ERRORS, and a route with a body also with
    ERRORS_OF_BODIES."""

    summary: str
    group: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | str | None = None  # type of the JSON; or else a media type, or None for no content
    answer_of_anthropic: type[msgspec.Struct] | None = None  # JSON for clients that send `anthropic-version`
    alternatives: tuple[str, ...] = ()  # other media types, if the client prefers one of them
    event: type[msgspec.Struct] | None = None  # data of each event, if a body may ask for a stream
    query: tuple[Parameter, ...] = ()
    form: tuple[Parameter, ...] = ()  # the fields of a multipart/form-data body
    errors: tuple[type[APIError], ...] = ()  # further errors
    error: type[msgspec.Struct] | None = None  # JSON of errors, if its form is not that of ErrorAnswer
    example: Mapping[str, Any] | None = None  # example of a body

    @property
    def all_errors(self) -> tuple[type[APIError], ...]:
        return (*ERRORS, *(() if self.body is None else ERRORS_OF_BODIES), *self.errors)

    def __call__(self, endpoint: Endpoint) -> Endpoint:
        if self.body is not None:  # Make the decoder now, because the first time takes milliseconds.
            decoder_of(self.body)
            ranges(self.body)
        vars(endpoint)["operation"] = self
        return endpoint


def operation_of(endpoint: Callable[..., Any]) -> Operation | None:
    """Return the description of a route by its function, or None for a closed route, which only states the reason."""
    operation: Operation | None = getattr(endpoint, "operation", None)
    return operation


# End of the reason why a server that others can reach lacks a route.
PRIVATE = "so it is there only with an --api-key, or where --host is this machine alone, as in 127.0.0.1"


def closed(reason: str) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Return the function of a route that this server lacks. It raises NotFound with the reason."""

    async def refuse(request: Request) -> Response:
        raise NotFound(reason.format(path=request.scope["path"]))

    vars(refuse)["is_closed"] = True
    return refuse


# The model tasks that the routes of a group support. Groups that are not listed support all models.
_TASKS = {"Generation": ("generate",), "Embeddings and scores": ("embed", "score"), "Speech": ("transcribe",)}


def serves(endpoint: Callable[..., Any], task: str) -> bool:
    """Return whether a route is of use on a server with a model for this task."""
    if (operation := operation_of(endpoint)) is not None:
        group = operation.group
    else:
        group = ""
    tasks = _TASKS.get(group, (task,))
    return task in tasks and not getattr(endpoint, "is_closed", False)


class Deleted(msgspec.Struct):
    """The object was deleted."""

    id: str
    object: str
    deleted: bool = True


class ErrorDetails(msgspec.Struct):
    """The message says what was wrong. `param` is the wrong parameter, if there is one. The ids identify the
    request."""

    message: str
    type: str
    param: str | None
    code: str | None
    request_id: str
    trace_id: str
    details: dict[str, str] | UnsetType = UNSET


class ErrorAnswer(msgspec.Struct):
    """An error in OpenAI's form. Clients of Anthropic's API get its type and further fields."""

    error: ErrorDetails
    type: Literal["error"] | UnsetType = UNSET
    request_id: str | UnsetType = UNSET
