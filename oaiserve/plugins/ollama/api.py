"""The routes of Ollama's API. Each one reads its body, and is answered by a route of OpenAI's API of the same app."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from oaiserve.errors import InvalidRequest, NotFound
from oaiserve.plugins.ollama.answers import (
    EmbedTextAnswer,
    EmbedTextsAnswer,
    GenerateAnswer,
    OllamaChatAnswer,
    OllamaError,
    Translation,
    embed_answer,
    encode,
    older_embed_answer,
)
from oaiserve.plugins.ollama.body import (
    AskBody,
    EmbedTextBody,
    EmbedTextsBody,
    GenerateBody,
    NamedBody,
    OllamaChatBody,
)
from oaiserve.plugins.ollama.inner import NDJSON, Refused, answer_by, asked
from oaiserve.plugins.ollama.models import OllamaModels, ShownModel, all_models, listed, model_named, shown
from oaiserve.plugins.ollama.requests import (
    Inner,
    chat_request,
    embed_request,
    generate_request,
    is_zero,
    older_embed_request,
)
from oaiserve.routes.adaptations import Adaptations
from oaiserve.routes.door.middleware import json_response
from oaiserve.routes.intake.read import read_without_engine
from oaiserve.routes.operation import Operation

Body = TypeVar("Body", bound=msgspec.Struct)
# The version of Ollama whose API this is. Clients compare it with the first one that has what they need.
API_VERSION = "0.12.11"
_NAMES = "'oaiserve serve MODEL --served-model-name NAME' gives one a name"
_REFUSED = {
    "push": "uploads no models",
    "create": f"makes no models. {_NAMES}",
    "copy": f"copies no models. {_NAMES}",
    "delete": "deletes no models. 'oaiserve rm NAME' does, on its machine",
}
_FORM = (b"content-type", b"application/x-www-form-urlencoded")


class OllamaVersion(msgspec.Struct):
    """The version of Ollama whose API this is, and the server."""

    version: str
    server: str


class PullStatus(msgspec.Struct):
    """The model is here."""

    status: str = "success"


Described = partial(Operation, error=OllamaError)


async def _read(request: Request, kind: type[Body], adapted: Adaptations) -> Body:
    headers = request.scope["headers"]
    # curl's -d, as in Ollama's examples, sends JSON under this type. Web pages, which send their origin, may not.
    if _FORM in headers and all(name != b"origin" for name, _ in headers):
        request = Request({**request.scope, "headers": [each for each in headers if each != _FORM]}, request.receive)
    return await read_without_engine(request, request.app.state.bodies, kind, adapted.note)


@Described(
    summary="Answer a conversation as Ollama's API does, whole or streamed.",
    group="Generation",
    body=OllamaChatBody,
    answer=OllamaChatAnswer,
    alternatives=(NDJSON,),
    example={"model": "demo", "messages": [{"role": "user", "content": "Good morning"}], "stream": False},
)
async def chat(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    adapted = Adaptations()
    body = await _read(request, OllamaChatBody, adapted)
    inner = chat_request(body, adapted.note)
    await _answer(request, send, body, OllamaChatAnswer, inner if body.messages else None, adapted)


@Described(
    summary="Answer a prompt as Ollama's API does, whole or streamed.",
    group="Generation",
    body=GenerateBody,
    answer=GenerateAnswer,
    alternatives=(NDJSON,),
    example={"model": "demo", "prompt": "What is the capital of France?", "stream": False},
)
async def generate(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    adapted = Adaptations()
    body = await _read(request, GenerateBody, adapted)
    inner = generate_request(body, adapted.note)
    has_prompt = bool(body.prompt or body.images or body.suffix)
    await _answer(request, send, body, GenerateAnswer, inner if has_prompt else None, adapted)


async def _answer(
    request: Request,
    send: Send,
    body: AskBody,
    kind: type[OllamaChatAnswer | GenerateAnswer],
    inner: Inner | None,
    adapted: Adaptations,
) -> None:
    """Answer by a request to an own route. Without one, there is nothing to ask: the client wants the model loaded."""
    translation = Translation(kind, body.model, request.app.state.runtime.unix_ns() / 1e9)
    if inner is not None:
        stream = None if body.stream is False else translation
        return await answer_by(request, send, inner, adapted, translation.whole, stream)
    await model_named(request, body.model)
    if is_zero(body.keep_alive):
        reason = "but this server keeps its models loaded until it is stopped"
        raise InvalidRequest(f"'keep_alive' is 0, {reason}.", param="keep_alive")
    await _send_json(request, send, translation.loaded(), is_line=body.stream is not False, adapted=adapted)


async def _send_json(
    request: Request, send: Send, content: bytes, *, is_line: bool, adapted: Adaptations | None = None
) -> None:
    """Send an answer whole, or as the only line of a stream."""
    headers = {} if adapted is None else adapted.headers()
    media_type = NDJSON if is_line else "application/json"
    response = Response(content + b"\n" if is_line else content, headers=headers, media_type=media_type)
    await response(request.scope, request.receive, send)


@Described(
    summary="The vectors of texts, as Ollama's API has them.",
    group="Embeddings and scores",
    body=EmbedTextsBody,
    answer=EmbedTextsAnswer,
    example={"model": "demo", "input": ["What is the capital of France?", "Paris"]},
)
async def embed(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    adapted = Adaptations()
    body = await _read(request, EmbedTextsBody, adapted)
    await answer_by(request, send, embed_request(body, adapted.note), adapted, partial(embed_answer, body.model))


@Described(
    summary="The vector of a text, as Ollama's older API has it.",
    group="Embeddings and scores",
    body=EmbedTextBody,
    answer=EmbedTextAnswer,
    example={"model": "demo", "prompt": "Paris"},
)
async def embeddings(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    adapted = Adaptations()
    body = await _read(request, EmbedTextBody, adapted)
    await answer_by(request, send, older_embed_request(body, adapted.note), adapted, older_embed_answer)


@Described(summary="The models, as Ollama's API lists them.", group="Ollama", answer=OllamaModels)
async def tags(scope: Scope, receive: Receive, send: Send) -> None:
    models = [listed(model) for model in await all_models(Request(scope, receive))]
    await json_response(OllamaModels(models))(scope, receive, send)


@Described(summary="The models that are loaded, as Ollama's API lists them.", group="Ollama", answer=OllamaModels)
async def ps(scope: Scope, receive: Receive, send: Send) -> None:
    loaded = [model for model in await all_models(Request(scope, receive)) if model.get("is_loaded", True)]
    models = [listed(model, is_running=True) for model in loaded]
    await json_response(OllamaModels(models))(scope, receive, send)


@Described(
    summary="A model, as Ollama's API shows it.",
    group="Ollama",
    body=NamedBody,
    answer=ShownModel,
    example={"model": "demo"},
    errors=(NotFound,),
)
async def show(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    body = await _read(request, NamedBody, Adaptations())
    await json_response(shown(await model_named(request, _name_in(body))))(scope, receive, send)


@Described(
    summary="Whether a model is here. Others are not downloaded.",
    group="Ollama",
    body=NamedBody,
    answer=PullStatus,
    alternatives=(NDJSON,),
    example={"model": "demo"},
)
async def pull(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer that a model is here. Others are refused, because a server loads none that it wasn't started with."""
    request = Request(scope, receive)
    body = await _read(request, NamedBody, Adaptations())
    try:
        await model_named(request, _name_in(body))
    except Refused as refused:
        advice = "To serve another one, start a server with it: 'oaiserve serve MODEL' downloads it"
        raise NotFound(f"{refused.message} {advice}.", param="model") from None
    await _send_json(request, send, encode(PullStatus()), is_line=body.stream is not False)


@Described(summary="The version of Ollama whose API this is.", group="Ollama", answer=OllamaVersion)
async def version(scope: Scope, receive: Receive, send: Send) -> None:
    own = msgspec.json.decode(await asked(Request(scope, receive), "/version"))["version"]
    await json_response(OllamaVersion(API_VERSION, f"oaiserve {own}"))(scope, receive, send)


@Described(summary="Refused, with what does it instead.", group="Ollama", errors=(NotFound,))
async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotFound(f"This server {_REFUSED[scope['path'].removeprefix('/api/')]}.")


def _name_in(body: NamedBody) -> str:
    if not (name := body.model or body.name):
        raise InvalidRequest("Missing required parameter: 'model'.", param="model")
    return name
