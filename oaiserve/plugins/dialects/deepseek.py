"""Calls of DeepSeek: with its own tags since V3, and with a tag for each argument (DSML) since V3.2."""

from __future__ import annotations

import regex

from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.json_calls import NamedCalls
from oaiserve.routes.dialects.sites import NAME, SPACE, Site
from oaiserve.routes.dialects.tagged_calls import TaggedCalls
from oaiserve.routes.dialects.tagged_form import TaggedForm

_CALLS = "<｜tool▁calls▁begin｜>"
_CALL = "<｜tool▁call▁begin｜>"
_SEP = "<｜tool▁sep｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_CALLS_END = "<｜tool▁calls▁end｜>"


class DeepSeekCalls(NamedCalls):
    """Reads the name and the arguments of V3.1, or V3's and R1's type, name, and arguments in a code block."""

    opening_tags = (_CALLS, _CALL)
    closing_tags = ("```", _CALL_END, _CALLS_END)
    tags = (_CALLS, _CALL, _SEP, _CALL_END, _CALLS_END)
    named = regex.compile(
        rf"(?:{_CALLS}\s*)?{_CALL}\s*(?:function{_SEP}(?P<name>[^\s<>{{}}]++)\s*```json\s*"
        rf"|(?P<name>[^\s<>{{}}]++){_SEP}\s*)(?=\{{)"
    )
    sites = (
        Site(_CALL, NAME, (_SEP, SPACE), is_spaced=True),
        Site(_SEP, NAME, (r"/[ \t\n\r]{0,20}```json[ \t\n\r]{0,20}/",)),
    )


class DSMLCalls(TaggedCalls):
    form = TaggedForm(
        '<｜DSML｜invoke name="{name}">\n',
        '<｜DSML｜parameter name="{key}" string="{is_string}">',
        "</｜DSML｜parameter>\n",
        "</｜DSML｜invoke>",
    )
    opening_tags = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<｜DSML｜invoke name=")
    closing_tags = ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>")
    tags = ("｜DSML｜", *opening_tags, *closing_tags)


DEEPSEEK_V3 = CallFamily(
    "deepseek_v3",
    DeepSeekCalls,
    f"{_CALL}function{_SEP}",
    f"\n```{_CALL_END}",
    "\n",
    _CALLS,
    _CALLS_END,
    arguments_key="",
    name_end="\n```json\n",
    signs=(_SEP, "```json"),
)
DEEPSEEK_V31 = CallFamily(
    "deepseek_v31",
    DeepSeekCalls,
    _CALL,
    _CALL_END,
    "",
    _CALLS,
    _CALLS_END,
    arguments_key="",
    name_end=_SEP,
    signs=(_SEP,),
)
DEEPSEEK_V4 = CallFamily(
    "deepseek_v4",
    DSMLCalls,
    "<｜DSML｜tool_calls>\n",
    "\n</｜DSML｜tool_calls>",
    "\n",
    signs=("｜DSML｜", "tool_calls>"),
)
DEEPSEEK_V32 = CallFamily(
    "deepseek_v32", DSMLCalls, "<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>", "\n", signs=("｜DSML｜",)
)
