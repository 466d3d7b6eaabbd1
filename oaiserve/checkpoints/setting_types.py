"""Finds the setting whose wrong type makes a library fail to read a model's JSON files.

The listed types are those that transformers needs but doesn't check. They are compared only after a failure, so that a
setting may have any value with which the model can be served. Stdlib only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from oaiserve.checkpoints.wrong_settings import wrong_setting
from oaiserve.errors import StartupError

_DTYPE = re.compile(r"c?(half|float|double)|long|short|int|bool|bit|(b?float|q?u?int|complex|bits)\d\w*")
_MOST_SHOWN = 100  # most characters of a value or a name in a message
_ALL = (dict, list, str, int, float, bool, NoneType)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The values that a setting may have."""

    must: str  # follows "must be"
    types: tuple[type, ...]
    holds: Callable[[Any], bool] = lambda _: True  # called with a value of one of these types
    items: _Kind | None = None  # the kind of a list's items
    values: _Kind | None = None  # the kind of an object's values
    keys: Mapping[str, _Kind] = field(default_factory=dict)  # the kinds of an object's values with these keys


def _are_numbers(keys: Iterable[str] | None) -> bool:
    return all(key.removeprefix("-").isdecimal() for key in keys or ())


_TEXT = _Kind(must="a text", types=(str,))
_TEXT_OR_NULL = _Kind(must="a text or null", types=(str, NoneType))
_FLAG = _Kind(must="true or false", types=(bool,))
_FLAG_OR_NULL = _Kind(must="true, false or null", types=(bool, NoneType))
_LIST = _Kind(must="a list", types=(list, str, dict))  # transformers also accepts a text or an object as a list
_SIDE = _Kind(must='"left" or "right"', types=(str,), holds=lambda side: side in ("left", "right"))

# -- config.json ------------------------------------------------------------------------------------------------------

_TORCH_DTYPE = _Kind(
    must="one of torch's, such as bfloat16",
    types=(str, NoneType),
    holds=lambda name: name is None or _DTYPE.fullmatch(name) is not None,
)
_IN_EACH_CONFIG = {
    "auto_map": _Kind(must="an object", types=(dict, list, str)),
    "dtype": _TORCH_DTYPE,
    "torch_dtype": _TORCH_DTYPE,
    "id2label": _Kind(
        must='an object such as {"0": "no", "1": "yes"}, or null',
        types=(dict, NoneType),
        holds=_are_numbers,
    ),
    "layer_types": _Kind(
        must="a list with the name of each layer's type, or null", types=(list, str, dict, NoneType), items=_TEXT
    ),
    "num_labels": _Kind(must="an integer", types=(int, bool)),
    **dict.fromkeys(("num_experts", "num_local_experts"), _Kind(must="an integer or null", types=(int, NoneType))),
}
_INNER_CONFIG = _Kind(must="an object", types=_ALL, keys=_IN_EACH_CONFIG)
_IN_CONFIG = _IN_EACH_CONFIG | dict.fromkeys(("text_config", "vision_config", "audio_config"), _INNER_CONFIG)

# -- files of tokenizers ----------------------------------------------------------------------------------------------

_PROPERTIES = {
    "content": _TEXT_OR_NULL,
    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), _FLAG),
}
_TOKEN_OBJECT = _Kind(must='an object such as {"content": "<s>"}', types=(dict,), keys=_PROPERTIES)
_TOKEN = _Kind(
    must='a text or an object such as {"__type": "AddedToken", "content": "<s>"}',
    types=(str, dict),
    holds=lambda token: isinstance(token, str) or token.get("__type") == "AddedToken",
    keys=_PROPERTIES,
)
_ROLE = _Kind(
    must=f"{_TOKEN.must}, or null",
    types=(str, dict, NoneType),
    holds=lambda token: token is None or _TOKEN.holds(token),
    keys=_PROPERTIES,
)
_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_MORE_TOKENS = _Kind(
    must="a list of tokens, an object with tokens by name, or null",
    types=(list, dict, NoneType),
    items=_TOKEN,
    values=_TOKEN,
)
_CLASSES = _Kind(
    must="the names of two classes, of which one may be null",
    types=(list, str, NoneType),
    holds=lambda names: not isinstance(names, list) or (len(names) > 1 and names[:2] != [None, None]),
    items=_TEXT_OR_NULL,
)
_TEMPLATES = _Kind(
    must="a template, a list of objects that have a name and a template, or null",
    types=(str, list, dict, NoneType),
    items=_Kind(
        must="an object that has a name and a template",
        types=(dict,),
        holds=lambda named: {"name", "template"} <= named.keys(),
        keys={"name": _TEXT, "template": _TEXT},
    ),
    values=_TEXT,
)
_IN_TOKENIZER_CONFIG = {
    **dict.fromkeys(_ROLES, _ROLE),
    **dict.fromkeys(("padding_side", "truncation_side"), _SIDE),
    **dict.fromkeys(("init_inputs", "fast_tokenizer_files", "model_input_names"), _LIST),
    "add_prefix_space": _FLAG_OR_NULL,
    "added_tokens_decoder": _Kind(
        must='an object with tokens by id, such as {"0": {"content": "<s>"}}',
        types=(dict,),
        holds=_are_numbers,
        values=_TOKEN_OBJECT,
    ),
    "additional_special_tokens": _MORE_TOKENS,
    "auto_map": _Kind(
        must=f"an object with {_CLASSES.must}",
        types=(dict, list),
        holds=lambda names: not isinstance(names, list) or _CLASSES.holds(names),
        items=_TEXT_OR_NULL,
        keys={"AutoTokenizer": _CLASSES},
    ),
    "chat_control_tokens": _Kind(must="a list of texts, or null", types=(list, NoneType)),
    "chat_template": _TEMPLATES,
    "extra_special_tokens": _MORE_TOKENS,
    "model_specific_special_tokens": _MORE_TOKENS,
    "split_special_tokens": _FLAG,
    "tokenizer_class": _TEXT_OR_NULL,
}
_TOKEN_IN_MAP = _Kind(
    must='a text, an object such as {"content": "<s>"}, or null', types=(str, dict, NoneType), keys=_PROPERTIES
)
_IN_TOKENS_MAP = {
    **dict.fromkeys(_ROLES, _TOKEN_IN_MAP),
    "additional_special_tokens": _Kind(must="a list of tokens, or null", types=(list, NoneType), items=_TOKEN),
    "extra_special_tokens": _Kind(
        must=_MORE_TOKENS.must,
        types=_MORE_TOKENS.types,
        items=_Kind(must='a text or an object such as {"content": "<s>"}', types=(str, dict), keys=_PROPERTIES),
        values=_TOKEN,
    ),
}
_ADDED_TOKENS = _Kind(must="a list of the added tokens", types=(list,), items=_TOKEN_OBJECT)

CONFIG = "config.json"
_FILES = {
    CONFIG: _Kind(must="an object", types=(dict,), keys=_IN_CONFIG),
    "tokenizer_config.json": _Kind(must="an object", types=(dict,), keys=_IN_TOKENIZER_CONFIG),
    "special_tokens_map.json": _Kind(
        must="an object", types=(dict,), keys=_IN_TOKENS_MAP, values=_Kind(must="a token", types=_ALL, keys=_PROPERTIES)
    ),
    "added_tokens.json": _Kind(
        must="an object with the id of each token",
        types=(dict,),
        values=_Kind(must="the id of a token", types=(int, float, bool, str, NoneType)),
    ),
    "chat_template.json": _Kind(must="an object", types=_ALL, keys={"chat_template": _TEMPLATES}),
    "tokenizer.json": _Kind(
        must="an object with the list added_tokens",
        types=(dict,),
        holds=lambda parts: "added_tokens" in parts,
        keys={"added_tokens": _ADDED_TOKENS},
    ),
}


@contextmanager
def settings_named(folder: Path, files: Iterable[str] = tuple(_FILES)) -> Iterator[None]:
    """Turn errors of the `with` block, which reads these files of a model, into a StartupError that names the setting.

    This applies if a file is not valid JSON, or if a setting has a type with which it can't be read."""
    try:
        yield
    except (StartupError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if wrong_setting(error) is None:  # The error itself names no setting.
            for path in (folder / name for name in files):
                if path.is_file() and (fault := _fault_in(path)) is not None:
                    raise StartupError(f"'{path}' cannot be used: {fault}.") from error
        raise


def _fault_in(path: Path) -> str | None:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        return f"it is not valid JSON ({error})"
    return _fault(content, _FILES[path.name])


def _fault(value: Any, kind: _Kind, name: str = "") -> str | None:
    """Return the fault of a value, or of the first wrong value inside it."""
    if type(value) not in kind.types or not kind.holds(value):
        subject = f"its {name[:_MOST_SHOWN]}" if name else "it"
        return f"{subject} is {json.dumps(value)[:_MOST_SHOWN]}, but must be {kind.must}"
    inner: list[tuple[Any, _Kind | None, str]] = []
    if isinstance(value, list):
        inner = [(item, kind.items, f"{name}[{number}]") for number, item in enumerate(value)]
    elif isinstance(value, dict):
        prefix = f"{name}." if name else ""
        inner = [(each, kind.keys.get(key, kind.values), f"{prefix}{key}") for key, each in value.items()]
    faults = (_fault(each, of_kind, place) for each, of_kind, place in inner if of_kind is not None)
    return next((fault for fault in faults if fault is not None), None)
