"""Calls of Qwen 3 Coder, Seed-OSS, MiniMax M2 and GLM: names and values in tags of XML's kind."""

from __future__ import annotations

from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.tagged_calls import TaggedCalls
from oaiserve.routes.dialects.tagged_form import TaggedForm


class QwenCoderCalls(TaggedCalls):
    form = TaggedForm("<function={name}>\n", "<parameter={key}>\n", "\n</parameter>\n", "</function>")
    opening_tags = ("<tool_call>", "<function=")
    closing_tags = ("</tool_call>",)
    tags = ("<tool_call>", "</tool_call>")


class SeedCalls(TaggedCalls):
    form = TaggedForm("<function={name}>\n", "<parameter={key}>", "</parameter>\n", "</function>")
    opening_tags = ("<seed:tool_call>", "<function=")
    closing_tags = ("</seed:tool_call>",)
    tags = ("<seed:tool_call>", "</seed:tool_call>")


class MiniMaxCalls(TaggedCalls):
    form = TaggedForm('<invoke name="{name}">\n', '<parameter name="{key}">', "</parameter>\n", "</invoke>")
    opening_tags = ("<minimax:tool_call>", "<invoke name=")
    closing_tags = ("</minimax:tool_call>",)
    tags = ("<minimax:tool_call>", "</minimax:tool_call>")


class GLMCalls(TaggedCalls):
    form = TaggedForm("{name}\n", "<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n", "")
    opening_tags = ("<tool_call>",)
    closing_tags = ("</tool_call>",)
    tags = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


QWEN_CODER = CallFamily(
    "qwen3_coder",
    QwenCoderCalls,
    "<tool_call>\n",
    "\n</tool_call>",
    "\n",
    form=QwenCoderCalls.form,
    signs=("<function=",),
)
SEED = CallFamily(
    "seed_oss",
    SeedCalls,
    "<seed:tool_call>\n",
    "\n</seed:tool_call>",
    "\n",
    form=SeedCalls.form,
    signs=("<seed:tool_call>",),
)
MINIMAX = CallFamily(
    "minimax_m2",
    MiniMaxCalls,
    "<minimax:tool_call>\n",
    "\n</minimax:tool_call>",
    "\n",
    form=MiniMaxCalls.form,
    signs=("<minimax:tool_call>",),
)
GLM = CallFamily("glm45", GLMCalls, "<tool_call>", "</tool_call>", "\n", form=GLMCalls.form, signs=("<arg_key>",))
