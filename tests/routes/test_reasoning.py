"""Tests reasoning on /v1/chat/completions: by template and by flag, whole and streamed, its tokens, its grammars."""

from typing import Any

import pytest

from oaiserve.engine.request import Reasoning
from tests.missing_plugins import has_plugin
from tests.routes.asking import CHAT, HYBRID, OPEN, RESPONSES, THOUGHT, answered, chatted, stream_of, submitted
from tests.routes.doubles import says
from tests.serving import Serve, Served

TOOLS = [{"type": "function", "function": {"name": "stop"}}]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture
def served(serve: Serve) -> Served:
    """A server whose model thinks if it wants to."""
    return serve(template=HYBRID, script=says(*THOUGHT))


def test_reasoning_is_beside_the_content(served: Served) -> None:
    answer = answered(served.chat())
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Yes.",
        "refusal": None,
        "reasoning": "I think.",
        "reasoning_content": "I think.",
    }
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 7}


def test_reasoning_is_streamed_before_the_content(served: Served) -> None:
    chunks = stream_of(served, CHAT, stream_options={"include_usage": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert deltas[0] == {"role": "assistant", "content": None}
    assert all(delta.keys() in ({"reasoning", "reasoning_content"}, {"content"}) for delta in deltas[1:-1])
    for name, text in (("reasoning", "I think."), ("reasoning_content", "I think."), ("content", "Yes.")):
        assert "".join(delta.get(name) or "" for delta in deltas) == text
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 7}


@pytest.mark.parametrize(
    ("options", "texts", "body", "reasoning", "content", "num_tokens"),
    [
        ({"template": OPEN}, THOUGHT[1:], {}, "I think.", "Yes.", 6),
        ({"template": OPEN}, THOUGHT, {}, "I think.", "Yes.", 7),
        ({"template": OPEN}, ("I", " think"), {}, "I think", None, 2),
        ({"template": HYBRID}, ("Yes", "."), {}, None, "Yes.", 0),
        ({"template": HYBRID}, ("a</think>b",), {}, None, "a</think>b", 0),
        ({"template": "", "reasoning_parser": "deepseek_r1"}, ("a</think>b",), {}, "a", "b", 1),
        ({"template": "", "reasoning_parser": "qwen3"}, ("a</think>b",), {}, "a", "b", 1),
        ({"template": "", "reasoning_parser": "qwen3"}, ("a</think>b",), NO_THINKING, None, "a</think>b", 0),
        ({"template": HYBRID}, THOUGHT, {"include_reasoning": False}, None, "Yes.", 7),
    ],
)
def test_where_reasoning_begins_and_ends(
    serve: Serve,
    options: dict[str, Any],
    texts: tuple[str, ...],
    body: dict[str, Any],
    reasoning: str | None,
    content: str | None,
    num_tokens: int,
) -> None:
    answer = answered(serve(**options, script=says(*texts)).chat(**body))
    message = answer["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == (reasoning, content)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_tokens}


@pytest.mark.parametrize(
    ("options", "body"),
    [
        ({"template": HYBRID, "reasoning_parser": "none"}, {}),
        ({"template": HYBRID}, {"reasoning_format": "none"}),
        ({"template": "no marks"}, {}),
    ],
)
def test_the_text_stays_whole_where_reasoning_is_not_read(
    serve: Serve, options: dict[str, Any], body: dict[str, Any]
) -> None:
    answer = answered(serve(**options, script=says(*THOUGHT)).chat(**body))
    assert answer["choices"][0]["message"]["content"] == "".join(THOUGHT)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize(
    ("template", "body", "after", "opening"),
    [
        (OPEN, {}, "</think>", ""),
        (HYBRID, {}, "</think>", "<think>\n"),
        (HYBRID, NO_THINKING, "", ""),
        (HYBRID, {"chat_template_kwargs": {"enable_thinking": True}}, "</think>", "<think>\n"),
        (HYBRID, {"messages": [{"role": "assistant", "content": "So"}], "continue_final_message": True}, "", ""),
        ("{{ tools }}", {}, "", ""),
    ],
)
def test_a_grammar_begins_after_the_reasoning(
    serve: Serve, template: str, body: dict[str, Any], after: str, opening: str
) -> None:
    request, prompt = chatted(serve(template=template), tools=TOOLS, tool_choice="required", **body)
    reasoning = request.params.reasoning
    begins_after = "" if reasoning is None or reasoning.opening else reasoning.closing
    assert (request.params.grammar is not None, begins_after, prompt.opening) == (True, after, opening)


def test_every_grammar_begins_and_stop_strings_count_after_the_reasoning(serve: Serve) -> None:
    for template, opening in ((OPEN, ""), (HYBRID, "<think>\n")):
        for body in ({"response_format": {"type": "json_object"}}, {"stop": ["x"]}):
            request, prompt = chatted(serve(template=template), **body)
            assert (request.params.grammar is None) == ("stop" in body)
            assert (request.params.reasoning, prompt.opening) == (Reasoning("</think>"), opening)
    request, prompt = chatted(serve(template=HYBRID), response_format={"type": "text"})
    assert (request.params.grammar, prompt.opening) == (None, "")


def test_reasoning_of_the_history_has_both_names(served: Served) -> None:
    for name in ("reasoning", "reasoning_content"):
        message = {"role": "assistant", "content": "Yes.", name: "I think."}
        _, prompt = chatted(served, messages=[message])
        assert prompt.messages == [{"role": "assistant", "content": "Yes.", "reasoning": "I think."}]


@pytest.mark.parametrize(
    ("template", "body", "budget", "kwargs"),
    [
        (HYBRID, {"thinking_token_budget": 7.0}, 7, {}),
        (HYBRID, {"thinking_token_budget": 7, "reasoning_effort": "low"}, 7, {"reasoning_effort": "low"}),
        (HYBRID, {"reasoning_effort": "low"}, 1024, {"reasoning_effort": "low"}),
        (HYBRID, {"reasoning_effort": "high"}, None, {"reasoning_effort": "high"}),
        (HYBRID, {"reasoning_effort": "none"}, None, {"enable_thinking": False}),
        (OPEN, {"reasoning_effort": "none"}, 0, {}),
        (OPEN + "{{ reasoning_effort }}", {"reasoning_effort": "low"}, None, {"reasoning_effort": "low"}),
    ],
)
def test_reasoning_has_the_budget_of_the_client_or_of_an_effort_that_the_template_does_not_know(
    serve: Serve, template: str, body: dict[str, Any], budget: int | None, kwargs: dict[str, Any]
) -> None:
    served = serve(template=template)
    request, prompt = chatted(served, **body)
    assert (request.params.reasoning.budget, prompt.template_kwargs) == (budget, kwargs)
    if has_plugin("responses"):
        effort = {"effort": body["reasoning_effort"]} if "reasoning_effort" in body else {}
        others = {name: value for name, value in body.items() if name != "reasoning_effort"}
        answered(served.post(RESPONSES, input="Hi", reasoning=effort, **others))
        assert submitted(served)[0].params.reasoning == request.params.reasoning
