"""The state of /v1/responses: stored responses, and those that are made in the background."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from oaiserve.plugins.responses.background_store import BackgroundStore
from oaiserve.plugins.responses.runs import Runs
from oaiserve.plugins.responses.store import ResponseDatabase


@dataclass(frozen=True, slots=True)
class State:
    store: ResponseDatabase
    background: BackgroundStore
    runs: Runs


def state_of(request: Request) -> State:
    state: State = request.app.state.responses
    return state
