"""Calls of Granite 3 and Phi-4: JSON objects in a list after `<|tool_call|>`."""

from __future__ import annotations

from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.json_calls import ListedCalls


class TaggedLists(ListedCalls):
    """Also reads `functools[...]`, which Phi-4 mini writes if its prompt has no tags, and a call without a list."""

    opening_tags = ("<|tool_call|>", "functools")
    closing_tags = ("<|/tool_call|>",)
    tags = ("<|tool_call|>", "<|/tool_call|>")


PHI4 = CallFamily(
    "phi4_mini_json",
    TaggedLists,
    separator=", ",
    before="<|tool_call|>[",
    after="]<|/tool_call|>",
    signs=("<|/tool|>",),
)
GRANITE = CallFamily(
    "granite", TaggedLists, separator=", ", before="<|tool_call|>[", after="]", signs=("<|tool_call|>",)
)
