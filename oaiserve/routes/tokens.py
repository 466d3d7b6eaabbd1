"""/tokenize, /detokenize and /tokenizer_info: the model's tokenizer over HTTP, with the bodies and answers of vLLM.

The first two work in the tokenize stage, in turns with all other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from oaiserve.engine.request import Prompt, TextPrompt, TooManyTokens
from oaiserve.errors import InvalidRequest, ModelNotFound
from oaiserve.http.fair_turns import Work
from oaiserve.routes.adaptations import Adaptations, Note
from oaiserve.routes.chat.messages import build_prompt
from oaiserve.routes.chat.tools import functions_of, shown_tools
from oaiserve.routes.dialects.dialect import Dialect
from oaiserve.routes.door.middleware import json_response
from oaiserve.routes.intake.body_types import DetokenizeBody, TokenizeBody
from oaiserve.routes.intake.decode import num_ids
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.media import MediaReader, read_media
from oaiserve.routes.intake.object_types import Integer
from oaiserve.routes.intake.parameters import token_ids, with_template_parameters
from oaiserve.routes.intake.read import read_parsed
from oaiserve.routes.intake.turns import in_turns
from oaiserve.routes.operation import Operation, Parameter
from oaiserve.routes.serving import Serving, serving_of

# Most tokens of a text, or of a list of ids. People count the tokens of documents that are longer than the context, so
# this is twice the longest usual context: the length of some books. The answer then has two megabytes.
MOST_TOKENS = 2**18
PIECE_TOKENS = 2**13  # rendered in one turn
MODEL = Parameter("model", "The name of the model. Default: the server's.")


class Tokenized(msgspec.Struct):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    """The text of tokens."""

    prompt: str


@Operation(
    summary="The tokens of a text, or of messages.",
    group="Tokenizer",
    body=TokenizeBody,
    answer=Tokenized,
    example={"prompt": "Good morning", "return_token_strs": True},
)
async def tokenize(request: Request) -> Response:
    adaptations = Adaptations()
    body, num_bytes = await read_parsed(request, TokenizeBody, adaptations.note)
    media = await read_media(request, body, num_bytes)
    work = _tokenize(serving_of(request), body, media, adaptations.note)
    return await answer_in_turns(request, body.model, work, num_bytes + media.num_bytes, adaptations)


@Operation(
    summary="The text of tokens.",
    group="Tokenizer",
    body=DetokenizeBody,
    answer=Detokenized,
    example={"tokens": [19556, 905]},
)
async def detokenize(request: Request) -> Response:
    serving = serving_of(request)
    most = max(MOST_TOKENS, serving.engine.max_model_len)

    def check_number(values: Mapping[str, msgspec.Raw]) -> None:
        if (number := num_ids(values.get("tokens"))) > most:
            raise invalid("tokens", f"must have at most {most} ids, got {number}. Send them in parts")

    body, num_bytes = await read_parsed(request, DetokenizeBody, check_given=check_number)
    return await answer_in_turns(request, body.model, _detokenize(serving, body.tokens), num_bytes)


class TokenizerInfo(msgspec.Struct):
    """Everything a client needs to render prompts itself: special tokens as texts, and the chat template in Jinja."""

    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None
    chat_template: str | None = None


@Operation(
    summary="The special tokens and the chat template.",
    group="Tokenizer",
    answer=TokenizerInfo,
    query=(MODEL,),
    errors=(ModelNotFound,),
)
async def tokenizer_info(request: Request) -> Response:
    """Describe the tokenizer. lm-eval requests this first, to decide whether it can use the server's tokenizer."""
    serving = serving_of(request)
    serving.check_model(request.query_params.get(MODEL.name))
    stored = serving.engine.tokenizer.stored
    source = stored.chat_template
    template = source.get("default") if isinstance(source, dict) else source
    return json_response(msgspec.convert(stored.special_tokens_map | {"chat_template": template}, TokenizerInfo))


async def answer_in_turns(
    request: Request,
    model: str | None,
    work: Work[bytes],
    num_bytes: int,
    adaptations: Adaptations | None = None,
) -> Response:
    serving_of(request).check_model(model)
    content = await in_turns(request, work, num_bytes)
    headers = {} if adaptations is None else adaptations.headers()
    return Response(content, media_type="application/json", headers=headers)


def _tokenize(serving: Serving, body: TokenizeBody, media: MediaReader, note: Note) -> Work[bytes]:
    ids = yield from encoded(serving, _prompt(body, serving.dialect, media, note))
    tokenizer = serving.engine.tokenizer
    max_model_len = serving.engine.max_model_len
    rendered = yield from _rendered(ids, lambda part: part)
    texts = b"null"
    if body.return_token_strs:
        texts = yield from _rendered(ids, lambda part: tokenizer.lone_texts(part))
    return b'{"count":%d,"max_model_len":%d,"tokens":%b,"token_strs":%b}' % (len(ids), max_model_len, rendered, texts)


def encoded(serving: Serving, prompt: Prompt) -> Work[list[int]]:
    """Return the tokens of a prompt. Raises InvalidRequest if there are too many."""
    most = max(MOST_TOKENS, serving.engine.max_model_len)
    try:
        return (yield from serving.engine.encode(prompt, most))
    except TooManyTokens as error:
        least = "" if error.is_exact else "at least "
        reason = f"it has {least}{error.num_tokens} tokens, but this route takes at most {most}. Send it in parts"
        raise invalid(prompt.param, reason) from error


def _detokenize(serving: Serving, tokens: Sequence[Integer]) -> Work[bytes]:
    size = serving.engine.vocab_size
    ids: list[int] = []
    for start in range(0, len(tokens), PIECE_TOKENS):
        if start:
            yield None
        part = token_ids("tokens", tokens[start : start + PIECE_TOKENS])
        if max(part) >= size:
            raise invalid("tokens", f"a token id must be < {size}, got {show(max(part))}")
        ids += part
    return msgspec.json.encode(Detokenized(serving.engine.tokenizer.decode(ids)))


def _rendered(ids: list[int], values: Callable[[list[int]], Sequence[object]]) -> Work[bytes]:
    parts = []
    for start in range(0, len(ids), PIECE_TOKENS):
        if start:
            yield None
        parts.append(msgspec.json.encode(values(ids[start : start + PIECE_TOKENS]))[1:-1])
    return b"[" + b",".join(parts) + b"]"


def _prompt(body: TokenizeBody, dialect: Dialect, media: MediaReader, note: Note) -> Prompt:
    if body.messages is not None and body.prompt is None:
        functions = functions_of(body.tools or [], note)
        shown = shown_tools([*functions.values()], [*functions], note)
        body = with_template_parameters(body, note)
        return build_prompt(body, body.messages or (), dialect, shown.tools, media, note)
    if body.prompt is not None and body.messages is None:
        return TextPrompt(body.prompt, body.add_special_tokens is not False)
    raise InvalidRequest("Give either 'prompt' or 'messages'.", param="prompt")
