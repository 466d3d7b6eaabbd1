"""Strategies for plain data: any value of a type, by its annotations."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import strategies as st

from oaiserve.config import Bytes
from oaiserve.engine.types.logprobs import TokenLogprobs
from oaiserve.engine.types.media import MediaFile
from oaiserve.errors import APIError, InvalidRequest, Overloaded

INTEGERS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False)
TEXTS = st.text(max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
ERRORS = st.builds(
    lambda kind, message, seconds: kind(message, param="prompt", retry_after_seconds=seconds),
    st.sampled_from([InvalidRequest, Overloaded, APIError]),
    TEXTS,
    st.none() | st.integers(1, 60),
)


@st.composite
def logprobs(draw: Any) -> TokenLogprobs:
    rows = TokenLogprobs()
    for _ in range(draw(st.integers(0, 3))):
        number = draw(st.integers(1, 3))
        ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=number, max_size=number))
        rows.add(
            ids, [draw(st.binary(max_size=4)) for _ in ids], [draw(FLOATS) for _ in ids], rank=draw(st.integers(0, 9))
        )
    return rows


KNOWN: dict[Any, st.SearchStrategy[Any]] = {
    int: INTEGERS,
    float: FLOATS,
    str: TEXTS,
    bool: st.booleans(),
    bytes: st.binary(max_size=20),
    NoneType: st.none(),
    Any: JSON,
    Path: st.just(Path("/models/a")),
    Bytes: st.integers(0, 2**40).map(Bytes),
    array: st.lists(INTEGERS, max_size=4).map(lambda numbers: array("q", numbers)),
    TokenLogprobs: logprobs(),
    APIError: ERRORS,
    Callable: st.none(),
    # Its content has the type Any for msgspec.
    MediaFile: st.builds(MediaFile, st.just("image"), st.binary(max_size=20) | TEXTS, st.just("low"), TEXTS, TEXTS),
}


def any_of(hint: Any, **known: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for all values of a type. `known` are those of the fields of a class that have others."""
    if hint in KNOWN:
        return KNOWN[hint]
    origin = get_origin(hint)
    inner = [each for each in get_args(hint) if each is not ...]
    if origin in (Union, UnionType):
        return st.one_of([any_of(each) for each in inner])
    if origin is Annotated:
        return any_of(inner[0])
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is tuple and ... not in get_args(hint):
        return st.tuples(*map(any_of, inner))
    if origin in (list, Sequence):
        return st.lists(any_of(inner[0]), max_size=3)
    if origin is tuple:
        return st.lists(any_of(inner[0]), max_size=3).map(tuple)
    if origin is frozenset:
        return st.frozensets(any_of(inner[0]), max_size=3)
    if origin in (dict, Mapping):
        return st.dictionaries(any_of(inner[0]), any_of(inner[1]), max_size=3)
    if origin is not None:
        return KNOWN[origin]
    if issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    if is_dataclass(hint):
        names = [each.name for each in fields(hint)]
    else:
        names = hint.__struct_fields__ if issubclass(hint, msgspec.Struct) else hint._fields
    hints = get_type_hints(hint)
    return st.builds(hint, **{name: known[name] if name in known else any_of(hints[name]) for name in names})
