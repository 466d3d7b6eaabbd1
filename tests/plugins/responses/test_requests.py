"""Tests what /v1/responses is asked: prompts and parameters that are those of chat, and what is refused."""

from typing import Any

import pytest

from oaiserve.engine.request import ChatPrompt, Request
from oaiserve.facts.record import Outcome
from tests.plugins.responses.asking import LOGPROBS, STOP, TOOLS, ask
from tests.routes.asking import CHATML, HYBRID, PARAMETERS, RESPONSES, ZONE, chatted, refused
from tests.routes.asking import submitted as last_request
from tests.serving import Serve, Served

CHAT_TOOLS = [{"type": tool.pop("type"), "function": tool} for tool in map(dict, TOOLS)]


def submitted(served: Served, **body: Any) -> tuple[Request, ChatPrompt]:
    ask(served, **body)
    return last_request(served)


def formatted(**format: Any) -> dict[str, Any]:
    return {"text": {"format": format}}


# The prompt.


def test_instructions_come_first(served: Served) -> None:
    _, prompt = submitted(served, instructions="Be brief.")
    assert prompt.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert prompt.add_generation_prompt


def test_the_tokens_of_a_prompt_are_counted_before_it_is_sent(serve: Serve) -> None:
    served = serve(template=HYBRID)
    first = ask(served, input="Hi")
    last_request(served)
    body = {"input": "And?", "instructions": "Be brief.", "tools": TOOLS, "previous_response_id": first["id"]}
    count = served.post(f"{RESPONSES}/input_tokens", **body)
    _, prompt = submitted(served, **body)
    num_tokens = len(served.engine.tokenizer.encode(prompt))
    assert count.json() == {"object": "response.input_tokens", "input_tokens": num_tokens}
    refused(served.post(f"{RESPONSES}/input_tokens", input=[]), "input", "at least one item")
    gone = served.post(f"{RESPONSES}/input_tokens", input="Hi", previous_response_id="resp_x")
    refused(gone, "previous_response_id", code="previous_response_not_found")


ANSWER = {"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}
ONE_CALL = {"parallel_tool_calls": False}
CALLED = {"type": "function", "function": {"name": "stop"}}
ITEMS_AND_MESSAGES: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Hi"}]),
    (
        [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Obey."}]},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        ],
        [
            {"role": "developer", "content": "Obey."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
    ),
    (
        [
            {"role": "user", "content": "Hi"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [ANSWER]},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "get_time", "arguments": ZONE},
            {"type": "function_call", "call_id": "c2", "name": "stop", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "12:00"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
            {"role": "user", "content": "And?"},
        ],
        [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": "Well.",
                "reasoning": "Hm.",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": ZONE}},
                    {"id": "c2", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
            {"role": "tool", "tool_call_id": "c2", "content": "done"},
            {"role": "user", "content": "And?"},
        ],
    ),
    (  # as Codex sends what a model wrote after its call
        [
            {"role": "user", "content": "Hi"},
            {"type": "function_call", "call_id": "c1", "name": "stop", "arguments": "{}"},
            {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [ANSWER]},
            {"type": "function_call_output", "call_id": "c1", "output": "done"},
        ],
        [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": "Well.",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "stop", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
        ],
    ),
    (  # as a small model writes around its calls
        [
            {"role": "user", "content": "Hi"},
            {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [ANSWER]},
            {"type": "function_call", "call_id": "c1", "name": "stop", "arguments": "{}"},
            {"type": "message", "id": "msg_2", "status": "completed", "role": "assistant", "content": [ANSWER]},
            {"type": "function_call", "call_id": "c2", "name": "get_time", "arguments": ZONE},
            {"type": "message", "role": "assistant", "content": [ANSWER, ANSWER]},
            {"type": "function_call_output", "call_id": "c1", "output": "done"},
            {"type": "function_call_output", "call_id": "c2", "output": "12:00"},
        ],
        [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": text} for text in ("Well.\n\nWell.", "Well.", "Well.")],
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
                    {"id": "c2", "type": "function", "function": {"name": "get_time", "arguments": ZONE}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
            {"role": "tool", "tool_call_id": "c2", "content": "12:00"},
        ],
    ),
]


def a_call(number: int) -> list[dict[str, Any]]:
    call = {"type": "function_call", "call_id": f"c{number}", "name": "stop", "arguments": "{}"}
    return [call, {"type": "function_call_output", "call_id": f"c{number}", "output": f"{number}" * 1000}]


@pytest.mark.parametrize(
    ("items", "dropped"),
    [
        ([{"role": "user", "content": "a" * 4086}], None),
        (  # at a message of the user, and the developer's stays
            [
                {"role": "developer", "content": "Obey."},
                {"role": "user", "content": "a" * 2000},
                {"role": "assistant", "content": "b" * 1000},
                {"role": "user", "content": "c" * 1000},
                *a_call(1),
                {"role": "user", "content": "And?"},
            ],
            range(1, 3),
        ),
        # 1,024 of 4,096 tokens are for the answer. No call is parted from its output.
        ([{"role": "user", "content": "a" * 200}, *a_call(1), *a_call(2), *a_call(3), *a_call(4)], range(3)),
        ([*a_call(1), {"role": "user", "content": "a" * 4096}], range(2)),  # it is the engine that refuses the rest
    ],
)
def test_truncation_drops_the_first_items_that_the_context_has_no_room_for(
    served: Served, items: list[dict[str, Any]], dropped: range | None
) -> None:
    answer = ask(served, input=items, truncation="auto", instructions="Be brief.")
    assert answer.get("truncated_items") == (None if dropped is None else len(dropped))
    _, truncated = last_request(served)
    staying = [item for number, item in enumerate(items) if number not in (dropped or ())]
    _, expected = submitted(served, input=staying, instructions="Be brief.")
    assert truncated == expected


@pytest.mark.parametrize("template", [None, HYBRID, CHATML], ids=["plain", "with-tools", "without-tools"])
@pytest.mark.parametrize(
    ("items", "messages"), ITEMS_AND_MESSAGES, ids=["text", "parts", "calls", "text-after-call", "text-around-calls"]
)
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no-tools", "tools"])
def test_the_prompt_and_the_parameters_are_those_of_the_same_conversation_over_chat(
    serve: Serve, template: str | None, items: list[Any], messages: list[Any], tools: list[Any]
) -> None:
    served = serve(template=template)
    request, prompt = submitted(served, input=items, tools=tools, temperature=0, max_output_tokens=9)
    chat_tools = {"tools": CHAT_TOOLS} if tools else {}
    of_chat, chat_prompt = chatted(served, messages=messages, temperature=0, max_tokens=9, **chat_tools)
    assert (prompt.param, chat_prompt.param) == ("input", "messages")
    for name in ("messages", "tools", "template_kwargs", "opening"):
        assert getattr(prompt, name) == getattr(chat_prompt, name)
    assert request.params == of_chat.params


@pytest.mark.parametrize(
    ("body", "of_chat"),
    [
        (
            formatted(type="json_schema", name="n", schema=PARAMETERS, strict=True),
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}}},
        ),
        (formatted(type="json_object"), {"response_format": {"type": "json_object"}}),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {"response_format": {"type": "text"}}),
        ({"tool_choice": STOP}, {"tool_choice": CALLED}),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [STOP]}},
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CALLED]}}},
        ),
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        ({"tool_choice": "required", **ONE_CALL}, {"tool_choice": "required", **ONE_CALL}),
        ({"structured_outputs": {"regex": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
        ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"seed": 5, "top_k": 3, "stop": ["x"], "min_p": 0.1}, {"seed": 5, "top_k": 3, "stop": ["x"], "min_p": 0.1}),
        ({"include": LOGPROBS, "top_logprobs": 4}, {"logprobs": True, "top_logprobs": 4}),
    ],
)
def test_what_is_asked_in_other_words_than_in_chat_is_the_same(
    serve: Serve, body: dict[str, Any], of_chat: dict[str, Any]
) -> None:
    served = serve(template=HYBRID)
    tools, chat_tools = (TOOLS, CHAT_TOOLS) if "tool_choice" in body else ([], [])
    request, prompt = submitted(served, tools=tools, **body)
    chat_request, chat_prompt = chatted(served, tools=chat_tools, **of_chat)
    if request.params.grammar is not None and "text" in body:
        assert request.params.grammar.param == "text.format"
        assert request.params.grammar.text == chat_request.params.grammar.text
    else:
        assert request.params.grammar == chat_request.params.grammar
        assert request.params.logprobs == chat_request.params.logprobs
        assert request.params.reasoning == chat_request.params.reasoning
    assert (prompt.template_kwargs, prompt.opening) == (chat_prompt.template_kwargs, chat_prompt.opening)


# What is refused.


def items(*given: Any) -> dict[str, Any]:
    return {"input": list(given)}


def said(part: Any) -> dict[str, Any]:
    return items({"role": "user", "content": [part]})


def chosen(choice: Any) -> dict[str, Any]:
    return {"tools": TOOLS, "tool_choice": choice}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": None}, "input", "must be a string or a list"),
        ({"input": []}, "input", "at least one item"),
        ({"input": ["Hi"]}, "input", "an object"),
        (items({"role": "critic", "content": "x"}), "input", "'system' or 'user', got 'critic'"),
        (said({"type": "input_image"}), "input", "needs either 'image_url' or 'file_id'"),
        (items({"type": 5}), "input", "'input[0].type'"),
        (items({"type": "message", "content": "Hi"}), "input", "'input[0].role'"),
        (said(5), "input", "'input[0].content[0].type'"),
        (said({"type": "input_file", "file_id": "x"}), "input", "there is no file 'x'"),
        (said({"type": "input_text"}), "input", "'input[0].content[0].text'"),
        (items({"type": "reasoning", "summary": "x"}), "input", "'input[0].summary'"),
        (items({"type": "item_reference", "id": "msg_1_0"}), "input", "no item 'msg_1_0'"),
        (items({"type": "item_reference"}), "input", "'input[0].id'"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"max_tokens": 5}, "max_tokens", "'max_output_tokens'"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "'max_output_tokens'"),
        ({"response_format": {"type": "text"}}, "response_format", "'text.format'"),
        ({"n": 2}, "n", "must be 1"),
        ({"return_token_ids": True}, "return_token_ids", "no place"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "no place"),
        ({"top_logprobs": 2}, "top_logprobs", "'include'"),
        ({"top_logprobs": 21, "include": LOGPROBS}, "top_logprobs", "<= 20"),
        ({"include": ["everything"]}, "include", "'everything'"),
        ({"truncation": "middle"}, "truncation", "'middle'"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "'instructions'"),
        ({"metadata": {"a": 1}}, "metadata", "a string"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "at most 16"),
        ({"metadata": {"k" * 65: "x"}}, "metadata", "64 characters"),
        ({"metadata": {"k": "x" * 513}}, "metadata", "512 characters"),
        (formatted(type="xml"), "text", "'xml'"),
        (formatted(type="json_schema", name="n"), "text", "'text.format.schema'"),
        (formatted(type="json_schema", schema={}), "text", "'text.format.name'"),
        (formatted(type="json_schema", json_schema={"name": "n", "schema": {}}), "text", "'text.format.json_schema'"),
        ({"text": {"style": "x"}}, "text", "'text.style'"),
        (
            formatted(type="json_object") | {"structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "only one constraint",
        ),
        ({"tools": [{"type": "custom"}]}, "tools", "'tools[0].name'"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools", "'tools[0].tools'"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "forces a call, but"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "'tools[0].name'"),
        ({"tools": [STOP, {**STOP, "strict": True}]}, "tools", "two have the name 'stop'"),
        ({"tool_choice": "required"}, "tool_choice", "only allowed with 'tools'"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning", "'reasoning.effort': must be 'high', "),
        (chosen({"type": "function", "function": {"name": "stop"}}), "tool_choice", "'tool_choice.name'"),
        (chosen({"type": "web_search"}), "tool_choice", "run on OpenAI's servers, so none can be forced"),
        (chosen({"type": "x" * 100}), "tool_choice", f"of the type '{'x' * 59}... run on"),
        (chosen({"type": "allowed_tools", "tools": [STOP]}), "tool_choice", "'tool_choice.mode'"),
        (chosen({"type": "allowed_tools", "mode": "never", "tools": [STOP]}), "tool_choice", "'tool_choice.mode'"),
        (chosen({"type": "allowed_tools", "mode": "auto", "tools": []}), "tool_choice", "at least one tool"),
    ],
)
def test_what_is_wrong_is_named_before_the_answer_begins(
    served: Served, body: dict[str, Any], param: str, words: str
) -> None:
    for stream in (False, True):
        response = served.post(RESPONSES, **{"input": "Hi", **body}, stream=stream)
        refused(response, param, words)
        assert served.telemetry.next_record().outcome == Outcome.REJECTED


@pytest.mark.parametrize(
    "body",
    [
        {"background": False, "truncation": "auto", "service_tier": "auto", "safety_identifier": "x"},
        {"prompt_cache_key": "k", "max_tool_calls": 2, "n": 1, "stream_options": None, "tool_choice": "auto"},
        {"include": ["reasoning.encrypted_content"], "conversation": None, "prompt": None},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
    ],
)
def test_what_changes_nothing_is_accepted(served: Served, body: dict[str, Any]) -> None:
    assert served.post(RESPONSES, **{"input": "Hi", **body}).status_code == 200
