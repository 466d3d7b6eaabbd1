"""`FrontRouter` names the replica of each request for HAProxy. There is one on each node with a front.

HAProxy posts the body of the request, or the beginning of a long one, to /internal/route, and of its headers only the
id and the session. If no answer comes in time, or another one than 200, the request goes to the replica with the
fewest connections.
"""

from __future__ import annotations

import asyncio

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oaiserve.facts.prefix_keys import prompt_of_body, prompt_of_text
from oaiserve.facts.routing_decision import DECISION_HEADER, RoutingRequest, as_text
from oaiserve.scale.on_ray import private
from oaiserve.scale.router import NoReplica

SESSION = "x-session-id"
TRUNCATED = "x-body-truncated"  # HAProxy sets it when it has not passed on the whole body
MOST_SECONDS = 0.8  # for a decision; HAProxy waits for one second


class FrontRouter:
    """Answers HAProxy, by the request router of the replicas."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas
        private.prepare(replicas)

    def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(routes=[Route("/internal/route", self.route, methods=["POST"])])

    async def route(self, request: Request) -> Response:
        body = await request.body()
        # An incomplete body is no JSON, so its text stands for the prompt: the next turn begins with the same.
        is_truncated = TRUNCATED in request.headers
        prompt = prompt_of_text(body, b"truncated") if is_truncated else prompt_of_body(body)
        routing_request = RoutingRequest(prompt, request.headers.get(SESSION) or None)
        try:
            async with asyncio.timeout(MOST_SECONDS):
                replica = await private.choose(self._replicas, routing_request)
        except (NoReplica, DeploymentUnavailableError, TimeoutError) as error:
            return Response(f"{type(error).__name__}: {error}", 503)
        headers = {} if routing_request.decision is None else {DECISION_HEADER: as_text(routing_request.decision)}
        return JSONResponse({"replica_id": replica, "request_headers": headers})
