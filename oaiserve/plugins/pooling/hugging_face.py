"""/embed: the vectors of texts in the form of Hugging Face's Text Embeddings Inference: a list of lists of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import msgspec
from starlette.requests import Request as HTTPRequest

from oaiserve.engine.request import Pooled, PromptDone, Usage
from oaiserve.plugins.pooling import inputs as pooling
from oaiserve.plugins.pooling.embeddings import size_of, text_before
from oaiserve.routes.answer.common_shape import encode, joined
from oaiserve.routes.answer.respond import Answer, pooled_answer_to
from oaiserve.routes.intake.body_types import MAX_INT32, ModelName, Priority
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.object_types import Integer, described
from oaiserve.routes.intake.read import Intake, read
from oaiserve.routes.operation import Operation


class FeaturesBody(msgspec.Struct, kw_only=True):
    """The texts to embed, and how, in Hugging Face's form."""

    model: ModelName = None
    inputs: Annotated[str | list[str], described("A text or a list of texts.")]
    normalize: Annotated[bool | None, described("Bring vectors to length 1. Default: true.")] = None
    prompt_name: Annotated[str | None, described("Which of the model's prompts comes before each text.")] = None
    dimensions: Annotated[
        Integer | None, described("Cut vectors to this many numbers, if the model can.", 1, MAX_INT32)
    ] = None
    truncate: Annotated[
        bool | None, described("Cut texts to what the model reads. Default: longer ones are refused.")
    ] = None
    truncation_direction: Annotated[
        Literal["right", "Right", "left", "Left"] | None, described("Where texts are cut. left is refused.")
    ] = None
    priority: Priority = None


@Operation(
    summary="The vectors of texts, as Hugging Face's clients want them.",
    group="Embeddings and scores",
    body=FeaturesBody,
    answer="application/json",
    example={"inputs": ["What is the capital of France?", "Paris"]},
)
async def embed(http: HTTPRequest) -> Answer:
    return await read(http, FeaturesBody, _answer, tasks=("embed",), id_prefix="embd-")


def _answer(intake: Intake[FeaturesBody]) -> Answer:
    body = intake.body
    model = pooling.pooling_of(intake)
    size = size_of(body, model, "dimensions")
    texts = pooling.strings(body.inputs, "inputs")
    pooling.check_not_empty(texts, "inputs")
    if body.truncate and body.truncation_direction in ("left", "Left"):
        reason = f"this server cuts texts at their end, so it must be 'right', got {show(body.truncation_direction)}"
        raise invalid("truncation_direction", reason)
    limit = intake.serving.engine.max_model_len if body.truncate else None
    prompts = pooling.text_prompts(texts, text_before(body.prompt_name, model), "inputs", limit)

    def vector(pooled: Pooled) -> bytes:
        values = pooling.values_of(pooled, size)
        return encode((values if body.normalize is False else pooling.unit(values)).tolist())

    def whole(_prompts: Sequence[PromptDone], vectors: Sequence[Pooled], _usage: Usage) -> Iterator[bytes]:
        return joined((vector(each),) for each in vectors)

    params: dict[str, str | int | float | bool] = {} if size is None else {"dimensions": size}
    if body.prompt_name is not None:
        params["prompt_name"] = body.prompt_name
    return pooled_answer_to(intake, prompts, whole, params)
