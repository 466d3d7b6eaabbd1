"""/v2/embed: the vectors of texts in the form of Cohere's API, with numbers of several types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HTTPRequest

from oaiserve.engine.request import Pooled, PromptDone, Usage
from oaiserve.engine.types.pooling import Pooling
from oaiserve.errors import InvalidRequest
from oaiserve.plugins.pooling import inputs as pooling
from oaiserve.plugins.pooling.embeddings import size_of
from oaiserve.plugins.pooling.inputs import Vector
from oaiserve.routes.answer.common_shape import encode, joined
from oaiserve.routes.answer.respond import Answer, pooled_answer_to
from oaiserve.routes.intake.body_types import MAX_INT32, ModelName, Priority
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.object_types import Integer, described
from oaiserve.routes.intake.parameters import integer
from oaiserve.routes.intake.read import Intake, read
from oaiserve.routes.operation import Operation

InputType = Literal["search_document", "search_query", "classification", "clustering", "image"]
NumberType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]

# Names, in lower case, that models give to their prompts for each type of input.
_PROMPT_NAMES = {
    "search_query": ("search_query", *pooling.QUERY_NAMES),
    "search_document": ("search_document", *pooling.DOCUMENT_NAMES),
    "classification": ("classification",),
    "clustering": ("clustering",),
}


def _int8(vector: Vector) -> np.ndarray[Any, np.dtype[np.int8]]:
    return np.rint(vector * 127).astype(np.int8)


# Numbers of a vector of length 1. A bit is set for each positive one.
_NUMBERS: dict[str, Callable[[Vector], list[float] | list[int] | str]] = {
    "float": lambda vector: vector.tolist(),
    "int8": lambda vector: _int8(vector).tolist(),
    "uint8": lambda vector: (_int8(vector).astype(np.int16) + 128).tolist(),
    "binary": lambda vector: (np.packbits(vector > 0).astype(np.int16) - 128).tolist(),
    "ubinary": lambda vector: np.packbits(vector > 0).tolist(),
    "base64": pooling.as_base64,
}


class EmbedInput(msgspec.Struct):
    """An input with one text."""

    content: Annotated[list[dict[str, Any]], described("One part: a text.", minItems=1, maxItems=1)]


class EmbedBody(msgspec.Struct, kw_only=True):
    """The texts to embed, and how, in Cohere's form."""

    model: ModelName = None
    texts: Annotated[list[str] | None, described("The texts.", maxItems=pooling.MAX_TEXTS)] = None
    inputs: Annotated[list[EmbedInput] | None, described("The texts, in another form.", maxItems=pooling.MAX_TEXTS)] = (
        None
    )
    images: Annotated[list[str] | None, described("Are refused: models here embed texts.", maxItems=0)] = None
    input_type: Annotated[
        InputType | None, described("Selects the model's prompt, which comes before each text. Images are refused.")
    ] = None
    embedding_types: Annotated[
        list[NumberType] | None,
        described("int8 has each number times 127, and binary a bit for each; base64 is that of float32."),
    ] = None
    output_dimension: Annotated[
        Integer | None, described("Cut vectors to this many numbers, if the model can.", 1, MAX_INT32)
    ] = None
    max_tokens: Annotated[Integer | None, described("Cut texts to this many tokens.", 1, MAX_INT32)] = None
    truncate: Annotated[
        Literal["NONE", "START", "END"] | None,
        described("Where longer texts are cut, or NONE to refuse them. Default: END. START is refused."),
    ] = None
    priority: Priority = None


class ByType(msgspec.Struct):
    """The vectors by the type of their numbers, in the order of the texts."""

    floats: list[list[float]] | UnsetType = msgspec.field(default=UNSET, name="float")
    int8: list[list[int]] | UnsetType = UNSET
    uint8: list[list[int]] | UnsetType = UNSET
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET
    base64: list[str] | UnsetType = UNSET


class APIVersion(msgspec.Struct):
    """The version of Cohere's API."""

    version: str = "2"


class EmbeddedTokens(msgspec.Struct):
    """The number of tokens of the texts."""

    input_tokens: int


class EmbedMeta(msgspec.Struct):
    """The length of the texts, as Cohere reports it: in two places."""

    billed_units: EmbeddedTokens
    tokens: EmbeddedTokens
    api_version: APIVersion = msgspec.field(default_factory=APIVersion)


class EmbedAnswer(msgspec.Struct):
    """The vectors, and their texts."""

    id: str
    embeddings: ByType
    texts: list[str]
    meta: EmbedMeta
    response_type: Literal["embeddings_by_type"]


@Operation(
    summary="The vectors of texts, as Cohere's API has them.",
    group="Embeddings and scores",
    body=EmbedBody,
    answer=EmbedAnswer,
    example={"texts": ["What is the capital of France?", "Paris"], "input_type": "search_query"},
)
async def embed(http: HTTPRequest) -> Answer:
    return await read(http, EmbedBody, _answer, tasks=("embed",), id_prefix="embd-")


def _answer(intake: Intake[EmbedBody]) -> Answer:
    body = intake.body
    model = pooling.pooling_of(intake)
    param, texts = _texts(body)
    types = list(dict.fromkeys(body.embedding_types or ["float"]))
    size = size_of(body, model, "output_dimension")
    before = _text_before(intake, model)
    prompts = pooling.text_prompts(texts, before, param, _limit(body, intake.serving.engine.max_model_len))

    def whole(_prompts: Sequence[PromptDone], pooled: Sequence[Pooled], usage: Usage) -> Iterator[bytes]:
        vectors = [pooling.unit(pooling.values_of(each, size)) for each in pooled]
        yield b'{"id":' + encode(intake.head.id) + b',"embeddings":'
        separator = b"{"
        for name in types:
            yield separator + encode(name) + b":"
            yield from joined((encode(_NUMBERS[name](vector)),) for vector in vectors)
            separator = b","
        tokens = EmbeddedTokens(usage.prompt_tokens)
        rest = {"texts": texts, "meta": EmbedMeta(tokens, tokens), "response_type": "embeddings_by_type"}
        yield b"}," + encode(rest)[1:]

    params: dict[str, str | int | float | bool] = {"encoding_format": ",".join(types)}
    if size is not None:
        params["dimensions"] = size
    return pooled_answer_to(intake, prompts, whole, params)


def _texts(body: EmbedBody) -> tuple[str, list[str]]:
    """Return the texts, and the field that has them. Raises InvalidRequest."""
    if body.images or body.input_type == "image":
        param = "images" if body.images else "input_type"
        raise InvalidRequest("This server embeds texts only. Please leave the images out.", param=param)
    if (body.texts is None) == (body.inputs is None):
        raise InvalidRequest("Give either 'texts' or 'inputs'.", param="texts")
    if body.inputs is None:
        param = "texts"
        texts = body.texts or []
    else:
        param = "inputs"
        texts = [_text_of(each, f"inputs[{place}]") for place, each in enumerate(body.inputs)]
    pooling.check_number(texts, param)
    pooling.check_not_empty(texts, param)
    return param, texts


def _text_of(given: EmbedInput, where: str) -> str:
    match given.content:
        case [{"type": "text", "text": str(text)}]:
            return text
    kinds = ", ".join(str(part.get("type"))[:20] for part in given.content[:3]) or "none"
    raise invalid("inputs", f"must have one part of the type text, got {kinds}", f"{where}.content")


def _limit(body: EmbedBody, longest: int) -> int | None:
    """Return the number of tokens to which texts are cut, or None if they are not cut."""
    limit = integer(body, "max_tokens")
    if body.truncate == "START":
        reason = "this server cuts texts at their end, so it must be 'END' or 'NONE', got 'START'"
        raise invalid("truncate", reason)
    if body.truncate == "NONE":
        if limit is not None and limit < longest:
            raise invalid("max_tokens", f"cuts texts, which 'truncate': 'NONE' forbids, got {show(limit)}")
        return None
    return longest if limit is None else min(limit, longest)


def _text_before(intake: Intake[EmbedBody], model: Pooling) -> str:
    """Return the model's prompt for the type of input, or else its default one."""
    input_type = intake.body.input_type
    if input_type is None:
        return model.default_prompt
    prompt = pooling.prompt_named(model, _PROMPT_NAMES[input_type])
    if prompt is None:
        intake.exchange.adaptations.note("input_type", "this model has no prompt for it")
        return model.default_prompt
    return prompt
