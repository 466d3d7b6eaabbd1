"""Calls that a model writes as plain JSON although its template asks for tags: in fenced blocks, or as bare objects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import ClassVar

import msgspec
import regex

from oaiserve.routes.dialects.calls import NotACall
from oaiserve.routes.dialects.json_calls import (
    HEAD,
    BrokenJson,
    JsonCallParser,
    JsonScanner,
    is_held,
    object_text,
    with_json_escapes,
)
from oaiserve.routes.dialects.segments import Arguments, CallBegin, CallEnd, Segment

_FENCE = "```"
_TOOLS = "<tools>"
_CLOSING = ("</tool_call>", "</tools>")
_MOST_CHARACTERS = 24  # characters that may separate objects
_LANGUAGE = re.compile(r"```[^\s`{\[<]{,24}+")
_BETWEEN = re.compile(r"(?:[\s,;]++|<tool_call>|<tools>)*+")
_BEHIND_DOUBLED = re.compile(r"(?:\s*+\})*+")  # Models close fewer braces than they have opened, or more.
_DOUBLED = re.compile(r"\{\s*+(?=\{)")
_ODD = regex.compile(r"\s*+(?:[\[`]|\{\s*+\{)")  # forms that JsonCallParser doesn't read in tags
_FIRST_KEY = regex.compile(
    r'[\[{\s]++"(?:name"\s*+:\s*+"(?P<name>[^"\\\x00-\x1f]*+)"|(?:arguments|parameters|type|id)")'
)
_QUOTE_OR_SEPARATOR = re.compile(r'["{}\[\],]')
_BRACES = re.compile(r'("(?:[^"\\]|\\.)*+")|\{\s*\{|\}\s*\}', re.DOTALL)
_PREFIXES = ("functions.", "function.", "tools.", "tool.")
_decode_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_name = msgspec.json.Decoder(str).decode


class _Keys(JsonScanner):
    """Searches an object until all of its required keys are found. It is broken if the object ends first."""

    def __init__(self, required: Iterable[str]) -> None:
        super().__init__()
        self._missing = set(required)
        self._may_follow = False  # The next string is a key of the object.
        self._is_key = False  # The current string is a key.
        self._key = ""  # text of the key so far

    def push(self, piece: str) -> bool:
        at = 0
        while at < len(piece) and self._missing and not self.is_broken:
            if self._in_string:
                at = self._in_text_of_string(piece, at)
                continue
            match = _QUOTE_OR_SEPARATOR.search(piece, at)
            at = len(piece) if match is None else match.end()
            if match is None:
                continue
            if match[0] == '"':
                self._in_string = True
                self._is_key = self._may_follow
                self._key = ""
            self.depth += (match[0] in "{[") - (match[0] in "}]")
            self._may_follow = self.depth == 1 and match[0] in "{,"
            self.is_broken = self.depth == 0
        self.num_read += at
        return not self._missing or self.is_broken

    def _in_text_of_string(self, piece: str, at: int) -> int:
        try:
            end = self._end_of_string(piece, at)
        except BrokenJson as broken:
            self.is_broken = True
            return broken.at
        if self._is_key:
            self._key += piece[at:end]
            if not self._in_string:
                self._missing.discard(self._key[:-1])
        return end


class UntaggedCalls(JsonCallParser):
    """Reads fenced blocks of objects, and an object or a list of objects at the beginning of a line.

    They are calls if each object has only the name of a tool and its arguments. After other text, all arguments that
    the tool requires must be there, too. Arguments after the name are passed on as they arrive, after other text once
    the last required one has begun. The rest is returned when the block or the object ends. All other text stays
    unchanged.
    """

    bare: ClassVar[tuple[str, ...]] = ("{", "[")
    untagged: ClassVar[tuple[str, ...]] = (_FENCE, _TOOLS, "{", "[", ",")
    _is_fenced = False  # inside a fenced block that is not a call
    _is_plain = False  # true after bare JSON that is not a call: objects within it aren't calls, either
    _is_doubled = False  # The last call was in double braces.
    _has_language: bool  # The opening fence states a language.
    _at: int  # the position in `_text` after the objects that were read
    _calls: list[tuple[str, str]]  # names and arguments of those objects
    _is_begun = False  # A call of the block was passed on, except for its end.

    def _begin_head(self, tag: str, before: str = "") -> None:
        super()._begin_head(tag, before)
        self._at = -1
        self._calls = []
        self._is_begun = False

    def _sought(self) -> tuple[str, ...]:
        tags = (*super()._sought(), _FENCE)
        if not self._is_fenced:
            tags += (_TOOLS,) if self._is_plain else (_TOOLS, "\n{", "\n[")
        return tags

    def _find(self, text: str) -> tuple[int, str]:
        at, tag = super()._find(text)
        if tag.startswith("\n"):
            return (at + 1, tag[1:])
        return (at, tag)

    def _head(self, segments: list[Segment]) -> bool:
        has_objects = self._calls or self._is_begun
        if self._tag not in self.untagged and not has_objects and not _ODD.match(self._text, len(self._tag)):
            return super()._head(segments)
        if self._has_all(segments):
            return self._take_all(segments)
        return self._step != self._in_head  # Arguments follow.

    def _no_call(self, segments: list[Segment], at: int) -> None:
        if self._is_begun:
            self._break(segments)
        else:
            self._leave_block()
            super()._no_call(segments, at)

    def _break(self, segments: list[Segment]) -> bool:
        self._leave_block()
        self._is_begun = False
        return super()._break(segments)

    def _leave_block(self) -> None:
        """Continue in a block that is no call."""
        if self._tag == _FENCE:
            self._is_fenced = not self._is_fenced or self._has_language
        self._is_plain |= self._tag in self.bare

    def _after_call(self, segments: list[Segment]) -> bool:
        if self._is_doubled:
            self._text = _BEHIND_DOUBLED.sub("", self._text, count=1)
            self._is_doubled = not self._text.strip()
        return (self._tag in (*self.bare, ",") and self._goes_on(",")) or super()._after_call(segments)

    def _end_head(self, segments: list[Segment], *, is_cut: bool) -> None:
        # A model may leave out the end of a block.
        if (self._calls or self._is_begun) and not _BETWEEN.sub("", self._text[self._at :]):
            self._take_all(segments)
        elif self._is_begun and is_cut:
            self._calls = []
            self._take_all(segments)
        elif self._is_begun:
            self._take(len(self._text))
            self._break(segments)
        else:
            super()._end_head(segments, is_cut=is_cut)

    def _name_in_head(self) -> str | None:
        if self._tag not in self.untagged:
            return super()._name_in_head()
        head = HEAD.search(self._text)
        return None if head is None or self._calls else self._tool(head["name"])

    def _has_all(self, segments: list[Segment]) -> bool:
        """Read the objects that have arrived. Return whether no more follow. Raises NotACall."""
        if self._at < 0:
            self._at = self._begin_of_block()
        while self._at >= 0:
            text = self._text
            if self._is_doubled:
                at = self._behind(_BEHIND_DOUBLED, self._at)
            else:
                at = self._at
            at = self._behind(_BETWEEN, at)
            rest = text[at : at + _MOST_CHARACTERS]
            if rest[:1] in ("{", "["):
                start = self._behind(_DOUBLED, at)
                if start == at and not self._calls and self._begin_early(segments, at):
                    return False
                if (end := self._end_of_objects(start)) is None:
                    return False
                try:
                    self._calls += self._calls_in(text[start:end])
                except NotACall:
                    raise NotACall(end) from None
                self._take(end)
                self._at = 0
                self._is_doubled = start > at
                if self._tag in (*self.bare, ","):
                    return True
            elif (self._calls or self._is_begun) and rest.startswith((_FENCE, *_CLOSING)):
                is_fence = rest.startswith(_FENCE)
                self._at = at + len(_FENCE if is_fence else rest.partition(">")[0] + ">")
                if is_fence == (self._tag == _FENCE):
                    return True
            elif any(tag.startswith(rest) for tag in (_FENCE, *_CLOSING, _TOOLS, "<tool_call>")):
                return False
            elif (language := _LANGUAGE.match(text, at)) is not None and self._tag != _FENCE:
                if language.end() == len(text):
                    return False
                self._at = language.end()
            else:
                raise NotACall(at)
        return False

    def _begin_of_block(self) -> int:
        """Return the place after the beginning of a block of objects, or -1 if it has not arrived. Raises NotACall."""
        if self._tag != _FENCE:
            if self._tag in self.bare:
                return 0
            return len(self._tag)
        language = _LANGUAGE.match(self._text)
        assert language is not None
        self._has_language = language[0] != _FENCE
        # This fence ends the block.
        if self._is_fenced and not self._has_language and language.end() < len(self._text):
            raise NotACall
        if language.end() < len(self._text):
            return language.end()
        return -1

    def _behind(self, pattern: re.Pattern[str], at: int) -> int:
        match = pattern.match(self._text, at)
        if match is None:
            return at
        return match.end()

    def _end_of_objects(self, at: int) -> int | None:
        return self._end_of_json(at) if self._has_first_key(at) else None

    def _has_first_key(self, at: int) -> bool:
        """Return whether the first key of the objects at this position has arrived. Raises NotACall."""
        if not self._text[at + 1 : at + _MOST_CHARACTERS].strip():  # Another brace may follow.
            return False
        match = _FIRST_KEY.match(self._text, at, partial=True)
        if match is None or (not match.partial and match["name"] and self._tool(match["name"]) is None):
            raise NotACall(at)
        return not match.partial

    def _begin_early(self, segments: list[Segment], at: int) -> bool:
        """Begin the call of the object at this place as soon as it is certainly one, so that its arguments are passed
        on as they arrive. Return whether it has begun, or may begin once more text has come. Raises NotACall."""
        has_key = self._has_first_key(at)
        head = HEAD.match(self._text, at, partial=True)
        if not has_key or head is None or head.partial:
            return head is not None
        name = self._tool(head["name"])
        # An object with the parameters of a tool may be its definition.
        if name is None or head["key"] != "arguments":
            return False
        required = self._tools[name].get("required", ())
        if required and not self._is_blank and self._end_of(lambda: _Keys(required), head.end()) is None:
            return True
        if self._is_begun:
            if self._only_one:
                return self._take_all(segments)
            self._end_begun(segments)
        segments.append(CallBegin(name))
        self._is_begun = True
        self._begin_arguments(at, head.end(), depth=1)
        return True

    def _end_begun(self, segments: list[Segment]) -> None:
        segments.append(CallEnd())
        self.num_called += 1
        self._raw = []

    def _is_call(self, text: str) -> bool:
        if not self._is_begun:
            return super()._is_call(text)
        try:
            return bool([*self._calls_in(text)])
        except NotACall:
            return False

    def _end_object(self, segments: list[Segment]) -> bool:
        if not self._is_begun or self._tag in (*self.bare, ","):
            return super()._end_object(segments)
        self._at = 0
        self._step = self._in_head
        return True

    def _tool(self, name: str) -> str | None:
        """Return the tool of this name. Some models put the prefix of OpenAI's calls before it."""
        names = (name, *(name.removeprefix(prefix) for prefix in _PREFIXES))
        return next((name for name in names if name in self._tools), None)

    def _calls_in(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield the names and arguments of an object, or of the objects in a list. Raises NotACall."""
        repaired = with_json_escapes(text)
        for variant in (repaired, _BRACES.sub(lambda match: match[1] or match[0][0], repaired)):
            try:
                objects = _decode_objects(variant if variant.startswith("[") else f"[{variant}]")
            except (msgspec.MsgspecError, RecursionError):
                continue
            if not objects:
                raise NotACall
            for name, arguments in map(self._call_in, objects):
                if name in self._strict and not is_held(text, name, arguments):
                    raise NotACall
                yield name, arguments
            return
        raise NotACall

    def _call_in(self, fields: dict[str, msgspec.Raw]) -> tuple[str, str]:
        key = "arguments" if "arguments" in fields else "parameters"
        if not {"name", key} <= fields.keys() <= {"name", key, "type", "id"}:
            raise NotACall
        try:
            name = self._tool(_decode_name(fields["name"]))
        except msgspec.MsgspecError:
            raise NotACall from None
        arguments = object_text(bytes(fields[key]))
        if name is None or arguments is None:
            raise NotACall
        names = _decode_object(arguments).keys()
        if key == "parameters" and {"type", "properties"} <= names:  # This object is the tool's schema.
            raise NotACall
        # The text only mentions the tool.
        if not self._is_blank and not names >= set(self._tools[name].get("required", ())):
            raise NotACall
        return name, arguments

    def _take_all(self, segments: list[Segment]) -> bool:
        self._take(self._at)
        for name, arguments in self._calls[:1] if self._only_one else self._calls:
            if self._is_begun:
                if self._only_one:
                    break
                self._end_begun(segments)
            segments += [CallBegin(name), Arguments(arguments)]
            self._is_begun = True
        return self._end(segments)
