"""More families with calls as JSON objects, alone or in lists. They differ in their tags, and in the names of keys."""

from __future__ import annotations

import regex

from oaiserve.routes.dialects.calls import CallParser
from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.json_calls import JsonCallParser, ListedCalls, NamedCalls
from oaiserve.routes.dialects.lark import NUMBER
from oaiserve.routes.dialects.reasoning import THINK
from oaiserve.routes.dialects.segments import Segment
from oaiserve.routes.dialects.sites import BLANK, NAME, SPACE, Site


def _listed(*opening: str, closing: str) -> type[CallParser]:
    class Calls(ListedCalls):
        opening_tags = opening
        closing_tags = (closing,) if closing else ()
        tags = (*opening_tags, *closing_tags)

    return Calls


class LinedCalls(ListedCalls):
    """Reads calls in a list, or one per line."""

    opening_tags = ("<tool_calls>",)
    closing_tags = ("</tool_calls>",)
    tags = (*opening_tags, *closing_tags)

    def _after_call(self, segments: list[Segment]) -> bool:
        return (not self._is_list and self._goes_on("{")) or super()._after_call(segments)


class AprielCalls(LinedCalls):
    hidden_tags = ("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]")


class KeyedCalls(ListedCalls):
    """Reads a list of objects whose only key is the name of a tool."""

    opening_tags = ("<|tools_prefix|>",)
    closing_tags = ("<|tools_suffix|>",)
    tags = (*opening_tags, *closing_tags)
    sites = (Site(r'[\[,>]\s*\{\s*"', '^"', (rf'/"{BLANK}:{BLANK}/',), (rf"/{BLANK}\}}/",)),)
    keyed = regex.compile(r'\s*+(?P<object>\{)\s*"(?P<name>[^"\\\x00-\x1f]*+)"\s*:\s*(?=\{)')

    def _head_of_object(self, segments: list[Segment], at: int) -> bool:
        match = self._match(self.keyed, at)
        if match is None:
            return False
        self._begin(segments, match["name"])
        self._begin_arguments(match.start("object"), match.end(), depth=1)
        return True


class CohereCalls(ListedCalls):
    opening_tags = ("<|START_ACTION|>",)
    closing_tags = ("<|END_ACTION|>",)
    hidden_tags = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
    tags = (*opening_tags, *closing_tags)


class FunctionaryCalls(NamedCalls):
    """Reads `<function=NAME>{...}</function>` of Functionary 3.1."""

    opening_tags = ("<function=",)
    closing_tags = ("</function>",)
    tags = ()
    sites = (Site("<function=", NAME, (">", SPACE)),)
    named = regex.compile(r"<function=(?P<name>[^\s<>{}]++)>\s*(?=\{)")


class GigaChatCalls(JsonCallParser):
    opening_tags = ("<|message_sep|>\n\nfunction call<|role_sep|>\n", "<|function_call|>")
    tags = ("<|message_sep|>", "<|role_sep|>", "<|function_call|>")


COHERE = CallFamily(
    "cohere",
    CohereCalls,
    separator=",\n    ",
    before="<|START_ACTION|>[\n    ",
    after="\n]<|END_ACTION|>",
    object_start=f'{{"tool_call_id": "{NUMBER}", "tool_name": "',
    arguments_key="parameters",
    signs=("<|START_ACTION|>",),
    reasoning_tags=("<|START_THINKING|>", "<|END_THINKING|>"),
)
COMMAND_R = CallFamily(
    "command_r",
    _listed("Action:\n```json", "Action: ```json", "Action:```json", closing="```"),
    separator=",\n    ",
    before="Action:\n```json\n[\n    ",
    after="\n]```",
    object_start='{"tool_name": "',
    arguments_key="parameters",
    signs=("Action:", '"tool_name"'),
    rank=1,
)
NEMOTRON = CallFamily(
    "nemotron_json",
    _listed("<TOOLCALL>", closing="</TOOLCALL>"),
    separator=", ",
    before="<TOOLCALL>[",
    after="]</TOOLCALL>",
    signs=("<TOOLCALL>",),
)
APRIEL = CallFamily(
    "apriel",
    AprielCalls,
    separator=", ",
    before="<tool_calls>[",
    after="]</tool_calls>",
    signs=("<tool_calls>[",),
    reasoning_tags=("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)
MINIMAX_M1 = CallFamily(
    "minimax",
    LinedCalls,
    separator="\n",
    before="<tool_calls>\n",
    after="\n</tool_calls>",
    signs=("<tool_calls>\\n{",),
    reasoning_tags=THINK,
)
APERTUS = CallFamily(
    "apertus",
    KeyedCalls,
    '{"',
    "}",
    ", ",
    "<|tools_prefix|>[",
    "]<|tools_suffix|>",
    arguments_key="",
    name_end='": ',
    signs=("<|tools_prefix|>",),
    reasoning_tags=("<|inner_prefix|>", "<|inner_suffix|>"),
)
_TOOL_CALL = _listed("<|tool_call|>", "functools", closing="<|/tool_call|>")  # Without tags, Phi-4 writes functools.
PHI4 = CallFamily(
    "phi4_mini_json",
    _TOOL_CALL,
    separator=", ",
    before="<|tool_call|>[",
    after="]<|/tool_call|>",
    signs=("<|/tool|>",),
    rank=2,
)
GRANITE = CallFamily(
    "granite", _TOOL_CALL, separator=", ", before="<|tool_call|>[", after="]", signs=("<|tool_call|>",), rank=2
)
FIREFUNCTION = CallFamily(
    "firefunction",
    _listed("functools", closing=""),
    separator=", ",
    before="functools[",
    after="]",
    signs=("functools[",),
)
FUNCTIONARY = CallFamily(
    "functionary_v31",
    FunctionaryCalls,
    "<function=",
    "</function>",
    arguments_key="",
    name_end=">",
    signs=("<function=", ">{", "</function>", "ipython"),
)
GIGACHAT31 = CallFamily(
    "gigachat3",
    GigaChatCalls,
    GigaChatCalls.opening_tags[1],
    signs=("<|function_call|>", "<|message_sep|>"),
)
GIGACHAT = CallFamily(
    "gigachat3",
    GigaChatCalls,
    GigaChatCalls.opening_tags[0],
    signs=("function call", "<|message_sep|>"),
)
