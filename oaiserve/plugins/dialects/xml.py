"""Calls of Qwen 3 Coder, Seed-OSS, MiniMax M2 and GLM: names and values in tags like XML's."""

from __future__ import annotations

from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.tagged_calls import TaggedCalls
from oaiserve.routes.dialects.tagged_form import TaggedForm


def _family(name: str, tag: str, written: TaggedForm, sign: str) -> CallFamily:
    """Return a family whose calls are each in a tag of this name, which a model may leave out."""
    opening = f"<{tag}>"
    closing = f"</{tag}>"

    class Calls(TaggedCalls):
        form = written
        opening_tags = (opening, written.begin.partition("{name}")[0].rstrip('"'))
        closing_tags = (closing,)
        tags = (opening, closing)

    return CallFamily(name, Calls, f"{opening}\n", f"\n{closing}", "\n", signs=(sign,))


class GLMCalls(TaggedCalls):
    form = TaggedForm("{name}\n", "<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n", "")
    opening_tags = ("<tool_call>",)
    closing_tags = ("</tool_call>",)
    tags = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


SEED = _family(
    "seed_oss",
    "seed:tool_call",
    TaggedForm("<function={name}>\n", "<parameter={key}>", "</parameter>\n", "</function>"),
    "<seed:tool_call>",
)
MINIMAX = _family(
    "minimax_m2",
    "minimax:tool_call",
    TaggedForm('<invoke name="{name}">\n', '<parameter name="{key}">', "</parameter>\n", "</invoke>"),
    "<minimax:tool_call>",
)
GLM = CallFamily("glm45", GLMCalls, "<tool_call>", "</tool_call>", "\n", signs=("<arg_key>",))
QWEN_CODER = _family(
    "qwen3_coder",
    "tool_call",
    TaggedForm("<function={name}>\n", "<parameter={key}>\n", "\n</parameter>\n", "</function>"),
    "<function=",
)
