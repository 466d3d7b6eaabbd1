"""Calls as Python has them, in a list: `[name(argument="value"), ...]`; LFM2 writes them so."""

from __future__ import annotations

import ast
import json
import re
import warnings

import regex

from oaiserve.routes.dialects.calls import NotACall
from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.json_calls import ListedCalls
from oaiserve.routes.dialects.segments import Arguments, CallBegin, Segment

_NAME = regex.compile(r"\s*(?P<name>[A-Za-z_][\w.-]*+)\s*(?=\()")
_STRING_OR_BRACKET = re.compile(r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+"|[()\[\]{}'"]""", re.DOTALL)
_LITERALS = {"true": True, "false": False, "null": None}  # as JSON writes them


class PythonicCalls(ListedCalls):
    """Each call is read as a whole, as Python's strings have to be, or as JSON."""

    def _head_of_object(self, segments: list[Segment], at: int) -> bool:
        if self._text[at:].lstrip()[:1] in ("", "{"):
            return super()._head_of_object(segments, at)
        match = self._match(_NAME, at)
        if match is None:
            return False
        if match["name"] not in self._tools:
            raise NotACall
        end = _end_of_call(self._text, match.end())
        if end is None:
            return False
        arguments = _arguments(self._text[match.end() : end])
        if arguments is None:
            raise NotACall
        segments += [CallBegin(match["name"]), Arguments(arguments)]
        self._take(end)
        return self._end(segments)


def _end_of_call(text: str, at: int) -> int | None:
    """Return the place behind the bracket that closes the one at this place, or None if it has not come."""
    depth = 0
    for piece in _STRING_OR_BRACKET.finditer(text, at):
        if piece[0] in "([{":
            depth += 1
        elif piece[0] in ")]}":
            depth -= 1
            if depth == 0:
                return piece.end()
        elif len(piece[0]) == 1:
            return None  # a string that goes on
    return None


class _JsonLiterals(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_LITERALS[node.id]) if node.id in _LITERALS else node


def _arguments(brackets: str) -> str | None:
    """Return the arguments in a call's brackets as JSON, or None if they are no literals with names."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes that Python does not know
            call = ast.parse(f"call{brackets}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        given = {each.arg: ast.literal_eval(_JsonLiterals().visit(each.value)) for each in call.keywords}
        if None in given:
            return None
        text = json.dumps(given, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return text


class LFM2Calls(PythonicCalls):
    opening_tags = ("<|tool_call_start|>",)
    closing_tags = ("<|tool_call_end|>",)
    tags = (*opening_tags, *closing_tags)


LFM2 = CallFamily(
    "lfm2",
    LFM2Calls,
    separator=", ",
    before="<|tool_call_start|>[",
    after="]<|tool_call_end|>",
    signs=("<|tool_call_start|>",),
)
