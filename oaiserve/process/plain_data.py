"""Encodes and decodes messages as MessagePack: plain data, so decoding runs no code from a message.

msgspec knows dataclasses, enumerations and tuples. This module adds arrays, log-probabilities, errors, paths and sizes,
and those texts and numbers from clients that MessagePack cannot represent.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.msgpack import Ext

from oaiserve.checkpoints.adapters import BadAdapter
from oaiserve.config import Bytes
from oaiserve.engine.request import TooManyTokens
from oaiserve.engine.types.logprobs import TokenLogprobs
from oaiserve.errors import APIError, InternalError, StartupError, kinds_of

Kind = TypeVar("Kind")

# Extension codes of MessagePack.
_LARGE_INTEGER = 1  # beyond 64 bits: its decimal digits
_BROKEN_TEXT = 2  # with half of a surrogate pair

_ERRORS = (APIError, BadAdapter, StartupError, TooManyTokens)  # Messages may contain these and their subclasses.


def encode(message: object) -> bytes:
    """Return a message as bytes."""
    try:
        return _encode(message)
    except (OverflowError, UnicodeEncodeError):  # Only a client's JSON has such values.
        return _encode(_boxed(msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=_form)))


def decoder(kind: type[Kind] | Any) -> Callable[[bytes | msgspec.Raw], Kind]:
    """Return the function that decodes messages of one type. It raises msgspec.MsgspecError for anything else."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_made, ext_hook=_unboxed).decode


def _form(value: Any) -> object:
    """Return the plain form of a value whose type msgspec doesn't know."""
    if isinstance(value, TokenLogprobs):
        ids, texts, logprobs, ends, ranks = value.columns
        return ids.tobytes(), texts, logprobs.tobytes(), ends.tobytes(), ranks.tobytes()
    if isinstance(value, array):
        return value.typecode.encode() + value.tobytes()
    if isinstance(value, Exception):
        kinds = [kind.__name__ for kind in type(value).__mro__ if issubclass(kind, Exception)]
        return kinds, str(value).encode(errors="replace").decode(), vars(value)
    if isinstance(value, Path):
        return str(value)
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "item"):  # a NumPy scalar
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} has no plain form")


def _made(kind: type, form: Any) -> Any:
    """Rebuild a value of type `kind` from its plain form."""
    if kind is TokenLogprobs:
        ids, texts, logprobs, ends, ranks = form
        return TokenLogprobs((array("i", ids), texts, array("d", logprobs), array("q", ends), array("i", ranks)))
    if kind is array:
        return array(chr(form[0]), form[1:])
    if issubclass(kind, Exception):
        return _error(*form)
    if kind in (Path, Bytes):
        return kind(form)
    raise NotImplementedError(f"{kind.__name__} has no plain form")


def _error(names: list[str], text: str, attributes: dict[str, Any]) -> Exception:
    """Return an error of the nearest class that this process knows, without calling its constructor."""
    known: dict[str, type[Exception]] = {}
    for kind in _ERRORS:
        known |= kinds_of(kind)
    nearest = next((known[name] for name in names if name in known), InternalError)
    error = nearest.__new__(nearest, text)
    if nearest is InternalError and "message" not in attributes:
        attributes = {"message": text, "param": None, "code": InternalError.code, "retry_after_seconds": None}
    vars(error).update(attributes)
    return error


def _boxed(value: Any) -> Any:
    """Return plain data with its large integers and broken texts replaced by extensions."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return Ext(_LARGE_INTEGER, str(value).encode())
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return Ext(_BROKEN_TEXT, value.encode(errors="surrogatepass"))
    if isinstance(value, dict):
        return {_boxed(key): _boxed(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_boxed(each) for each in value]
    return value


def _unboxed(code: int, data: memoryview) -> Any:
    if code == _LARGE_INTEGER:
        return int(bytes(data))
    if code == _BROKEN_TEXT:
        return bytes(data).decode(errors="surrogatepass")
    raise ValueError(f"{code} is no extension of these messages")


_encode = msgspec.msgpack.Encoder(enc_hook=_form).encode


def convert(form: Any, kind: type[Kind] | Any) -> Kind:
    """Return a value of type `kind` from its plain form, which was decoded without a type. Raises
    msgspec.MsgspecError."""
    value: Kind = msgspec.convert(form, kind, dec_hook=_made)
    return value
