"""The arguments of calls in a history as JSON objects, because chat templates iterate over them.

An answer that was cut ends inside its arguments, and other servers pass on their models' text unchanged. The text is
read as far as possible. Anything that is not an object becomes the value of one, so that the model still sees it.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable
from typing import Any

import msgspec

RAW_KEY = "arguments"  # key of the object around arguments that are not an object
MOST_DEPTH = 64
_MOST_CHARACTERS = 2**20  # characters of a text that is completed
_MOST_PYTHON = 2**14  # characters of a text that is read as Python, whose parser takes far more memory
_MOST_DIGITS = 4000  # digits of an integer; Python refuses more than 4,300
_TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[{}\[\],]', re.DOTALL)
_CUT_MEMBER = re.compile(r',?\s*(?:"[^"\\]*(?:\\.[^"\\]*)*(?:"\s*(?::\s*)?|\\?\Z))?[-+.\w]*', re.DOTALL)
_CUT_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*(\\(?:u[0-9a-fA-F]{0,3})?)\Z")


def object_text(arguments: object) -> tuple[str, str]:
    """Return the JSON text of an object with the arguments of a call, and how they were changed, or ""."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return "{}", "are empty"
    if not isinstance(arguments, str):
        return _text_of(arguments)
    try:
        if isinstance(value := msgspec.json.decode(arguments), dict) and not is_deep(value, MOST_DEPTH):
            return arguments, ""
    except (msgspec.MsgspecError, RecursionError, ValueError):
        pass
    for read, change in _READERS:
        try:
            value = read(arguments)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        if isinstance(value, str) and value.lstrip()[:1] == "{":
            return object_text(value)[0], "are JSON within a JSON string"
        text, more = _text_of(value)
        return text, change or more or ("are no object" if value is None else "are not quite JSON")
    return _encoded({RAW_KEY: arguments}), "are not valid JSON"


def whole_members(arguments: str) -> str:
    """Return the JSON text of an object with the members of cut arguments that are whole, also within other objects and
    lists."""
    try:
        if isinstance(msgspec.json.decode(arguments), dict):
            return arguments
    except (msgspec.MsgspecError, RecursionError, ValueError):
        pass
    try:
        return _encoded(_completed(arguments, keeps_cut_text=False))
    except (ValueError, RecursionError):
        return "{}"


def _text_of(value: object) -> tuple[str, str]:
    if value is None:
        return "{}", ""
    if is_deep(value, MOST_DEPTH):
        return _encoded({RAW_KEY: _shallow(value)}), "are nested too deeply, and shown as a text"
    if isinstance(value, dict):
        return _encoded(value), ""
    return _encoded({RAW_KEY: value} if value != [] else {}), "are no object"


def _encoded(value: dict[str, Any]) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    # Half of a surrogate pair is not a character, and no tokenizer takes it.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _shallow(value: object) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (RecursionError, msgspec.MsgspecError):
        return ""


def is_deep(value: object, most: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return most == 0 or any(is_deep(each, most - 1) for each in inner)


def _json(text: str) -> Any:
    """Return the value of a JSON text. Numbers that JSON can't have, and those too long for Python, stay strings."""
    # Models don't escape line ends.
    return json.loads(text, strict=False, parse_constant=str, parse_float=_finite, parse_int=_short)


def _finite(text: str) -> float | str:
    return number if math.isfinite(number := float(text)) else text


def _short(text: str) -> int | str:
    return int(text) if len(text) <= _MOST_DIGITS else text


def _completed(text: str, *, keeps_cut_text: bool = True) -> Any:
    """Return the value of an object's JSON text that was cut, with or without the beginning of a string that was cut.
    Raises ValueError."""
    if len(text) > _MOST_CHARACTERS or text.lstrip()[:1] != "{":
        raise ValueError
    closing: list[str] = []
    whole = 0  # end of the text whose members are complete
    num_open = 0  # brackets that are open there
    end = text
    for token in _TOKENS.finditer(text):
        match token[0]:
            case "{" | "[" as bracket:
                closing.append("}" if bracket == "{" else "]")
                whole = token.end()
                num_open = len(closing)
            case "}" | "]" as bracket:
                if not closing or closing.pop() != bracket:
                    raise ValueError
                num_open = min(num_open, len(closing) + 1)
            case ",":
                whole = token.start()
                num_open = len(closing)
            case string if token.end() == len(text) and not _is_closed(string):
                if not keeps_cut_text:
                    return _json(text[:whole] + "".join(reversed(closing[:num_open])))
                cut = _CUT_ESCAPE.search(string)
                end = text[: len(text) - (0 if cut is None else len(cut[1]))] + '"'
        if len(closing) > MOST_DEPTH:
            raise ValueError
    if not closing:
        raise ValueError
    try:
        return _json(end + "".join(reversed(closing)))
    except ValueError:
        if _CUT_MEMBER.fullmatch(text, whole) is None:
            raise
    return _json(text[:whole] + "".join(reversed(closing[:num_open])))


def _is_closed(string: str) -> bool:
    inner = string[1:]
    return inner.endswith('"') and (len(inner) - len(inner[:-1].rstrip("\\"))) % 2 == 1


def _python(text: str) -> Any:
    """Return the value of a Python literal. Raises ValueError, SyntaxError, TypeError, MemoryError, RecursionError."""
    if len(text) > _MOST_PYTHON or text.lstrip()[:1] != "{":
        raise ValueError
    value = ast.literal_eval(text.strip())
    return _json(json.dumps(value))


_READERS: tuple[tuple[Callable[[str], Any], str], ...] = (
    (_json, ""),
    (_completed, "are cut, and completed"),
    (_python, "are Python's, not JSON"),
)
