"""/v1/models, which lists the one model that is served."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from oaiserve.routes.middleware import json_response
from oaiserve.routes.serving import Serving, serving_of


async def list_models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_model(serving_of(request))]})


async def retrieve_model(request: Request) -> Response:
    """Answer with the model of that name, which may hold slashes, plain or as %2F. Raises ModelNotFound."""
    serving = serving_of(request)
    serving.check_model(request.path_params["model_id"])
    return json_response(_model(serving))


def _model(serving: Serving) -> dict[str, Any]:
    return {
        "id": serving.model_name,
        "object": "model",
        "created": serving.created,
        "owned_by": "oaiserve",
        "root": serving.model_name,
        "parent": None,
        "max_model_len": serving.engine.max_model_len,
        "task": serving.task,
    }
