"""The list of models of all replicas, where these have different ones."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
from starlette.responses import Response

from oaiserve.routes.middleware import json_response
from oaiserve.scale.gateway.upstream import BadAnswer, CutOff, Headers, Unreachable
from oaiserve.scale.gateway.watch import Watch
from oaiserve.scale.routers import Routers


class _List(msgspec.Struct):
    data: list[dict[str, Any]]


async def all_models(watch: Watch, routers: Routers, headers: Headers) -> Response:
    """Ask one replica of each set of models for its list, with a client's `headers`, and answer with all models."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(watch.joined - watch.silent):
        if (models := routers.models_of(name)) and found.keys() >= {*models}:
            continue
        with suppress(Unreachable, BadAnswer, CutOff, msgspec.MsgspecError):  # the others are there
            status, content = await watch.upstreams[name].get(b"/v1/models", headers)
            if status != 200:  # it wants another key, most probably
                return Response(content, status, media_type="application/json")
            for model in msgspec.json.decode(content, type=_List).data:
                found.setdefault(str(model.get("id")), model)
    return json_response({"object": "list", "data": [*found.values()]})
