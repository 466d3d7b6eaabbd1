"""Explains why transformers refuses a setting of a config.json. Stdlib only."""

from __future__ import annotations

import re

_FIELD = re.compile(r"Validation error for field '(\w+)'")
_TOGETHER = re.compile(r"Class validation error for validator '\w+':\s*(?:ValueError: )?(.*)", re.DOTALL)
_ONE_KIND = re.compile(r"expected (?:a )?(\w+), got .*?(?:\(value: (.*)\))?$", re.DOTALL)
_KINDS = re.compile(r"with value (.*?) doesn't match any type in \((.*?)\)\. Errors", re.DOTALL)
_NO_DTYPE = re.compile(r"module 'torch' has no attribute '(.*)'")
_SHOWN = {
    "int": "an integer",
    "float": "a number with a decimal point",
    "bool": "true or false",
    "str": "a text",
    "dict": "an object",
    "list": "a list",
    "list[int]": "a list of integers",
    "list[str]": "a list of texts",
    "NoneType": "null",
}
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # Python's names and JSON's


def wrong_setting(error: BaseException) -> str | None:
    """Return the fault of a setting, to follow "could not be loaded: "; None if the error is about something
    else."""
    text = str(error)
    if (no_dtype := _NO_DTYPE.fullmatch(text)) is not None:
        return f"the model's setting dtype is '{no_dtype[1][:100]}', but must be one of torch's, such as bfloat16"
    if (together := _TOGETHER.match(text)) is not None:
        return f"the model's settings don't fit together ({together[1][:250]})"
    field = _FIELD.match(text)
    if type(error).__name__ != "StrictDataclassFieldValidationError" or field is None:
        return None
    kinds: list[str] = []
    value: str | None = None
    if (several := _KINDS.search(text)) is not None:
        value = several[1]
        kinds = re.findall(r"list\[\w+\]|(?<=<class ')\w+(?='>)", several[2])
    elif (one := _ONE_KIND.search(text)) is not None:
        value = one[2]
        kinds = [one[1]]
    shown = [_SHOWN[kind] for kind in kinds if kind in _SHOWN]
    is_what = "has a value of the wrong type" if value is None else f"is {_PYTHON.get(value, value)[:100]}"
    must = f", but must be {' or '.join(shown)}" if shown else ""
    return f"the model's setting {field[1]} {is_what}{must}"
