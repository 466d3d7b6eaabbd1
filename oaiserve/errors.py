"""Every error a client can cause or see, and the one that stops a start. Imports nothing of ours.

    APIError                      what a client sees: status, type, code, param, message
      InvalidRequest        400   the request cannot be honoured as it is
        ContextLengthExceeded     prompt, or prompt + max_tokens, is longer than the context
      Unauthorized          401   no API key, or a wrong one
      NotFound              404   no such route
        ModelNotFound             a model this server does not serve
      MethodNotAllowed      405
      RequestTimeout        408   the body did not arrive in time
      SlowReader            408   the client fell too far behind its stream
        WriteTimeout              the client stopped reading, and was cut off
      Conflict              409   what is there once is in use
      BodyTooLarge          413
      Overloaded            429   too many requests wait already, or too many watch the dashboard
      InternalError         500   our fault
      Unavailable           503   not ready: loading, draining, or the engine has stopped
    StartupError                  the server cannot start: one sentence, exit code 2

Routes and engine raise these; one handler in `app` renders them (`APIError.body`), and a stream that
has begun writes the same object as its last event.
"""

from __future__ import annotations

from typing import Any


class APIError(Exception):
    """An error in OpenAI's form. `retry_after_seconds` becomes the header `retry-after`."""

    status = 500
    type = "server_error"
    code: str | None = None

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

    def body(self, *, request_id: str, trace_id: str) -> dict[str, Any]:
        """`{"error": {...}}`, all keys always there, `code` a string or null. The ids are not OpenAI's: they are where
        people look who have kept the error and not the headers."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
                "request_id": request_id,
                "trace_id": trace_id,
            }
        }

    def headers(self) -> dict[str, str]:
        if self.retry_after_seconds is not None:
            return {"retry-after": str(self.retry_after_seconds)}
        # A 500 is the same input meeting the same bug: the SDK's two automatic retries would only repeat it.
        return {"x-should-retry": "false"} if self.status == 500 else {}


class InvalidRequest(APIError):
    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """The opening phrase is matched by clients that shorten a prompt and try again: keep it."""

    code = "context_length_exceeded"

    def __init__(self, limit_tokens: int, prompt_tokens: int, max_tokens: int | None, *, chat: bool) -> None:
        what = "messages" if chat else "prompt"
        asked = prompt_tokens + (max_tokens or 0)
        if max_tokens is None:
            asked_for = f"However, your {what} resulted in {prompt_tokens} tokens, which leaves no room for an answer."
        else:
            asked_for = (
                f"However, you requested {asked} tokens "
                f"({prompt_tokens} in the {what}, {max_tokens} in the completion)."
            )
        super().__init__(
            f"This model's maximum context length is {limit_tokens} tokens. {asked_for} "
            f"Please reduce the length of the {what}{'' if max_tokens is None else ' or completion'}.",
            param=what,
        )


class Unauthorized(APIError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class NotFound(APIError):
    status = 404
    type = "invalid_request_error"


class ModelNotFound(NotFound):
    code = "model_not_found"

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(f"The model '{asked[:200]}' does not exist. This server serves '{served}'.", param="model")


class MethodNotAllowed(APIError):
    status = 405
    type = "invalid_request_error"


class RequestTimeout(APIError):
    status = 408
    type = "invalid_request_error"


class SlowReader(APIError):
    """Comes when the answer has begun, so the client never sees the status; at best it gets the error as an event."""

    status = 408
    type = "invalid_request_error"


class WriteTimeout(SlowReader):
    """Only told in the record: the connection is gone."""


class Conflict(APIError):
    status = 409
    type = "invalid_request_error"


class BodyTooLarge(APIError):
    status = 413
    type = "invalid_request_error"


class Overloaded(APIError):
    status = 429
    type = "requests"
    code = "rate_limit_exceeded"


class InternalError(APIError):
    code = "internal_error"


class Unavailable(APIError):
    status = 503
    code = "service_unavailable"


class StartupError(Exception):
    """The server cannot start with what it was given. The message is one sentence for the person at the terminal."""
