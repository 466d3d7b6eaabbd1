"""/v1/models: the served model and its adapters. Adapters change at run time, by routes with the bodies of vLLM."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import msgspec
from msgspec import UNSET, UnsetType
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from oaiserve.checkpoints import demo
from oaiserve.checkpoints.adapters import BadAdapter
from oaiserve.engine.default_limits import default_limits
from oaiserve.engine.types.adapters import ServedAdapter
from oaiserve.engine.types.pooling import Task
from oaiserve.errors import InvalidRequest, NotFound
from oaiserve.routes.answer.paging import between
from oaiserve.routes.door.middleware import is_of_anthropic, json_response
from oaiserve.routes.intake.body_types import LoadAdapterBody, UnloadAdapterBody
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.read import read_parsed
from oaiserve.routes.operation import PRIVATE, Deleted, Operation, Parameter, closed
from oaiserve.routes.serving import Serving, serving_of

AnyModel = Mapping[str, Any]


class Model(msgspec.Struct):
    """A served model, alone or with an adapter. `root` is its folder or hub id, `parent` an adapter's model, and
    `input_modalities` are text and any of image and audio. If the model generates text, `default_sampling` has the
    parameters for requests that set none, `default_sampling_source` is the address where its publisher recommends them
    if the model's files name none, `default_max_tokens` is the most tokens of their answers if they have such a limit,
    `has_chat_template` says whether it can chat, and `has_reasoning` whether answers may begin with reasoning. `device`
    runs the model. `description` says what the demo model is for, or how a model without a chat template gets one.
    A server of several models says by `is_loaded` which are loaded; the others have only some of these fields. Clients
    of Anthropic's API, who send `anthropic-version`, get the last six fields, too."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | UnsetType | None = UNSET
    max_model_len: int | UnsetType = UNSET
    task: Task | UnsetType = UNSET
    input_modalities: list[str] | UnsetType = UNSET
    device: Literal["cpu", "cuda"] | UnsetType = UNSET
    is_loaded: bool | UnsetType = UNSET
    default_sampling: dict[str, float] | UnsetType = UNSET
    default_sampling_source: str | UnsetType = UNSET
    default_max_tokens: int | UnsetType = UNSET
    has_chat_template: bool | UnsetType = UNSET
    has_reasoning: bool | UnsetType = UNSET
    description: str | UnsetType = UNSET
    type: Literal["model"] | UnsetType = UNSET
    display_name: str | UnsetType = UNSET
    created_at: str | UnsetType = UNSET
    lifecycle: Literal["active"] | UnsetType = UNSET
    max_input_tokens: int | UnsetType = UNSET
    max_tokens: int | UnsetType = UNSET


class ModelList(msgspec.Struct):
    """The served models. Clients of Anthropic's API get them in pages, with the last three fields."""

    object: Literal["list"]
    data: list[Model]
    first_id: str | UnsetType | None = UNSET
    last_id: str | UnsetType | None = UNSET
    has_more: bool | UnsetType = UNSET


PAGE = (
    Parameter("limit", "With anthropic-version: models of a page. Default: 20.", is_integer=True, most=1000),
    Parameter("after_id", "With anthropic-version: the model before the page."),
    Parameter("before_id", "With anthropic-version: the model after the page."),
)


@Operation(summary="The model that is served, and its adapters.", group="Models", answer=ModelList, query=PAGE)
async def list_models(request: Request) -> Response:
    serving = serving_of(request)
    served = (None, *serving.engine.adapters.served)
    models = [model_of(serving, adapter, name) for adapter in served for name in serving.names_of(adapter)]
    return list_answer(request.scope, [msgspec.to_builtins(model) for model in models])


@Operation(summary="The model of this name.", group="Models", answer=Model, errors=(NotFound,))
async def retrieve_model(request: Request) -> Response:
    """Answer with a model by its name, which may contain slashes, plain or as %2F. Raises ModelNotFound."""
    serving = serving_of(request)
    name = name_in(request.scope)
    adapter = serving.check_model(name)
    names = serving.names_of(adapter)
    model = model_of(serving, adapter, name if name in names else names[0])
    return json_response(in_form(request.scope, msgspec.to_builtins(model)))


def name_in(scope: Scope) -> str:
    """Return the model's name from the path as the client sent it, because TidyPath also merges encoded slashes."""
    tidy = str(scope["path"]).partition("/v1/models/")[2]
    raw_path = re.sub(b"/{2,}", b"/", scope["raw_path"]).rstrip(b"/")
    name = unquote(raw_path.partition(b"/v1/models/")[2])
    return name if re.sub("/{2,}", "/", name).strip("/") == tidy else tidy


def list_answer(scope: Scope, models: Sequence[AnyModel]) -> Response:
    """Answer with models, by name, in the form of the request's API. Raises InvalidRequest for a page that doesn't
    exist."""
    if not is_of_anthropic(scope):
        return json_response({"object": "list", "data": models})
    query = QueryParams(scope["query_string"])
    ids = [model["id"] for model in models]
    cursors = {each.name: each.value(query[each.name]) for each in PAGE if each.name in query}
    for name in ("after_id", "before_id"):
        if name in cursors and cursors[name] not in ids:
            raise invalid(name, f"there is no model {show(cursors[name])} here")
    shown, has_more = between(ids, cursors.get("limit", 20), cursors.get("after_id"), cursors.get("before_id"))
    first, last = (ids[shown[0]], ids[shown[-1]]) if shown else (None, None)
    data = [in_form(scope, models[number]) for number in shown]
    return json_response({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more})


def in_form(scope: Scope, model: AnyModel) -> AnyModel:
    if not is_of_anthropic(scope):
        return model
    created_at = datetime.fromtimestamp(model["created"], UTC).isoformat()
    form = {"type": "model", "display_name": model["id"], "created_at": created_at, "lifecycle": "active"}
    length = model.get("max_model_len")  # unknown for a model that is not loaded
    if length is None:
        limits = {}
    else:
        limits = {"max_input_tokens": length, "max_tokens": length}
    return {**model, **form, **limits}


def model_of(serving: Serving, adapter: ServedAdapter | None, name: str) -> Model:
    generates = serving.task == "generate"
    limits = default_limits(serving.config.engine, serving.engine.default_params)
    recommendation = serving.sampling.recommendation
    return Model(
        id=name,
        object="model",
        created=serving.created if adapter is None else adapter.created,
        owned_by="oaiserve",
        root=serving.model_root if adapter is None else adapter.path,
        parent=None if adapter is None else serving.config.model_name,
        max_model_len=serving.engine.max_model_len,
        task=serving.task,
        input_modalities=["text", *sorted(serving.engine.media)],
        device="cpu" if serving.engine.is_on_cpu else "cuda",
        default_sampling=serving.sampling.of_request() if generates else UNSET,
        default_sampling_source=recommendation.source if generates and recommendation else UNSET,
        default_max_tokens=limits.get("default_max_tokens", UNSET) if generates else UNSET,
        has_chat_template=serving.engine.tokenizer.chat_template is not None if generates else UNSET,
        has_reasoning=serving.dialect.reasoning is not None if generates else UNSET,
        description=_description(serving),
    )


def _description(serving: Serving) -> str | UnsetType:
    if serving.config.model == "demo":
        return f"A very small model to try things with. {demo.advice()}"
    if serving.task == "generate" and serving.engine.tokenizer.chat_template is None:
        return serving.engine.tokenizer.why_no_chat
    return UNSET


logger = logging.getLogger(__name__)
MOST_NAME = 200  # characters of an adapter's name


@Operation(
    summary="Load an adapter, which requests can name as their model then.",
    group="Models",
    body=LoadAdapterBody,
    answer=Model,
    example={"lora_name": "sql", "lora_path": "sql-adapter"},
)
async def load(request: Request) -> Response:
    """Load an adapter from a folder in --lora-dir, and answer with its model. Raises InvalidRequest."""
    serving = serving_of(request)
    body, _ = await read_parsed(request, LoadAdapterBody)
    name = body.lora_name
    path = _path(serving, body.lora_path)
    if not (0 < len(name) <= MOST_NAME and name.isprintable()):
        raise invalid("lora_name", f"must be 1 to {MOST_NAME} printable characters, got {show(name)}")
    if name in serving.config.accepted_names:
        raise invalid("lora_name", f"is the name of the model itself: '{name}'")
    try:
        load_adapter = partial(serving.engine.load_adapter, in_place=bool(body.load_inplace))
        adapter = await _in_turn(serving, load_adapter, name, path)
    except BadAdapter as error:
        raise InvalidRequest(f"The adapter cannot be used: {error}.", param="lora_path") from error
    logger.info("Loaded the adapter '%s' from %s", name, path)
    return json_response(model_of(serving, adapter, name))


@Operation(
    summary="Unload an adapter. Requests that have it are answered to their end.",
    group="Models",
    body=UnloadAdapterBody,
    answer=Deleted,
    example={"lora_name": "sql"},
)
async def unload(request: Request) -> Response:
    """Unload an adapter for all further requests. Raises NotFound if there is none with this name."""
    body, _ = await read_parsed(request, UnloadAdapterBody)
    serving = serving_of(request)
    adapter = await _in_turn(serving, serving.engine.unload_adapter, body.lora_name)
    logger.info("Unloaded the adapter '%s'", adapter.name)
    return json_response(Deleted(adapter.name, "model"))


async def _in_turn(serving: Serving, call: Callable[..., ServedAdapter], *arguments: object) -> ServedAdapter:
    return await asyncio.get_running_loop().run_in_executor(serving.adapter_loads, call, *arguments)


switched_off = closed("Adapters can be loaded and unloaded only where the server was started with --lora-dir FOLDER.")
closed_route = closed(f"{{path}} changes what others are served, {PRIVATE}.")


def _path(serving: Serving, name: str) -> Path:
    """Return the folder of an adapter, which must be in the folder of adapters. Raises InvalidRequest."""
    assert serving.config.engine.lora_dir is not None
    folder = serving.config.engine.lora_dir.resolve()
    try:
        path = (folder / name).resolve()
        is_inside = folder in path.parents and path.is_dir()
    except (OSError, ValueError):  # No file can have this name.
        is_inside = False
    if not is_inside:
        raise invalid("lora_path", f"must be a folder in the server's --lora-dir, got {show(name)}")
    return path
