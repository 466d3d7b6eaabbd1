"""Structural tags, xgrammar's notation of texts with JSON and other forms in them, translated into Lark's.

The type of its formats checks clients' bodies and is published. Other kinds, such as those about single tokens, are
refused by name. It must not know requests or tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from oaiserve.engine.grammars import gbnf, regexes
from oaiserve.engine.grammars.refusal import Refused

MOST_CHARACTERS = 2**18  # characters of the JSON
MOST_FORMATS = 500
MOST_DEPTH = 30  # formats within each other
_TIMES = {"optional": "?", "plus": "+", "star": "*"}


class Format(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A part of a text, by its type: one of xgrammar's formats, with its fields."""

    type: Literal[
        "const_string", "json_schema", "grammar", "regex", "any_text", "sequence", "or", "optional", "plus", "star",
        "repeat", "tag", "triggered_tags", "tags_with_separator",
    ] = "tag"  # fmt: skip
    value: str | None = None
    json_schema: dict[str, Any] | None = None
    style: Literal["json", None] = None
    any_order: Literal[False] = False
    max_whitespace_cnt: int | None = None  # no limit
    grammar: str | None = None
    pattern: str | None = None
    max_tokens: None = None
    max_chars: None = None
    elements: list[Format] = []
    content: Format | None = None
    schema: dict[str, Any] | None = None  # replaces the content of a tag, in xgrammar's older form
    min: int = 0
    max: int = -1  # -1: any number
    begin: str = ""
    end: str | list[str] = ""
    tags: list[Format] = []
    triggers: list[str] = []
    excludes: list[str] = []
    separator: str = ""
    at_least_one: bool = False
    stop_after_first: bool = False


@dataclass
class Writer:
    """Writes a format as Lark, and numbers the rules, schemas and grammars to which it refers."""

    rules: list[str] = field(default_factory=list)
    schemas: list[dict[str, Any]] = field(default_factory=list)
    grammars: list[str] = field(default_factory=list)
    _num_formats: int = 0

    def lark(self, text: str) -> str:
        """Return the grammar of a format in JSON. Raises Refused."""
        if len(text) > MOST_CHARACTERS:
            raise Refused(f"the structural tag has more than {MOST_CHARACTERS} characters")
        start = self._with_end(msgspec.json.decode(text, type=Format), 0, is_last=True)
        return "\n".join([f"start: {start}", *self.rules])

    def _with_end(self, part: Format, depth: int, end: str = "", *, is_last: bool = False) -> str:
        """Return a format followed by the rule of its `end`. `is_last`: the answer ends with it."""
        self._num_formats += 1
        if depth > MOST_DEPTH or self._num_formats > MOST_FORMATS:
            limits = f"{MOST_FORMATS} formats, or {MOST_DEPTH} within each other"
            raise Refused(f"the structural tag has more than {limits}")
        if part.schema is not None:
            part = msgspec.structs.replace(part, content=Format(type="json_schema", json_schema=part.schema))
        of_type = f"the structural tag has a format of the type '{part.type}'"
        inner = depth + 1
        match part:
            case Format(type="any_text") | Format(type="triggered_tags", tags=[_, *_]):
                if end or is_last:
                    return self._free(part, inner, end)
                raise Refused(f"{of_type} where nothing shows its end: it may come last, or in a tag, before its end")
            case Format(type="sequence", elements=[*first, last]):
                most = [self._with_end(each, inner) for each in first]
                return " ".join([*most, self._with_end(last, inner, end, is_last=is_last)])
            case Format(type="or", elements=[_, *_]):
                return _either(self._with_end(each, inner, end, is_last=is_last) for each in part.elements)
            case Format(type="tag", content=Format() as content):
                ends = [*filter(None, [part.end] if isinstance(part.end, str) else part.end)]
                if ends:
                    own = self._named(_either(map(_quoted, ends)), "END")
                else:
                    own = ""
                inside = self._with_end(content, inner, own or end, is_last=is_last and not own)
                return f"{_quoted(part.begin)} {inside} {end if own else ''}"
            case Format(type="tags_with_separator", tags=[_, *_]):
                tag = self._named(_either(self._with_end(each, inner) for each in part.tags))
                if part.stop_after_first:
                    more = ""
                else:
                    more = f"({_quoted(part.separator)} {tag})*"
                if part.at_least_one:
                    written = f"{tag} {more}"
                else:
                    written = f"({tag} {more})?"
            case Format(type="optional" | "plus" | "star" | "repeat" as kind, content=Format() as content):
                most_times = "" if part.max == -1 else part.max
                times = _TIMES.get(kind) or gbnf.repeat(f"{{{part.min},{most_times}}}")
                written = f"({self._with_end(content, inner)}){times}"
            case Format(type="const_string", value=str(text)):
                written = _quoted(text)
            case Format(type="json_schema", json_schema=dict(schema)):
                written = f"@schema_{len(self.schemas)}"
                self.schemas.append(schema)
            case Format(type="grammar", grammar=str(text)):
                written = f"@grammar_{len(self.grammars)}"
                self.grammars.append(gbnf.as_lark(text))
            case Format(type="regex", pattern=str(text)):
                written = f"/{regexes.full_match(text).text}/"
            case _:
                raise Refused(f"{of_type} without the field that it is about")
        return f"{written} {end}"

    def _free(self, part: Format, depth: int, end: str) -> str:
        """Return any text, with tags in it, up to the end. Without an end, it is the rest of the answer."""
        unwanted = "|".join(map(regexes.literal, filter(None, part.excludes)))
        text = self._named("/(?s:.*)/" + f" & ~/(?s:.*)({unwanted})(?s:.*)/" * bool(unwanted), "TEXT")
        if end:
            rest = self._named(f"{text} {end}", options="[lazy]")
        else:
            rest = self._named(text)
        if part.type == "any_text":
            return rest
        bodies: dict[str, list[str]] = {}  # the texts that may follow each trigger
        for tag in part.tags:
            trigger = max((text for text in part.triggers if tag.begin.startswith(text)), key=len, default="")
            if not trigger:
                raise Refused(f"the structural tag has the tag {tag.begin[:60]!r}, which must begin with a trigger")
            tag = msgspec.structs.replace(tag, begin=tag.begin.removeprefix(trigger))
            bodies.setdefault(trigger, []).append(self._with_end(tag, depth))
        inside = [(self._named(_quoted(trigger), "BEGIN"), self._named(_either(bodies[trigger]))) for trigger in bodies]
        first = _either(map(" ".join, inside)) if part.at_least_one else ""
        later = _either(f"{self._named(f'{text} {begin}', options='[lazy]')} {body}" for begin, body in inside)
        if part.stop_after_first:
            if first:
                return f"{first} {end}"
            return f"({later} {end} | {rest})"
        return f"{first} {later}* {rest}"

    def _named(self, text: str, kind: str = "rule", options: str = "") -> str:
        name = f"{kind}_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {text}")
        return name


def _either(texts: Iterable[str]) -> str:
    return f"({' | '.join(texts)})"


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()
