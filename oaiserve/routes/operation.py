"""The published description of a route: `documented` stands beside its function, and `openapi` reads it.

The types of bodies and answers are those of the code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from oaiserve.errors import (
    APIError,
    BodyTooLarge,
    Forbidden,
    HeadersTooLarge,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    RequestTimeout,
    Unauthorized,
    Unavailable,
    UnsupportedMedia,
)
from oaiserve.routes.query import Parameter

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

ERRORS = (InvalidRequest, Unauthorized, Forbidden, HeadersTooLarge, RequestTimeout, InternalError, Unavailable)
ERRORS_OF_BODIES = (NotFound, BodyTooLarge, UnsupportedMedia, Overloaded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A route as its users see it. Every route may answer with ERRORS, and one with a body with ERRORS_OF_BODIES."""

    summary: str
    group: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | str | None = None  # of JSON; or else a media type, or None for no content
    alternative: str | None = None  # another media type, which the client may prefer
    event: type[msgspec.Struct] | None = None  # the data of each event, where a body may ask for a stream
    query: tuple[Parameter, ...] = ()
    errors: tuple[type[APIError], ...] = ()  # others
    example: Mapping[str, Any] | None = None  # of a body

    @property
    def all_errors(self) -> tuple[type[APIError], ...]:
        return (*ERRORS, *(() if self.body is None else ERRORS_OF_BODIES), *self.errors)


def documented(operation: Operation) -> Callable[[Endpoint], Endpoint]:
    """Return a decorator for the function of a route."""

    def decorate(endpoint: Endpoint) -> Endpoint:
        vars(endpoint)["operation"] = operation
        return endpoint

    return decorate


def operation_of(endpoint: Callable[..., Any]) -> Operation | None:
    """Return the description of a route by its function, or None for a closed route, which only tells the reason."""
    operation: Operation | None = getattr(endpoint, "operation", None)
    return operation


class ErrorDetails(msgspec.Struct):
    """The message says what was wrong. `param` names the parameter, if it is one. The ids are those of the request."""

    message: str
    type: str
    param: str | None
    code: str | None
    request_id: str
    trace_id: str


class ErrorAnswer(msgspec.Struct):
    """An error, in OpenAI's form."""

    error: ErrorDetails
