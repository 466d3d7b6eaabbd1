"""More families with a tag for each argument: Hunyuan, MiniCPM 5, Kimi K3, MiniMax M3 and Muse Glimmer."""

from __future__ import annotations

from typing import Any

import msgspec
import regex

from oaiserve.engine.text.schema_types import SchemaTypes
from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.segments import Segment, opening_tags
from oaiserve.routes.dialects.tagged_calls import TaggedCalls, as_json
from oaiserve.routes.dialects.tagged_form import TaggedForm


def _hunyuan(suffix: str, *signs: str) -> CallFamily:
    """Return Hunyuan's family, whose tags have a suffix in some versions."""
    outer, inner, separator, key, value = (
        f"{name}{suffix}>" for name in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
    )

    class Calls(TaggedCalls):
        form = TaggedForm(
            f"<{inner}{{name}}<{separator}\n", f"<{key}{{key}}</{key}\n<{value}", f"</{value}\n", f"</{inner}"
        )
        opening_tags = (f"<{outer}", f"<{inner}")
        closing_tags = (f"</{outer}",)
        tags = tuple(f"{bracket}{name}" for name in (outer, inner, separator, key, value) for bracket in ("<", "</"))

    return CallFamily(
        "hunyuan",
        Calls,
        f"<{outer}\n",
        f"\n</{outer}",
        "\n",
        signs=signs,
        reasoning_tags=(f"<think{suffix}>", f"</think{suffix}>"),
    )


class MiniCPMCalls(TaggedCalls):
    form = TaggedForm('{name}">', '<param name="{key}">', "</param>", "", quotes=("<![CDATA[", "]]>"))
    opening_tags = ('<function name="',)
    closing_tags = ("</function>",)
    tags = ()


class KimiK3Calls(TaggedCalls):
    form = TaggedForm(
        '<|open|>call tool="{name}" index="{number}"<|sep|>',
        '<|open|>argument key="{key}" type="{type}"<|sep|>',
        "<|close|>argument<|sep|>",
        "<|close|>call<|sep|>",
    )
    opening_tags = ("<|open|>tools<|sep|>", '<|open|>call tool="')
    closing_tags = ("<|close|>tools<|sep|>", "<|close|>message<|sep|>")
    hidden_tags = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
    tags = ("<|open|>", "<|close|>", "<|sep|>")


_NS = "]<]minimax[>["
_MOST_DEPTH = 64  # depth of elements; deeper ones are text
_ELEMENT = regex.compile(rf"{regex.escape(_NS)}<(?P<key>[^<>/]++)>")


class MiniMaxM3Calls(TaggedCalls):
    """Arguments that are objects or lists consist of tags, too, by their schema."""

    form = TaggedForm(f'{_NS}<invoke name="{{name}}">', f"{_NS}<{{key}}>", f"{_NS}</{{key}}>", f"{_NS}</invoke>")
    opening_tags = (f"{_NS}<tool_call>", f"{_NS}<invoke name=")
    closing_tags = (f"{_NS}</tool_call>",)
    hidden_tags = ("</mm:think>",)  # comes before an answer without reasoning
    tags = (_NS, "<mm:think>", "</mm:think>")

    def _json_of(self, value: str) -> str:
        return msgspec.json.encode(_value_of(value, self._value_schema, self._types_in)).decode()


def _value_of(text: str, schema: Any, types_in: SchemaTypes, most_depth: int = _MOST_DEPTH) -> Any:
    """Return the value of an element: its text, or the values of the elements in it."""
    types = set(types_in.of(schema))
    if not most_depth or types & {"string"} or not text.lstrip().startswith(_NS):
        return msgspec.json.decode(as_json(text, types))
    elements: list[tuple[str, str]] = []
    at = 0
    while match := _ELEMENT.search(text, at):
        closing = f"{_NS}</{match['key']}>"
        end = text.find(closing, match.end())
        if end == -1:
            return text
        elements.append((match["key"], text[match.end() : end]))
        at = end + len(closing)
    properties = _part(schema, "properties")
    if {key for key, _ in elements} == {"item"} and "item" not in properties and types != {"object"}:
        return [_value_of(inside, _part(schema, "items"), types_in, most_depth - 1) for _, inside in elements]
    return {key: _value_of(inside, properties.get(key), types_in, most_depth - 1) for key, inside in elements}


def _part(schema: Any, name: str) -> Any:
    """Return this keyword of a schema, or of one of its alternatives."""
    options = [schema]
    for keyword in ("anyOf", "oneOf") if isinstance(schema, dict) else ():
        if isinstance(alternatives := schema.get(keyword), list):
            options += alternatives
    schemas = (option[name] for option in options if isinstance(option, dict) and isinstance(option.get(name), dict))
    return next(schemas, {})


_MESSAGE = "<|message|>"


class MuseCalls(TaggedCalls):
    """Reads messages to tools. Messages to the user are content, whatever they contain. Models sometimes repeat the tag
    before a message."""

    form = TaggedForm(
        '{name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n',
        '<atem:parameter name="{key}">',
        "</atem:parameter>\n",
        "",
    )
    opening_tags = ("<|start|>assistant to=", " to=")
    closing_tags = ("</atem:invoke>", "</atem:function_calls>")
    hidden_tags = ("<|eot|>", "<|eom|>")
    tags = ("<|start|>", _MESSAGE, *hidden_tags)
    header = regex.compile(
        r"(?:<\|start\|>assistant)? to=(?:user<\|message\|>|(?P<name>[^\s<>]++)(?:<\|message\|>\s*+)++"
        r'<atem:function_calls>\s*<atem:invoke name="(?P=name)">\n?)'
    )

    def _head(self, segments: list[Segment]) -> bool:
        match = self._match(self.header)
        if match is None:
            return False
        if match["name"] is not None:
            return self._begin_call(segments, match)
        self._text = self._text[match.end() :]
        self._step = self._before_content
        return True

    def _before_content(self, _segments: list[Segment]) -> bool:
        end, is_certain = opening_tags(self._text, _MESSAGE)
        self._text = self._text[end:]
        if is_certain:
            self._step = self._in_text
        return is_certain

    def _give_up(self, segments: list[Segment]) -> None:
        if self._step == self._before_content:
            self._step = self._in_text
        else:
            super()._give_up(segments)

    def finish(self, *, is_cut: bool) -> list[Segment]:
        if self._step == self._before_content:
            self._step = self._in_text
        return super().finish(is_cut=is_cut)


HUNYUAN_OPEN = _hunyuan(":opensource", "<tool_sep", ":opensource")
HUNYUAN = _hunyuan("", "<tool_sep", "<arg_key")
MINICPM = CallFamily(
    "minicpm5",
    MiniCPMCalls,
    '<function name="',
    "</function>",
    "\n",
    arguments_key="",
    name_end='">',
    signs=('<function name="', "<param name="),
)
KIMI_K3 = CallFamily(
    "kimi_k3",
    KimiK3Calls,
    "<|open|>tools<|sep|>",
    "<|close|>tools<|sep|>",
    signs=("<|open|>", "argument"),
    reasoning_tags=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    answer_opening="<|open|>response<|sep|>",
)
MINIMAX_M3 = CallFamily(
    "minimax_m3",
    MiniMaxM3Calls,
    f"{_NS}<tool_call>\n",
    f"\n{_NS}</tool_call>",
    "\n",
    signs=(_NS, "<invoke name="),
    reasoning_tags=("<mm:think>", "</mm:think>"),
)
MUSE = CallFamily(
    "muse",
    MuseCalls,
    "<|start|>assistant to=",
    "</atem:invoke>\n</atem:function_calls>",
    "<|eom|>",
    arguments_key="",
    name_end='<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n',
    signs=("<atem:invoke name=",),
    reasoning_tags=(" to=self<|message|>", "<|eom|>"),
    reasons_always=True,
    answer_opening="<|start|>assistant to=user<|message|>",
)
