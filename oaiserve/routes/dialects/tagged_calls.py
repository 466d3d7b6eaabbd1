"""`TaggedCalls`: reads calls that have a tag for each argument, as a `TaggedForm` describes, or else a call in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import regex

from oaiserve.engine.text.schema_types import SchemaTypes
from oaiserve.routes.dialects.calls import TagEnd
from oaiserve.routes.dialects.json_calls import JsonCallParser, in_quotes
from oaiserve.routes.dialects.lark import KEY
from oaiserve.routes.dialects.segments import Arguments, Segment, after_blanks, unfinished_tag
from oaiserve.routes.dialects.sites import OBJECT
from oaiserve.routes.dialects.tagged_form import TaggedForm, pattern_of

_KINDS = {
    dict: "object",
    list: "array",
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}
_LITERALS = {"True": "true", "False": "false", "None": "null"}  # Python's names


class TaggedCalls(JsonCallParser):
    """Values have no quotes, so the tool's schema or an attribute of the tag decides which ones are strings.

    An attribute that says so makes a value a string unless the schema excludes strings.
    """

    form: ClassVar[TaggedForm]
    _separator: str  # text before the next argument, in JSON
    _schema: Mapping[str, Any]  # schemas of the arguments, by name
    _types_in: SchemaTypes
    _value_schema: Any
    _types: set[str]  # types of the value, as the tag or the schema says
    _is_string: bool  # The value can only be a string.
    _closing: str  # the tag after the value
    _is_begun: bool  # The first characters have shown whether the value is in quotes.

    def __init_subclass__(cls) -> None:
        cls.sites = (OBJECT, cls.form.site(cls.opening_tags, cls.closing_tags))

    @classmethod
    def own_arguments(
        cls, name: str, schema: Mapping[str, Any], schemas: dict[str, Any], special_ids: Mapping[str, int]
    ) -> str | None:
        return cls.form.arguments(name, schema, schemas, special_ids)

    def _head(self, segments: list[Segment]) -> bool:
        form = self.form
        tag = self._tag
        at = 0 if form.begin.startswith(tag) else len(tag)
        at = after_blanks(self._text, at)
        if at == len(self._text):
            return False
        if at and self._text[at] == "{":
            return self._head_of_object(segments, at)
        match = self._match(pattern_of(form.begin), at)
        if match is None:
            return False
        return self._begin_call(segments, match)

    def _begin_call(self, segments: list[Segment], match: regex.Match[str]) -> bool:
        self._begin(segments, match["name"])
        parameters = self._tools[match["name"]]
        self._schema = parameters.get("properties") or {}
        self._types_in = SchemaTypes(parameters)
        self._separator = "{"
        self._take(match.end())
        self._step = self._in_call
        return True

    def _in_call(self, segments: list[Segment]) -> bool:
        form = self.form
        at = len(self._text) - len(self._text.lstrip())
        end = form.end or self.closing_tags[0]
        if self._text.startswith(end, at):
            self._take(at + len(end))
            segments.append(Arguments("{}" if self._separator == "{" else "}"))
            return self._end(segments)
        if self._separator == "{" and self._text.startswith("{", at):  # JSON instead of tags
            self._begin_arguments(at, at, depth=0)
            return True
        match = pattern_of(form.key).match(self._text, at, partial=True)
        if match is None or match.partial:
            is_unfinished = match is not None or end.startswith(self._text[at:])
            if is_unfinished:
                return False
            return self._break(segments)
        self._take(match.end())
        key = match["key"]
        segments.append(Arguments(f"{self._separator}{msgspec.json.encode(key).decode()}: "))
        self._separator = ", "
        said = match.groupdict().get("type")
        self._types = set(self._types_in.of(self._schema.get(key)))
        if said in ("true", "string"):
            if not self._types or "string" in self._types:
                self._types = {"string"}
        elif said:
            self._types = set()
        self._is_string = self._types == {"string"}
        self._closing = form.closing.replace(KEY, key)
        self._value_schema = self._schema.get(key)
        self._is_begun = not form.quotes[0]
        if self._is_string:
            segments.append(Arguments('"'))
        self._step = self._in_value
        return True

    def _after_call(self, segments: list[Segment]) -> bool:
        end = self.form.end
        rest = self._text.lstrip()
        if end and rest.startswith(end):  # after JSON instead of tags
            self._text = rest[len(end) :]
            return True
        if rest and end.startswith(rest):
            return False
        return super()._after_call(segments)

    def _in_value(self, segments: list[Segment]) -> bool:
        if not self._is_begun:
            opening, quote = self.form.quotes
            if opening.startswith(self._text[: len(opening)]):
                if len(self._text) < len(opening):
                    return False
                self._take(len(opening))
                self._closing = quote + self._closing
            self._is_begun = True
        text = self._text
        closing = self._closing
        # The line break before the tag belongs to the tag.
        line_break = "\n" if self.form.value_end.startswith("\n") else ""
        if self._is_string:
            end = text.find(closing)
        elif (behind := self._end_of(lambda: TagEnd(closing), 0)) is None:
            return False
        else:
            end = behind - len(closing)
        if end == -1:
            end = min(unfinished_tag(text, closing), unfinished_tag(text, line_break + closing))
            if end:
                segments.append(Arguments(in_quotes(self._take(end))))
            return False
        value = self._take(end).removesuffix(line_break)
        self._take(len(closing))
        segments.append(Arguments(in_quotes(value) + '"' if self._is_string else self._json_of(value)))
        self._step = self._in_call
        return True

    def _json_of(self, value: str) -> str:
        return as_json(value, self._types)


def as_json(value: str, types: set[str]) -> str:
    """Return a value in JSON: the value itself if it is JSON and need not be a string, or else a string."""
    text = value.strip()
    text = _LITERALS.get(text, text)
    try:
        kind = _KINDS[type(msgspec.json.decode(text))]
    except (msgspec.MsgspecError, RecursionError):
        return msgspec.json.encode(value).decode()
    is_wanted = "string" not in types or kind in types or (kind == "integer" and "number" in types)
    if is_wanted:
        return text
    return msgspec.json.encode(value).decode()
