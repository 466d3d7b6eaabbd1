"""Calls of Gemma 4 and FunctionGemma: `call:name{key:value}`, with strings between tags instead of quotes."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import regex

from oaiserve.routes.dialects.calls import NotACall
from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.json_calls import NamedCalls, is_json_object
from oaiserve.routes.dialects.segments import Arguments, CallBegin, Segment
from oaiserve.routes.dialects.sites import NAME, SPACE, Site

_NUM_LOOKED_BACK = 8  # characters before a quote that show whether a string begins


class _Object:
    """The search for the bracket that closes the first one. Brackets in strings don't count."""

    is_broken = False

    def __init__(self, quote: str) -> None:
        self.num_read = 0
        self._quote = quote
        self._depth = 0
        self._in_string = False
        self._last = ""  # end of the text, where a quote may have begun
        self._num_searched = 0  # characters of `_last` that were searched already

    def push(self, piece: str) -> bool:
        text = self._last + piece
        at = self._num_searched
        while match := _QUOTE_OR_BRACKET[self._quote].search(text, at):
            at = match.end()
            if match[0] == self._quote:
                before = text[max(0, match.start() - _NUM_LOOKED_BACK) : match.start()]
                # Otherwise it ends a text without an opening quote, which models leave out.
                self._in_string = not self._in_string and before.rstrip()[-1:] in "{[,:"
            elif not self._in_string:
                self._depth += 1 if match[0] in "{[" else -1
                if self._depth == 0:
                    self.num_read += at - len(self._last)
                    return True
        self.num_read += len(piece)
        at = max(at, len(text) - len(self._quote) + 1)
        self._last = text[max(0, at - _NUM_LOOKED_BACK) :]
        self._num_searched = min(at, _NUM_LOOKED_BACK)
        return False


class GemmaCalls(NamedCalls):
    """Arguments in the model's own form are read as a whole, others as JSON."""

    opening_tags: ClassVar[tuple[str, ...]] = ("<|tool_call>",)
    closing_tags: ClassVar[tuple[str, ...]] = ("<tool_call|>",)
    # Tags of an empty thought after a text.
    hidden_tags: ClassVar[tuple[str, ...]] = ("<|channel>thought\n", "<channel|>")
    quote = '<|"|>'
    tags: ClassVar[tuple[str, ...]] = (*opening_tags, *closing_tags, quote)
    sites: ClassVar[tuple[Site, ...]] = (Site(r"<\|tool_call>\s*call:", NAME, (SPACE,)),)
    named = regex.compile(r"<\|tool_call>\s*call:(?P<name>[^\s<>{}]++)\s*(?=\{)")

    def _head(self, segments: list[Segment]) -> bool:
        match = self._match(self.named)
        if match is None:
            return False
        first = self._text[match.end() + 1 :].lstrip()[:1]
        if first in ("", '"'):
            return first != "" and super()._head(segments)
        if match["name"] not in self._tools or (match["name"] in self._strict and first != "}"):
            raise NotACall
        end = self._end_of(lambda: _Object(self.quote), match.end())
        if end is None:
            return False
        arguments = self._as_json(self._text[match.end() : end])
        if not is_json_object(arguments):
            raise NotACall(end)
        segments += [CallBegin(match["name"]), Arguments(arguments)]
        self._take(end)
        return self._end(segments)

    def _as_json(self, text: str) -> str:
        written: str = _PIECE[self.quote].sub(_piece_as_json, text)
        return written


class FunctionGemmaCalls(GemmaCalls):
    opening_tags = ("<start_function_call>",)
    closing_tags = ("<end_function_call>",)
    hidden_tags = ()
    quote = "<escape>"
    tags = (*opening_tags, *closing_tags, quote)
    sites = (Site(r"<start_function_call>\s*call:", NAME, (SPACE,)),)
    named = regex.compile(r"<start_function_call>\s*call:(?P<name>[^\s<>{}]++)\s*(?=\{)")


def _piece_as_json(piece: regex.Match[str]) -> str:
    text: str | None = next(filter(None, (piece["string"], piece["unopened"], piece["quoted"])), None)
    word: str = (piece["word"] or "").strip()
    if word and not (piece["colon"] and word[0] != '"'):
        try:
            msgspec.json.decode(word)
        except msgspec.MsgspecError:
            pass
        else:
            return word
    return msgspec.json.encode(word if text is None else text).decode()


_QUOTES = {quote: regex.escape(quote) for quote in (GemmaCalls.quote, FunctionGemmaCalls.quote)}
_QUOTE_OR_BRACKET = {quote: regex.compile(rf"{q}|[{{}}\[\]]") for quote, q in _QUOTES.items()}
_PIECE = {
    quote: regex.compile(
        rf"(?s){q}(?P<string>.*?){q}|'(?P<quoted>[^'{{}}\[\]]*+)'(?=\s*[,:}}\]])"
        rf"|(?=[^\s{{}}\[\],:])(?<=[{{,]\s*[\w.-]+\s*:\s*|\[\s*)(?!{q})(?P<unopened>[^\s{{}}\[\],:](?:(?!{q}|,\s*[\w.-]+\s*:)[^{{}}\[\]])*+)"
        rf"(?<![,:]\s*){q}"
        r"|(?P<word>[^\s{}\[\],:][^{}\[\],:]*+)(?P<colon>(?=:))?"
    )
    for quote, q in _QUOTES.items()
}

GEMMA4 = CallFamily(
    "gemma4", GemmaCalls, "<|tool_call>call:", "<tool_call|>", arguments_key="", signs=("<|tool_call>",)
)
FUNCTION_GEMMA = CallFamily(
    "functiongemma",
    FunctionGemmaCalls,
    "<start_function_call>call:",
    "<end_function_call>",
    arguments_key="",
    signs=("<start_function_call>",),
)
