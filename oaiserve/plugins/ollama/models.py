"""The models in Ollama's form, made of those of /v1/models."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from oaiserve.plugins.ollama.answers import time_text
from oaiserve.plugins.ollama.inner import Refused, asked
from oaiserve.plugins.ollama.options import theirs
from oaiserve.plugins.ollama.requests import LATEST

AnyModel = Mapping[str, Any]
_HUNDRED_YEARS_SECONDS = 100 * 365 * 86_400


class OllamaDetails(msgspec.Struct, kw_only=True):
    """The files of a model. Fields that /v1/models doesn't tell are empty."""

    parent_model: str
    format: str
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(msgspec.Struct, kw_only=True):
    """A model. `digest` is that of its name and source, not of its weights, and the sizes are unknown. A list of loaded
    models has the last three fields."""

    name: str
    model: str
    modified_at: str
    digest: str
    details: OllamaDetails
    size: int = 0
    size_vram: int | UnsetType = UNSET
    expires_at: str | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModels(msgspec.Struct):
    """The models."""

    models: list[OllamaModel]


class ShownModel(msgspec.Struct, kw_only=True):
    """A model. `parameters` are the sampling parameters of requests that set none."""

    parameters: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    modelfile: str = ""
    template: str = ""
    license: str = ""


async def all_models(request: Request) -> list[AnyModel]:
    models: list[AnyModel] = msgspec.json.decode(await asked(request, "/v1/models"))["data"]
    return models


async def model_named(request: Request, name: str) -> AnyModel:
    """Return a model by its name, with or without :latest. Raises Refused."""
    names = [*dict.fromkeys((name.removesuffix(LATEST), name))]
    while True:
        try:
            model: AnyModel = msgspec.json.decode(await asked(request, f"/v1/models/{names.pop(0)}"))
            return model
        except Refused:
            if not names:
                raise


def listed(model: AnyModel, *, is_running: bool = False) -> OllamaModel:
    name = model["id"]
    if ":" not in name.rpartition("/")[2]:
        name += LATEST  # Names in Ollama's lists have a tag.
    shown = OllamaModel(
        name=name,
        model=name,
        modified_at=time_text(model["created"]),
        digest=sha256(f"{model.get('root')} {name}".encode()).hexdigest(),
        details=_details(model),
    )
    if is_running:
        shown.size_vram = 0
        shown.expires_at = time_text(model["created"] + _HUNDRED_YEARS_SECONDS)  # never
        shown.context_length = model.get("max_model_len", 0)
    return shown


def shown(model: AnyModel) -> ShownModel:
    has = {
        "completion": model.get("task", "generate") == "generate",
        "embedding": model.get("task") == "embed",
        "tools": model.get("has_chat_template", False),
        "thinking": model.get("has_reasoning", False),
        "vision": "image" in model.get("input_modalities", ()),
    }
    sampling = model.get("default_sampling") or {}
    # Clients look for the length of the context under the name of the architecture.
    info = {"general.architecture": "oaiserve", "general.basename": model["id"]}
    if "max_model_len" in model:
        info["oaiserve.context_length"] = model["max_model_len"]
    return ShownModel(
        parameters="\n".join(f"{theirs(name)} {value}" for name, value in sampling.items()),
        details=_details(model),
        model_info=info,
        capabilities=[name for name, is_so in has.items() if is_so],
        modified_at=time_text(model["created"]),
    )


def _details(model: AnyModel) -> OllamaDetails:
    is_gguf = "gguf" in str(model.get("root")).lower()
    return OllamaDetails(parent_model=model.get("parent") or "", format="gguf" if is_gguf else "safetensors")
