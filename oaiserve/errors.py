"""All errors that a client can cause or see, and the error that stops a start. This module imports nothing of oaiserve.

Routes and engine raise these errors. The middleware `Errors` renders them with `APIError.body`, and a stream that has
begun writes the same object as its last event. On the routes of Anthropic's API, the object also has the fields of
Anthropic's errors; on those of Ollama's API, it has only Ollama's.
"""

from __future__ import annotations

from typing import Any

_MOST_NAMED = 20  # the most models that an error lists
ANTHROPIC_PATH = "/v1/messages"  # includes all paths below it
_OF_OLLAMA = ("chat", "generate", "embed", "embeddings", "tags", "ps", "show", "version")
_OF_OLLAMAS_MODELS = ("pull", "push", "create", "copy", "delete")
OLLAMA_PATHS = frozenset(f"/api/{name}" for name in _OF_OLLAMA + _OF_OLLAMAS_MODELS)
MODELS_PATH = "/v1/models"
FILES_PATH = "/v1/files"
REASON_HEADER = "x-oaiserve-reason"  # marks a 503 that doesn't mean that the server is unable to take other requests
# Anthropic's types of errors, by status. Any other status is an error of the request if below 500, else of the server.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class APIError(Exception):
    """An error that is rendered in OpenAI's form. `retry_after_seconds` becomes the header `retry-after`."""

    status = 500
    type = "server_error"
    code: str | None = None
    worker_ns = 0  # CPU time of the tokenize stage, if the request failed there

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else type(self).code
        self.retry_after_seconds = retry_after_seconds

    def body(self, path: str = "", **ids: str) -> dict[str, Any]:
        """Return `{"error": {...}}` with all keys, in the form of the route at this path; `code` is a string or None.

        OpenAI's errors have no ids. `request_id` and `trace_id` are in the body for users who keep the error but not
        the headers. A message may quote half of a surrogate pair, which JSON in UTF-8 cannot have.
        """
        error = {
            "message": self.message.encode(errors="replace").decode(),
            "type": self.type,
            "param": self.param,
            "code": self.code,
            **ids,
        }
        if path in OLLAMA_PATHS:
            return {"error": error["message"]}
        if not path.startswith(ANTHROPIC_PATH):
            return {"error": error}
        error["type"] = _ANTHROPIC_TYPES.get(
            self.status, "api_error" if self.status >= 500 else "invalid_request_error"
        )
        if self.code == ContextLengthExceeded.code:
            # Anthropic's clients look for these words to decide to shorten the conversation.
            error["message"] = f"prompt is too long: {error['message']}"
        return {"type": "error", "error": error, "request_id": ids.get("request_id")}

    def without_frames(self) -> APIError:
        """Return this error without its traceback and causes, whose frames hold the request's body and prompts."""
        self.__cause__ = self.__context__ = None
        return self.with_traceback(None)

    def headers(self) -> dict[str, str]:
        if self.retry_after_seconds is not None:
            return {"retry-after": str(self.retry_after_seconds)}
        # The same input would meet the same bug again, so the SDK should skip its two automatic retries.
        if self.status == 500:
            return {"x-should-retry": "false"}
        return {}


class ClientError(APIError):
    """The request is wrong. Subclasses set the status."""

    type = "invalid_request_error"


class InvalidRequest(ClientError):
    status = 400


def invalid(param: str, reason: str, where: str = "") -> InvalidRequest:
    """Return the error for an invalid parameter. `where` is the wrong place in it, such as tools[0].function.name."""
    return InvalidRequest(f"Invalid '{where or param}': {reason}.", param=param)


class ThreadUnsupported(InvalidRequest):
    """The request continues a conversation that it expects the server to have stored. Anthropic's SDKs look for this
    code, and then send the whole conversation."""

    code = "thread_unsupported_request"

    def body(self, path: str = "", **ids: str) -> dict[str, Any]:
        body = super().body(path, **ids)
        body["error"]["details"] = {"error_code": self.code}
        return body


class ContextLengthExceeded(InvalidRequest):
    """The prompt is too long.

    Clients that shorten prompts and retry match the opening phrase, so it must not change.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        limit_tokens: int,
        prompt_tokens: int,
        *,
        param: str,
        where: str = "",
        is_exact: bool = True,
        has_answer: bool = True,
    ) -> None:
        """The prompt came in the field `param`, at the place `where` in it. Without `is_exact`, `prompt_tokens` is a
        lower bound. Without `has_answer`, no room is needed for an answer, so the prompt may fill the whole context."""
        least = "" if is_exact else "at least "
        room = ", which leaves no room for an answer" if has_answer else ""
        super().__init__(
            f"This model's maximum context length is {limit_tokens} tokens. However, your {where or param} resulted in "
            f"{least}{prompt_tokens} tokens{room}. Please reduce the length of the {param}.",
            param=param,
        )


class Unauthorized(ClientError):
    status = 401
    code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class Forbidden(ClientError):
    """The server rejects requests with this host name, or from pages with this origin."""

    status = 403


class NotFound(ClientError):
    status = 404


class ModelNotFound(NotFound):
    code = "model_not_found"

    def __init__(self, model: str, *served: str) -> None:
        """`served` lists the names of all models and adapters, the model's own name first."""
        named = ", ".join(f"'{name}'" for name in served[:_MOST_NAMED])
        if len(served) > _MOST_NAMED:
            more = f" and {len(served) - _MOST_NAMED} more"
        else:
            more = ""
        super().__init__(f"The model '{model[:200]}' does not exist. This server serves {named}{more}.", param="model")


class AdapterUnloaded(NotFound):
    """The adapter that a request names was unloaded while the request was on its way to the engine."""

    code = "model_not_found"


class MethodNotAllowed(ClientError):
    status = 405


class RequestTimeout(ClientError):
    """The headers or the body did not arrive in time."""

    status = 408


class DeadlineMissed(RequestTimeout):
    """The request has missed its own deadline, so nobody waits for its answer any more."""

    code = "deadline_missed"

    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"}  # a retry by the SDK would only be later still


class TimeLimitExceeded(RequestTimeout):
    """The answer takes longer than --request-timeout-seconds. A retry would take as long."""

    type = "timeout"
    code = "request_timeout"

    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"}


class SlowReader(ClientError):
    """The client fell too far behind its stream. Its answer has begun, so it may get the error only as an event."""

    status = 408


class WriteTimeout(SlowReader):
    """The client stopped reading. Only the record contains this error, because the connection is already closed."""


class BodyTooLarge(ClientError):
    status = 413


class UnsupportedMedia(ClientError):
    """The body is compressed with an unsupported method. `accepted` lists the supported ones."""

    status = 415

    def __init__(self, message: str, accepted: str) -> None:
        super().__init__(message)
        self.accepted = accepted

    def headers(self) -> dict[str, str]:
        return {"accept-encoding": self.accepted}


class Overloaded(APIError):
    """Too many requests are waiting already, or the dashboard has too many viewers."""

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"


class RateLimited(Overloaded):
    """A key has reached its limit per minute or per day, or requests more than that at once."""

    def __init__(self, message: str, type: str, retry_after_seconds: int | None, *, code: str | None = None) -> None:
        super().__init__(message, code=code, retry_after_seconds=retry_after_seconds)
        self.type = type

    def headers(self) -> dict[str, str]:
        # Without a `retry_after_seconds`, the request alone exceeds the limit, so a retry would always fail.
        return super().headers() or {"x-should-retry": "false"}


class HeadersTooLarge(ClientError):
    status = 431


class InternalError(APIError):
    code = "internal_error"


class RequestQuarantined(InternalError):
    """These prompts have crashed the engine each time they were computed."""

    code = "request_quarantined"


class BadGateway(APIError):
    """A replica's answer to the gateway is not valid HTTP."""

    status = 502
    code = "bad_gateway"


class LoopDetected(APIError):
    """The request has passed too many gateways: one of them leads back to itself."""

    status = 508
    code = "loop_detected"


class Unavailable(APIError):
    """The server is loading or draining, or its engine has failed."""

    status = 503
    code = "service_unavailable"


class StoreFailed(Unavailable):
    """The server's storage failed. Routes that need no storage still work."""

    def headers(self) -> dict[str, str]:
        return {**super().headers(), REASON_HEADER: "store"}


class NotFetched(Exception):
    """A file that a request names by URL can't be fetched. The reason is meant for the client."""


class StartupError(Exception):
    """The server cannot start with these settings. The message is one sentence for the user at the terminal."""


class DeviceLost(StartupError):
    """The GPU has failed in this process. A new process will compute everything in plain torch."""


def kinds_of(kind: type[Exception]) -> dict[str, type[Exception]]:
    """Return an error class and all its subclasses, by name."""
    kinds = {kind.__name__: kind}
    for more in kind.__subclasses__():
        kinds |= kinds_of(more)
    return kinds
