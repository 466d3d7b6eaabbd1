"""Tests gpt-oss's channels on the routes: reasoning, content and calls, what is forced, and efforts."""

from typing import Any

import pytest

from oaiserve.engine.request import Reasoning
from tests.routes.asking import CHAT, HI, answered, chatted, stream_of
from tests.routes.doubles import says
from tests.serving import Serve, Served

GPT_OSS = "{{ tools }}{{ reasoning_effort }}<|start|>assistant<|channel|>analysis<|message|>"
TOOLS = [{"type": "function", "function": {"name": "stop"}}]
FREE = {"type": "grammar", "syntax": "regex", "definition": ".*"}
ANALYSIS = ("<|channel|>", "analysis", "<|message|>", "Hm", ".", "<|end|>")
FINAL = ("<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "Yes", ".")
CALL = ("<|start|>", "assistant", "<|channel|>", "commentary to=functions.stop ", "<|constrain|>", "json<|message|>{}")


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve(template=GPT_OSS, script=says(*ANALYSIS, *FINAL))


def message(served: Served, *texts: str, **body: Any) -> dict[str, Any]:
    served.engine.script = says(*texts)
    answer = answered(served.chat(**body))
    (choice,) = answer["choices"]
    return {**choice["message"], "reason": choice["finish_reason"], "usage": answer["usage"]}


def test_channels_are_told_apart(served: Served) -> None:
    answer = message(served, *ANALYSIS, *FINAL)
    assert (answer["reasoning"], answer["content"], answer["reason"]) == ("Hm.", "Yes.", "stop")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    answer = message(served, *ANALYSIS, *CALL, tools=TOOLS)
    assert (answer["reasoning"], answer["content"], answer["reason"]) == ("Hm.", None, "tool_calls")
    assert answer["tool_calls"][0]["function"] == {"name": "stop", "arguments": "{}"}


@pytest.mark.parametrize("num_more", [0, 2000])
def test_reasoning_before_a_long_answer_counts_the_same_whole_and_streamed(served: Served, num_more: int) -> None:
    answer = message(served, *ANALYSIS, *FINAL, *["Yes."] * num_more)
    chunks = stream_of(served, CHAT, stream_options={"include_usage": True})
    for usage in (answer["usage"], chunks[-1]["usage"]):
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 6}


@pytest.mark.parametrize(
    ("body", "texts", "found"),
    [
        ({"reasoning_format": "none"}, (*ANALYSIS, *FINAL), "".join((*ANALYSIS, *FINAL))),
        ({"include_reasoning": False}, (*ANALYSIS, *FINAL), "Yes."),
        ({"tools": TOOLS, "tool_choice": "none"}, CALL, ""),
    ],
)
def test_what_a_client_does_not_want_is_left_out_or_left_as_it_is(
    served: Served, body: dict[str, Any], texts: tuple[str, ...], found: str
) -> None:
    assert message(served, *texts, **body)["content"] == found


@pytest.mark.parametrize(
    ("body", "prefix"),
    [
        ({"response_format": {"type": "json_object"}}, '"<|start|>assistant<|channel|>final<|message|>"'),
        ({"structured_outputs": {"regex": "a"}}, '"<|start|>assistant<|channel|>final<|message|>"'),
        ({"tools": TOOLS, "tool_choice": "required"}, ""),
    ],
)
def test_a_constraint_begins_in_the_final_channel_and_a_forced_call_in_the_commentary(
    served: Served, body: dict[str, Any], prefix: str
) -> None:
    request, prompt = chatted(served, **body)
    assert request.params.grammar.prefix == prefix
    assert prompt.opening == "<|channel|>analysis<|message|>"
    assert request.params.reasoning == Reasoning("<|end|>")


@pytest.mark.parametrize(
    ("effort", "shown", "budget"),
    [("high", "high", None), ("minimal", "low", None), ("none", "low", 0), ("xhigh", "high", None)],
)
def test_efforts_are_those_that_the_model_knows(served: Served, effort: str, shown: str, budget: int | None) -> None:
    request, prompt = chatted(served, reasoning_effort=effort)
    assert prompt.template_kwargs == {"reasoning_effort": shown}
    assert request.params.reasoning == Reasoning("<|end|>", "<|channel|>analysis<|message|>", budget)


@pytest.mark.plugin("responses")
def test_the_text_of_a_forced_custom_tool_is_its_input(served: Served) -> None:
    served.engine.script = says("Hm.", *ANALYSIS[-1:], *CALL[:-1], "json<|message|>", 'say "a"')
    tool = {"type": "custom", "name": "stop"}
    answer = answered(served.post("/v1/responses", input=HI, tools=[{**tool, "format": FREE}], tool_choice=tool))
    (call,) = [item for item in answer["output"] if item["type"] == "custom_tool_call"]
    assert (call["name"], call["input"]) == ("stop", 'say "a"')
