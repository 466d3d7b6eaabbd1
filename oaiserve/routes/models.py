"""/v1/models: the served model and its adapters."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from oaiserve.engine.adapters import ServedAdapter
from oaiserve.engine.pooling import Task
from oaiserve.errors import NotFound
from oaiserve.routes.middleware import json_response
from oaiserve.routes.operation import Operation
from oaiserve.routes.serving import Serving, serving_of


class Model(msgspec.Struct):
    """A model that is served, or the model with an adapter. `root` is its folder or hub id, `parent` the model of an
    adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    task: Task


class ModelList(msgspec.Struct):
    """All models that are served."""

    object: Literal["list"]
    data: list[Model]


@Operation(summary="The model that is served, and its adapters.", group="Models", answer=ModelList)
async def list_models(request: Request) -> Response:
    serving = serving_of(request)
    return json_response(
        ModelList(
            "list", [model_of(serving, None), *(model_of(serving, one) for one in serving.engine.adapters.served)]
        )
    )


@Operation(summary="The model of this name.", group="Models", answer=Model, errors=(NotFound,))
async def retrieve_model(request: Request) -> Response:
    """Answer with a model by its name, which may hold slashes, plain or as %2F. Raises ModelNotFound."""
    serving = serving_of(request)
    return json_response(model_of(serving, serving.check_model(request.path_params["model_id"])))


def model_of(serving: Serving, adapter: ServedAdapter | None) -> Model:
    return Model(
        id=serving.name_of(adapter),
        object="model",
        created=serving.created if adapter is None else adapter.created,
        owned_by="oaiserve",
        root=serving.model_root if adapter is None else adapter.path,
        parent=None if adapter is None else serving.model_name,
        max_model_len=serving.engine.max_model_len,
        task=serving.task,
    )
