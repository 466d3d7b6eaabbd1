"""The runner of batches, for the routes of both APIs."""

from __future__ import annotations

from starlette.requests import Request

from oaiserve.errors import InvalidRequest
from oaiserve.plugins.batches.runner import BatchRunner


def runner_of(request: Request) -> BatchRunner:
    runner: BatchRunner | None = request.app.state.batches
    if runner is None:
        raise InvalidRequest("This server has no files and no batches, as it runs with --response-store-number 0.")
    return runner
