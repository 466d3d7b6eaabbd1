"""Routes of Hugging Face's Text Embeddings Inference: a vector of each text, or the weight or vector of each token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request as HTTPRequest

from oaiserve.engine.request import Pooled, Prompt, PromptDone, Usage
from oaiserve.errors import InvalidRequest
from oaiserve.plugins.pooling import inputs as pooling
from oaiserve.plugins.pooling.embeddings import size_of, text_before
from oaiserve.routes.answer.common_shape import encode, joined
from oaiserve.routes.answer.respond import Answer, pooled_answer_to
from oaiserve.routes.intake.body_types import MAX_INT32, ModelName, Priority
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.object_types import Integer, described
from oaiserve.routes.intake.read import Intake, read
from oaiserve.routes.operation import Operation


class TextsBody(msgspec.Struct, kw_only=True):
    """The texts whose tokens have weights or vectors, in Hugging Face's form."""

    model: ModelName = None
    inputs: Annotated[str | list[str], described("A text or a list of texts.")]
    prompt_name: Annotated[str | None, described("Which of the model's prompts comes before each text.")] = None
    truncate: Annotated[
        bool | None, described("Cut texts to what the model reads. Default: longer ones are refused.")
    ] = None
    truncation_direction: Annotated[
        Literal["right", "Right", "left", "Left"] | None, described("Where texts are cut. left is refused.")
    ] = None
    priority: Priority = None


class FeaturesBody(TextsBody, kw_only=True):
    """The texts to embed, and how, in Hugging Face's form."""

    normalize: Annotated[bool | None, described("Bring vectors to length 1. Default: true.")] = None
    dimensions: Annotated[
        Integer | None, described("Cut vectors to this many numbers, if the model can.", 1, MAX_INT32)
    ] = None


class TokenWeight(msgspec.Struct):
    """The weight of a token of a text, by its id."""

    index: int
    value: float


def _operation(summary: str, body: type[TextsBody]) -> Operation:
    return Operation(
        summary=summary,
        group="Embeddings and scores",
        body=body,
        answer="application/json",
        example={"inputs": ["What is the capital of France?", "Paris"]},
    )


@_operation("The vectors of texts, as Hugging Face's clients want them.", FeaturesBody)
async def embed(http: HTTPRequest) -> Answer:
    return await read(http, FeaturesBody, _answer, tasks=("embed",), id_prefix="embd-")


def _answer(intake: Intake[FeaturesBody]) -> Answer:
    body = intake.body
    size = size_of(body, pooling.pooling_of(intake), "dimensions")

    def vector(pooled: Pooled) -> bytes:
        values = pooling.values_of(pooled, size)
        return encode((values if body.normalize is False else pooling.unit(values)).tolist())

    def whole(_prompts: Sequence[PromptDone], vectors: Sequence[Pooled], _usage: Usage) -> Iterator[bytes]:
        return joined((vector(each),) for each in vectors)

    params = _params(body)
    if size is not None:
        params["dimensions"] = size
    return pooled_answer_to(intake, _prompts(intake), whole, params)


@_operation("The weights of the tokens of texts, as Hugging Face's clients want them.", TextsBody)
async def embed_sparse(http: HTTPRequest) -> Answer:
    return await read(http, TextsBody, _sparse_answer, tasks=("embed",), id_prefix="embd-")


def _sparse_answer(intake: Intake[TextsBody]) -> Answer:
    if not pooling.pooling_of(intake).has_token_weights:
        raise InvalidRequest(
            f"The model '{intake.head.model}' has no weights for tokens: its folder has no sparse_linear.safetensors. "
            "/embed returns one vector for each text.",
            param="model",
        )

    def weights(pooled: Pooled) -> bytes:
        pairs = pooling.values_of(pooled).reshape(-1, 2).tolist()
        return encode([TokenWeight(int(token_id), weight) for token_id, weight in pairs])

    def whole(_prompts: Sequence[PromptDone], texts: Sequence[Pooled], _usage: Usage) -> Iterator[bytes]:
        return joined((weights(each),) for each in texts)

    return pooled_answer_to(intake, _prompts(intake), whole, _params(intake.body), "token_weights")


@_operation("The vectors of the tokens of texts, as Hugging Face's clients want them.", TextsBody)
async def embed_all(http: HTTPRequest) -> Answer:
    return await read(http, TextsBody, _answer_of_all, tasks=("embed",), id_prefix="embd-")


def _answer_of_all(intake: Intake[TextsBody]) -> Answer:
    size = pooling.pooling_of(intake).token_size
    assert size is not None  # A model that embeds has hidden states.

    def vectors(pooled: Pooled) -> Iterator[bytes]:
        return joined((encode(vector.tolist()),) for vector in pooling.values_of(pooled).reshape(-1, size))

    def whole(_prompts: Sequence[PromptDone], texts: Sequence[Pooled], _usage: Usage) -> Iterator[bytes]:
        return joined(vectors(each) for each in texts)

    return pooled_answer_to(intake, _prompts(intake), whole, _params(intake.body), "token_vectors")


def _prompts(intake: Intake[Any]) -> tuple[Prompt, ...]:
    """Return a prompt for each of the texts. Raises InvalidRequest."""
    body: TextsBody = intake.body
    texts = pooling.strings(body.inputs, "inputs")
    pooling.check_not_empty(texts, "inputs")
    if body.truncate and body.truncation_direction in ("left", "Left"):
        reason = f"this server cuts texts at their end, so it must be 'right', got {show(body.truncation_direction)}"
        raise invalid("truncation_direction", reason)
    limit = intake.serving.engine.max_model_len if body.truncate else None
    before = text_before(body.prompt_name, pooling.pooling_of(intake))
    return pooling.text_prompts(texts, before, "inputs", limit)


def _params(body: TextsBody) -> dict[str, str | int | float | bool]:
    """Return the parameters for a request's record."""
    if body.prompt_name is None:
        return {}
    return {"prompt_name": body.prompt_name}
