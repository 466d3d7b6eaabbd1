"""Calls as JSON objects: with the name of a tool and its arguments, alone or in a list, or with arguments only."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import msgspec
import regex

from oaiserve.routes.dialects.calls import MOST_HEAD, CallParser, NotACall
from oaiserve.routes.dialects.segments import Arguments, CallBegin, Segment, after_blanks
from oaiserve.routes.dialects.sites import OBJECT, Site

# Characters of a string up to its end, or up to an incomplete escape.
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*+(?:\\[^\x00-\x1f][^"\\\x00-\x1f]*+)*+')
# Brackets, quotes, and characters that JSON has only in strings.
_OUTSIDE = re.compile(r'["{}\[\]]|[^\s,:0-9.eE+\-truefalsn]')
# An escape. The group matches its character if JSON doesn't have this escape.
_ESCAPE = re.compile(r"""\\(?:["\\/bfnrtu]|([^\x00-\x1f]))""")


class BrokenJson(Exception):
    """The text is not JSON from the position `at` on."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


class JsonScanner:
    """Finds the end of a JSON value, and checks no more than that needs. A decoder decides whether it is valid JSON."""

    def __init__(self) -> None:
        self.depth = 0  # number of open brackets
        self.num_read = 0  # characters read by `push`
        self.is_broken = False
        self.is_escaped = False  # The text ends with the backslash of an escape.
        self._in_string = False

    def push(self, piece: str) -> bool:
        """Continue with a piece of a value that is read as a whole, and return whether the search for its end is
        over."""
        try:
            end = self.scan(piece, 0, 0)
        except BrokenJson as broken:
            self.is_broken = True
            end = broken.at
        self.num_read += len(piece) if end is None else end
        return end is not None

    def scan(self, text: str, at: int, to_depth: int) -> int | None:
        """Continue with `text` from the position `at`, until a bracket closes down to the depth `to_depth`.

        Return the position after that bracket, or None if the text ends first. Raises BrokenJson.
        """
        while at < len(text):
            if self._in_string:
                at = self._end_of_string(text, at)
                continue
            match = _OUTSIDE.search(text, at)
            if match is None:
                return None
            at = match.end()
            character = match[0]
            if character == '"':
                self._in_string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth == to_depth:
                    return at
            else:
                raise BrokenJson(at - 1)
        return None

    def _end_of_string(self, text: str, at: int) -> int:
        """Return the position after the string at `at`, or the end of the text. Raises BrokenJson."""
        if self.is_escaped:
            if text[at] < " ":
                raise BrokenJson(at)
            self.is_escaped = False
            at += 1
        if match := _IN_STRING.match(text, at):
            at = match.end()
        if at == len(text):
            return at
        if text[at] == '"':
            self._in_string = False
        elif text[at] == "\\" and at + 1 == len(text):
            self.is_escaped = True
        else:
            raise BrokenJson(at + (text[at] == "\\"))
        return at + 1


# The usual order of keys, in which arguments can be passed on as they arrive.
HEAD = regex.compile(
    r'\{\s*+(?:"tool_call_id"\s*:\s*"[^"\\\x00-\x1f]{0,256}"\s*,\s*+)?"(?:tool_)?name"\s*:\s*"(?P<name>[^"\\\x00-\x1f]*)"\s*,'
    r'\s*+"(?P<key>arguments|parameters)"\s*:\s*(?=\{)',
    regex.ASCII,
)
_NAMED = re.compile(r'[^{]*+\{\s*(?:"tool_call_id"\s*:\s*"[^"]*"\s*,\s*)?"(?:tool_)?name"\s*:\s*"(?P<name>[^"]*)"')
_KEYS = ("name", "arguments", "parameters", "type", "id", "tool_name", "tool_call_id")
_KEY_CHARACTERS = 64  # The first key of an object must begin within this many characters.


class _Call(msgspec.Struct):
    name: str = ""
    tool_name: str = ""
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Call)
_object_decoder = msgspec.json.Decoder(dict[str, Any])


class JsonCallParser(CallParser):
    """Reads calls that are JSON objects. Subclasses define the tags around them."""

    sites: ClassVar[tuple[Site, ...]] = (OBJECT,)
    _scanner: JsonScanner
    _object: int  # the number of pieces in `_raw` before the object
    _arguments_depth: int  # number of brackets around the arguments
    _half: str  # the backslash of an escape in the arguments, if the text ends with it

    def _name_in_head(self) -> str | None:
        match = _NAMED.match(self._text)
        if match is not None and match["name"] in self._tools:
            return match["name"]
        return None

    def _may_name_a_tool(self) -> bool:
        return _NAMED.match(self._text) is None

    def _head(self, segments: list[Segment]) -> bool:
        return self._head_of_object(segments, len(self._tag))

    def _head_of_object(self, segments: list[Segment], at: int) -> bool:
        """Take the text up to the arguments of the object at this position, or after the white space there."""
        at = self._place_of_object(at)
        if at == len(self._text):
            return False
        if match := HEAD.match(self._text, at, partial=True):
            if match.partial:
                return False
            self._begin(segments, match["name"])
            self._begin_arguments(at, match.end(), depth=1)
            return True
        return self._whole_object(segments, at)

    def _place_of_object(self, at: int) -> int:
        """Return the position of the object after white space, or else the end of the text. Raises NotACall."""
        text = self._text
        at = after_blanks(text, at)
        if at < len(text) and (text[at] != "{" or not _may_be_a_call(text[at + 1 : at + _KEY_CHARACTERS])):
            raise NotACall
        return at

    def _begin_arguments(self, object_at: int, arguments_at: int, *, depth: int) -> None:
        self._take(object_at)
        self._object = len(self._raw)
        self._take(arguments_at - object_at)
        self._scanner = JsonScanner()
        self._scanner.depth = self._arguments_depth = depth
        self._half = ""
        self._step = self._in_arguments

    def _whole_object(self, segments: list[Segment], at: int) -> bool:
        """Read an object whose keys are in another order, as soon as all of it has arrived."""
        end = self._end_of_json(at)
        return end is not None and self._take_whole(segments, at, end)

    def _end_of_json(self, at: int) -> int | None:
        """Return the position after the object at this position, or None if its end has not arrived. Raises
        NotACall."""
        return self._end_of(JsonScanner, at)

    def _take_whole(self, segments: list[Segment], at: int, end: int) -> bool:
        """Take the text up to the end of the object between these positions."""
        call = _call(self._text[at:end])
        if call is None or call[0] not in self._tools:
            raise NotACall(end)
        if call[0] in self._strict and not is_held(self._text[at:end], *call):
            raise NotACall(end)
        segments += [CallBegin(call[0]), Arguments(call[1])]
        self._take(end)
        return self._end(segments)

    def _in_arguments(self, segments: list[Segment]) -> bool:
        taken, is_done = self._scan(self._arguments_depth)
        text = self._half + taken
        self._half = "\\" if self._scanner.is_escaped else ""
        if text := with_json_escapes(text.removesuffix(self._half)):
            segments.append(Arguments(text))
        if is_done is None:
            return self._break(segments)
        if is_done:
            self._step = self._in_tail
        return is_done

    def _in_tail(self, segments: list[Segment]) -> bool:
        if self._arguments_depth:
            _, is_done = self._scan(0)
            if is_done is None:
                return self._break(segments)
            if not is_done:
                return False
        text = with_json_escapes("".join(self._raw[self._object :]))
        if is_json_object(text) if self._arguments_depth == 0 else self._is_call(text):
            return self._end_object(segments)
        return self._break(segments)

    def _is_call(self, text: str) -> bool:
        return _call(text) is not None

    def _end_object(self, segments: list[Segment]) -> bool:
        return self._end(segments)

    def _goes_on(self, separator: str) -> bool:
        text = self._text.lstrip()
        if not text.startswith(separator):
            return False
        self._begin_head(separator, self._text[: -len(text)])
        self._text = text
        return True

    def _scan(self, to_depth: int) -> tuple[str, bool | None]:
        """Take text until brackets are closed down to a depth. Return it and whether they are closed, or None if the
        text is not JSON."""
        try:
            end = self._scanner.scan(self._text, 0, to_depth)
        except BrokenJson as broken:
            return self._take(broken.at), None
        return self._take(len(self._text) if end is None else end), end is not None


def _may_be_a_call(text: str) -> bool:
    """Return whether an object can be a call, by its first key."""
    text = text.lstrip()
    if not text or text[0] == "}":
        return not text
    key, quote, _ = text[1:].partition('"')
    return text[0] == '"' and (key in _KEYS if quote else any(known.startswith(key) for known in _KEYS))


def _call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments, as JSON, of a whole object, or None if it is not a call."""
    try:
        call = _decoder.decode(with_json_escapes(text))
    except (msgspec.MsgspecError, RecursionError):
        return None
    arguments = object_text(bytes(call.arguments) or bytes(call.parameters) or b"{}")
    if arguments is None:
        return None
    return (call.name or call.tool_name, arguments)


def with_json_escapes(text: str) -> str:
    """Return JSON in which escapes that JSON doesn't have are repaired: models write \\' for ' and \\d for \\\\d."""
    if "\\" in text:
        return _ESCAPE.sub(_json_escape, text)
    return text


def _json_escape(match: re.Match[str]) -> str:
    if match[1] is None:
        return match[0]
    if match[1] == "'":
        return "'"
    return "\\" + match[0]


def is_held(text: str, name: str, arguments: str) -> bool:
    """Return whether a call's arguments are at a place where the grammar of `sites.OBJECT` enforces their schema."""
    heads = (head for head in HEAD.finditer(text) if len(head[0]) < MOST_HEAD)
    return any(head["name"] == name and text.startswith(arguments, head.end()) for head in heads)


def object_text(arguments: bytes) -> str | None:
    """Return arguments as the text of an object, or None if they are not an object."""
    text = arguments.decode()
    if text.startswith('"'):  # Some models write JSON within JSON.
        text = msgspec.json.decode(text, type=str) or "{}"
    if text == "null":
        text = "{}"
    if is_json_object(text):
        return text
    return None


def is_json_object(text: str) -> bool:
    try:
        _object_decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


def in_quotes(text: str) -> str:
    return msgspec.json.encode(text).decode()[1:-1]


class ListedCalls(JsonCallParser):
    """Reads calls in a list after a tag, or a single call without a list."""

    _is_list = False

    def _head(self, segments: list[Segment]) -> bool:
        at = 0 if self._tag in ("{", "[") else len(self._tag)
        if self._tag == ",":
            return self._head_of_object(segments, at)
        at = after_blanks(self._text, at)
        self._is_list = self._text.startswith("[", at)
        return self._head_of_object(segments, at + self._is_list)

    def _after_call(self, segments: list[Segment]) -> bool:
        if not self._is_list:
            return super()._after_call(segments)
        if self._goes_on(","):
            return True
        rest = self._text.lstrip()
        if rest:
            self._is_list = False
            if rest[0] == "]":
                self._text = rest.removeprefix("]")
        return bool(rest)


class NamedCalls(JsonCallParser):
    """Reads calls whose name comes before their arguments: `named` matches from the opening tag up to the arguments."""

    named: ClassVar[regex.Pattern[str]]
    sites: ClassVar[tuple[Site, ...]] = ()

    def _head(self, segments: list[Segment]) -> bool:
        match = self._match(self.named)
        if match is None:
            return False
        self._begin(segments, match["name"])
        self._begin_arguments(match.end(), match.end(), depth=0)
        return True
