"""/v1/models, which lists the one model that is served."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from oaiserve.engine.pooling import Task
from oaiserve.errors import NotFound
from oaiserve.routes.middleware import json_response
from oaiserve.routes.operation import Operation, documented
from oaiserve.routes.serving import Serving, serving_of


class Model(msgspec.Struct):
    """A model that is served. `root` is its folder or hub id."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    task: Task


class ModelList(msgspec.Struct):
    """All models that are served."""

    object: Literal["list"]
    data: list[Model]


@documented(Operation(summary="The model that is served, in a list.", group="Models", answer=ModelList))
async def list_models(request: Request) -> Response:
    return json_response(ModelList("list", [_model(serving_of(request))]))


@documented(Operation(summary="The model of this name.", group="Models", answer=Model, errors=(NotFound,)))
async def retrieve_model(request: Request) -> Response:
    """Answer with the model of that name, which may hold slashes, plain or as %2F. Raises ModelNotFound."""
    serving = serving_of(request)
    serving.check_model(request.path_params["model_id"])
    return json_response(_model(serving))


def _model(serving: Serving) -> Model:
    return Model(
        id=serving.model_name,
        object="model",
        created=serving.created,
        owned_by="oaiserve",
        root=serving.model_root,
        parent=None,
        max_model_len=serving.engine.max_model_len,
        task=serving.task,
    )
