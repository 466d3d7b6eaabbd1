"""Calls in Python, in a list: `[name(argument="value"), ...]`, as LFM2 writes them."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from keyword import iskeyword
from typing import Any

import regex

from oaiserve.routes.dialects.calls import NotACall
from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.json_calls import ListedCalls
from oaiserve.routes.dialects.segments import Arguments, CallBegin, Segment
from oaiserve.routes.dialects.sites import OBJECT, Site
from oaiserve.routes.dialects.tagged_form import is_by_value

_NAME = regex.compile(r"\s*(?P<name>[A-Za-z_][\w.-]*+)\s*(?=\()")
_QUOTE_OR_BRACKET = re.compile(r"""[()\[\]{}'"]""")
_IN_STRING = {quote: re.compile(rf"(?:[^{quote}\\]|\\.)*+", re.DOTALL) for quote in "'\""}
_MOST_VALUES = 10_000  # limit for a call's arguments: Python's parser needs time and memory for each
_LITERALS = {"true": True, "false": False, "null": None}  # JSON's names


class _Brackets:
    """Searches a growing text for the bracket that closes the first one."""

    is_broken = False

    def __init__(self) -> None:
        self.num_read = 0
        self._depth = 0
        self._quote = ""  # quote of the string in which the text ends
        self._escape = ""  # unfinished escape at the end of the text

    def push(self, piece: str) -> bool:
        text = self._escape + piece
        at = 0
        while at < len(text):
            if self._quote:
                inside = _IN_STRING[self._quote].match(text, at)
                at = at if inside is None else inside.end()
                if not text.startswith(self._quote, at):
                    break
                self._quote = ""
                at += 1
            match = _QUOTE_OR_BRACKET.search(text, at)
            if match is None:
                at = len(text)
                break
            at = match.end()
            if match[0] in "\"'":
                self._quote = match[0]
                continue
            self._depth += 1 if match[0] in "([{" else -1
            if self._depth == 0:
                break
        self.num_read += at
        self._escape = text[at:]
        return self._depth == 0


class PythonicCalls(ListedCalls):
    """Each call is read as a whole, because its strings are Python's, or else as JSON."""

    _name: str | None = None  # name of the tool whose arguments have begun

    def __init_subclass__(cls) -> None:
        # A list begins or continues, or there is a call without a list, after a tag.
        lead = "|".join((r"\[", r"[)}\]]\s*[,;]", *map(regex.escape, cls.opening_tags)))
        python = Site(f"(?:{lead})", r"A-Za-z0-9_.\-", ("(",), (")",), is_spaced=True, is_own_form=True)
        cls.sites = (OBJECT, python)

    @classmethod
    def own_arguments(
        cls, name: str, schema: Mapping[str, Any], schemas: dict[str, Any], special_ids: Mapping[str, int]
    ) -> str | None:
        """Return `key=value, ...` in the order of the schema, or `**{...}` for a schema that is not only about
        values."""
        properties = schema.get("properties") or {}
        if not is_by_value(schema) or not all(key.isidentifier() and not iskeyword(key) for key in properties):
            return f'"**" @schema_{[*schemas].index(name)}'
        later = ""  # text that may follow another argument
        first = ""  # text that may come before any argument
        for key, value in reversed(properties.items()):
            written = f'"{key}=" @schema_{len(schemas)}'
            schemas[f"{name}/{key}"] = value
            if key in (schema.get("required") or ()):
                first = f"{written} {later}"
                later = f'", " {written} {later}'
            else:
                if first:
                    first = f"({written} {later} | {first})"
                else:
                    first = f"({written})?"
                later = f'(", " {written})? {later}'
        return first

    def _head_of_object(self, segments: list[Segment], at: int) -> bool:
        if self._text[at:].lstrip()[:1] in ("", "{"):
            return super()._head_of_object(segments, at)
        match = self._match(_NAME, at)
        if match is None:
            return False
        if match["name"] not in self._tools:
            raise NotACall
        self._name = match["name"]
        end = self._end_of(_Brackets, match.end())
        if end is None:
            return False
        arguments = _arguments(self._text[match.end() : end])
        if arguments is None:
            raise NotACall(end)
        segments += [CallBegin(match["name"]), Arguments(arguments)]
        self._take(end)
        return self._end(segments)

    def _begin_head(self, tag: str, before: str = "") -> None:
        super()._begin_head(tag, before)
        self._name = None

    def _name_in_head(self) -> str | None:
        return self._name


class _JsonLiterals(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in _LITERALS:
            return ast.Constant(_LITERALS[node.id])
        return node


def _arguments(brackets: str) -> str | None:
    """Return the arguments in a call's brackets as JSON, or None if they are not literals with names."""
    if brackets.count(",") > _MOST_VALUES:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of unknown escapes.
            call = ast.parse(f"call{brackets}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        if len(call.keywords) == 1 and call.keywords[0].arg is None:  # **{...}
            arguments = ast.literal_eval(_JsonLiterals().visit(call.keywords[0].value))
        else:
            arguments = {each.arg: ast.literal_eval(_JsonLiterals().visit(each.value)) for each in call.keywords}
        if not isinstance(arguments, dict) or None in arguments:
            return None
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # lone surrogates have no UTF-8
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return text


def as_python(calls: Iterable[tuple[str, str]]) -> str:
    """Return calls (names and JSON texts of arguments) in Python."""
    texts = []
    for name, arguments in calls:
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        values = parsed.items() if isinstance(parsed, dict) else [("arguments", arguments)]
        texts.append(f"{name}({', '.join(f'{key}={_literal(value)}' for key, value in values)})")
    return f"[{', '.join(texts)}]"


def _literal(value: object) -> str:
    if value is None or isinstance(value, bool):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


class LFM2Calls(PythonicCalls):
    opening_tags = ("<|tool_call_start|>",)
    closing_tags = ("<|tool_call_end|>",)
    tags = (*opening_tags, *closing_tags)


def _in_text(calls: Iterable[tuple[str, str]]) -> str:
    return LFM2Calls.opening_tags[0] + as_python(calls) + LFM2Calls.closing_tags[0]


LFM2 = CallFamily(
    "lfm2",
    LFM2Calls,
    separator=", ",
    before="<|tool_call_start|>[",
    after="]<|tool_call_end|>",
    signs=("List of tools: ", "<|im_start|>"),
    in_text=_in_text,
)
