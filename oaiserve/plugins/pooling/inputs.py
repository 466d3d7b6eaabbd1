"""The parameters, prompts and vectors that the routes for embeddings and scores share."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
import numpy as np

from oaiserve.engine.request import Pooled, Prompt, TextPrompt, Usage
from oaiserve.engine.types.pooling import Pooling
from oaiserve.errors import InvalidRequest
from oaiserve.routes.answer.common_shape import encode, joined
from oaiserve.routes.intake.body_types import ModelName, Priority
from oaiserve.routes.intake.invalid import invalid
from oaiserve.routes.intake.object_types import Integer, described
from oaiserve.routes.intake.parameters import integer
from oaiserve.routes.intake.read import Head, Intake

MAX_TEXTS = 2048  # texts of one request: OpenAI's limit
# Names, in lower case, that models give to their prompts for the two sides of a search.
QUERY_NAMES = ("query",)
DOCUMENT_NAMES = ("document", "passage", "corpus")
Item = TypeVar("Item", bound=msgspec.Struct)
Vector = np.ndarray[tuple[int], np.dtype[np.float32]]


class PoolingBody(msgspec.Struct, kw_only=True):
    """The parameters that all of these routes accept. None means that the client did not set it."""

    model: ModelName = None
    # There is no maximum here, because it depends on the model.
    truncate_prompt_tokens: Annotated[
        Integer | None, described("Cut texts to this many tokens; -1: to the most that the model reads.", -1)
    ] = None
    priority: Priority = None


def pooling_of(intake: Intake[Any]) -> Pooling:
    """Return the pooling of the model, which has been checked for the task."""
    pooling = intake.serving.engine.pooling
    assert pooling is not None
    return pooling


def most_tokens(intake: Intake[PoolingBody]) -> int | None:
    """Return the length to which texts are cut, or None if they are not cut. -1 stands for the longest possible
    text."""
    limit = intake.serving.engine.max_model_len
    length = integer(intake.body, "truncate_prompt_tokens", -1, limit)
    if length == 0:
        raise invalid("truncate_prompt_tokens", f"must be -1, or from 1 to {limit}, got 0")
    if length == -1:
        return limit
    return length


def text_prompts(
    texts: Sequence[str], before: str, param: str, limit: int | None, special: bool = True
) -> tuple[Prompt, ...]:
    return tuple(TextPrompt(before + text, special, param, limit) for text in texts)


def prompt_named(model: Pooling, names: Sequence[str]) -> str | None:
    """Return the model's first prompt whose lower-case name is in `names`, in their order, or None."""
    prompts = {name.lower(): text for name, text in model.prompts.items()}
    return next((prompts[name] for name in names if name in prompts), None)


def strings(value: str | list[str] | None, param: str) -> list[str]:
    """Return the texts of a field with a string or a list of strings. Raises InvalidRequest."""
    if value is None:
        raise InvalidRequest(f"Missing required parameter: '{param}'.", param=param)
    texts = [value] if isinstance(value, str) else value
    check_number(texts, param)
    return texts


def check_number(inputs: Sequence[object], param: str) -> None:
    if not inputs:
        raise invalid(param, "must not be an empty list")
    if len(inputs) > MAX_TEXTS:
        raise invalid(param, f"must have at most {MAX_TEXTS} entries, got {len(inputs)}")


def check_not_empty(texts: Sequence[object], param: str) -> None:
    """Raise InvalidRequest if one of the texts is empty."""
    if "" in texts:
        raise invalid(param, f"must not have an empty string, got one at index {texts.index('')}")


def values_of(pooled: Pooled, size: int | None = None) -> Vector:
    return np.frombuffer(pooled.vector, dtype=np.float32)[:size]


def unit(vector: Vector) -> Vector:
    """Return the vector scaled to length 1. A vector of zeros stays as it is."""
    length = np.linalg.norm(vector)
    if length:
        return vector / length
    return vector


def as_base64(vector: Vector) -> str:
    """Return the vector in base64, as little-endian float32."""
    return b64encode(vector.astype("<f4").tobytes()).decode()


class PoolingUsage(msgspec.Struct):
    """The number of tokens of the texts."""

    prompt_tokens: int
    total_tokens: int


class PooledList(msgspec.Struct, Generic[Item]):
    """The answers to texts, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Item]
    usage: PoolingUsage


def list_head(head: Head) -> dict[str, Any]:
    return {"id": head.id, "object": "list", "created": head.created, "model": head.model}


def rendered(head: dict[str, Any], name: str, items: Iterator[bytes], usage: Usage) -> Iterator[bytes]:
    """Yield an answer in JSON while its items are rendered: its head, the list `name`, and its usage."""
    yield encode(head)[:-1] + b',"' + name.encode() + b'":'
    yield from joined((item,) for item in items)
    yield b',"usage":' + encode(PoolingUsage(usage.prompt_tokens, usage.prompt_tokens)) + b"}"
