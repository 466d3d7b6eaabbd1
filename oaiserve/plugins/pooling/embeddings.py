"""/v1/embeddings: the vector of each text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import msgspec
from starlette.requests import Request as HTTPRequest

from oaiserve.engine.request import Pooled, Prompt, PromptDone, TokenPrompt, Usage
from oaiserve.engine.types.pooling import Pooling
from oaiserve.plugins.pooling import inputs as pooling
from oaiserve.routes.answer.common_shape import encode
from oaiserve.routes.answer.respond import Answer, pooled_answer_to
from oaiserve.routes.intake.body_types import MAX_INT32
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.object_types import Integer, Prompts, described
from oaiserve.routes.intake.parameters import inputs_of, integer, prompt_ids
from oaiserve.routes.intake.read import Intake, read
from oaiserve.routes.operation import Operation


class EmbeddingBody(pooling.PoolingBody, kw_only=True):
    """The texts to embed, and how."""

    input: Annotated[Prompts, described("A text, a list of texts, a list of token ids, or a list of such lists.")]
    encoding_format: Annotated[
        Literal["float", "base64"] | None, described("base64 is that of float32, little-endian.")
    ] = None
    dimensions: Annotated[
        Integer | None, described("Cut vectors to this many numbers, if the model can.", 1, MAX_INT32)
    ] = None
    normalize: Annotated[bool | None, described("Bring vectors to length 1. Default: true.")] = None
    add_special_tokens: Annotated[bool | None, described("Add the tokenizer's own tokens. Default: true.")] = None
    prompt_name: Annotated[str | None, described("Which of the model's prompts comes before each text.")] = None


class Embedding(msgspec.Struct, tag_field="object", tag="embedding"):
    """The vector of a text; base64 encodes it as little-endian float32."""

    index: int
    embedding: list[float] | str


class EmbeddingList(pooling.PooledList[Embedding]):
    """The vectors, in the order of the texts."""


@Operation(
    summary="The vectors of texts, with a model that embeds.",
    group="Embeddings and scores",
    body=EmbeddingBody,
    answer=EmbeddingList,
    example={"input": ["What is the capital of France?", "Paris"]},
)
async def embeddings(http: HTTPRequest) -> Answer:
    return await read(http, EmbeddingBody, _answer, tasks=("embed",), id_prefix="embd-")


def _answer(intake: Intake[EmbeddingBody]) -> Answer:
    model = pooling.pooling_of(intake)
    body = intake.body
    is_base64 = body.encoding_format == "base64"
    size = size_of(body, model, "dimensions")

    def item(pooled: Pooled) -> bytes:
        vector = pooling.values_of(pooled, size)
        if body.normalize is not False:
            vector = pooling.unit(vector)
        return encode(Embedding(pooled.index, pooling.as_base64(vector) if is_base64 else vector.tolist()))

    def whole(_prompts: Sequence[PromptDone], vectors: Sequence[Pooled], usage: Usage) -> Iterator[bytes]:
        return pooling.rendered(pooling.list_head(intake.head), "data", map(item, vectors), usage)

    params: dict[str, str | int | float | bool] = {"encoding_format": "base64" if is_base64 else "float"}
    if size is not None:
        params["dimensions"] = size
    if body.prompt_name is not None:
        params["prompt_name"] = body.prompt_name
    return pooled_answer_to(intake, build_prompts(body, model, pooling.most_tokens(intake)), whole, params)


def size_of(body: msgspec.Struct, model: Pooling, param: str) -> int | None:
    """Return the length to which vectors are cut, or None if they stay whole. Raises InvalidRequest."""
    size = integer(body, param)
    if size is None or size == model.size:
        return None
    if model.dimensions is None:
        raise invalid(
            param,
            f"this model's vectors have {model.size} numbers, and it was not trained for fewer (its config.json has "
            f"neither 'is_matryoshka' nor 'matryoshka_dimensions'), got {show(size)}",
        )
    if model.dimensions and size not in model.dimensions:
        raise invalid(param, f"must be one of {', '.join(map(str, model.dimensions))}, got {show(size)}")
    if size > model.size:
        raise invalid(param, f"must be <= {model.size}, got {show(size)}")
    return size


def text_before(prompt_name: str | None, model: Pooling) -> str:
    """Return the model's prompt of this name, or its default one. Raises InvalidRequest."""
    if prompt_name is None:
        return model.default_prompt
    if prompt_name not in model.prompts:
        known = ", ".join(map(repr, model.prompts)) or "none"
        raise invalid("prompt_name", f"this model's prompts are: {known}, got {show(prompt_name)}")
    return model.prompts[prompt_name]


def build_prompts(body: EmbeddingBody, model: Pooling, limit: int | None) -> tuple[Prompt, ...]:
    """Return a prompt for each text: a string, a list of strings, a list of token ids, or a list of such lists."""
    before = text_before(body.prompt_name, model)
    inputs, are_ids = inputs_of("input", body.input)
    pooling.check_number(inputs, "input")
    if are_ids:
        return tuple(TokenPrompt(prompt_ids("input", ids)[:limit], "input") for ids in inputs)
    pooling.check_not_empty(inputs, "input")
    special = body.add_special_tokens is not False
    return pooling.text_prompts(inputs, before, "input", limit, special)
