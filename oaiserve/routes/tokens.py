"""/tokenize and /detokenize: the model's tokenizer over HTTP, with the bodies and answers of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from oaiserve.engine.request import Prompt, TextPrompt
from oaiserve.errors import InvalidRequest
from oaiserve.routes import protocol
from oaiserve.routes.body import off_loop_if_large, read_body
from oaiserve.routes.chat import build_prompt
from oaiserve.routes.middleware import json_response
from oaiserve.routes.protocol import DetokenizeBody, TokenizeBody
from oaiserve.routes.serving import serving_of

Body = TypeVar("Body", TokenizeBody, DetokenizeBody)
T = TypeVar("T")

_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


async def tokenize(request: Request) -> Response:
    serving = serving_of(request)
    body, prompt = await _checked_body(request, _tokenize_decoder, _prompt)
    tokenizer = serving.engine.tokenizer
    ids = await run_in_threadpool(tokenizer.encode, prompt)
    texts = None
    if body.return_token_strs:
        texts = await run_in_threadpool(lambda: [tokenizer.token_text(token_id) for token_id in ids])
    max_model_len = serving.engine.max_model_len
    return json_response({"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": texts})


async def detokenize(request: Request) -> Response:
    serving = serving_of(request)
    _, ids = await _checked_body(request, _detokenize_decoder, lambda body: protocol.token_ids("tokens", body.tokens))
    size = serving.engine.vocab_size
    if ids and max(ids) >= size:
        raise protocol.invalid("tokens", f"a token id must be < {size}, got {protocol.show(max(ids))}")
    text = await run_in_threadpool(serving.engine.tokenizer.decode, list(ids))
    return json_response({"prompt": text})


async def _checked_body(
    request: Request, decoder: msgspec.json.Decoder[Body], take: Callable[[Body], T]
) -> tuple[Body, T]:
    """Return the body, and what `take` makes of it. Raises an APIError."""
    serving = serving_of(request)
    content = await read_body(request, serving)

    def check() -> tuple[Body, T]:
        body = protocol.parse(decoder, content, serving.unknown_names)
        serving.check_model(body.model)
        return body, take(body)

    return await off_loop_if_large(content, check)


def _prompt(body: TokenizeBody) -> Prompt:
    if body.messages is not None and body.prompt is None:
        return build_prompt(body, body.messages)
    if body.prompt is not None and body.messages is None:
        return TextPrompt(body.prompt, body.add_special_tokens is not False)
    raise InvalidRequest("Give either 'prompt' or 'messages'.", param="prompt")
