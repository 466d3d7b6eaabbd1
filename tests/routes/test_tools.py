"""Tests tools on /v1/chat/completions: what is refused, what reaches the engine, and the answer, whole and streamed."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from openai import pydantic_function_tool
from pydantic import BaseModel

from oaiserve.engine.grammars.notations import translate
from oaiserve.engine.grammars.refusal import Refused
from oaiserve.engine.request import FinishReason, Grammar
from tests.engine.text.tokenizers_for_tests import byte_level
from tests.routes import asking
from tests.routes.asking import CALL, CHAT, CHATML, HI, HYBRID, PARAMETERS, PIECES, ZONE, chatted, refused, stream_of
from tests.routes.doubles import says
from tests.serving import Serve, Served

TIME = {"type": "function", "function": {"name": "get_time", "description": "The time.", "parameters": PARAMETERS}}
STOP = {"type": "function", "function": {"name": "stop"}}
TOOLS = [TIME, STOP]
NAMED = {"type": "function", "function": {"name": "get_time"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | fields}


@pytest.fixture
def served(serve: Serve) -> Served:
    """A server whose template knows no tools, and whose model calls one."""
    return serve(template=CHATML, script=says(*PIECES))


def choice_of(served: Served, **body: Any) -> dict[str, Any]:
    return asking.answered(served.chat(**{"tools": TOOLS, **body}))["choices"][0]


def deltas_of(served: Served, **body: Any) -> list[tuple[dict[str, Any], str | None]]:
    choices = [chunk["choices"][0] for chunk in stream_of(served, CHAT, **{"tools": TOOLS, **body})]
    return [(choice["delta"], choice["finish_reason"]) for choice in choices]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": {}}, "tools", "must be a list, got an object"),
        ({"tools": [1]}, "tools", "must be an object"),
        ({"tools": [{"type": "function"}]}, "tools", "'tools[0].function'"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools", "'tools[0].function.name'"),
        ({"tools": [function(name="")]}, "tools", "got ''"),
        ({"tools": [function(name="f" * 129)]}, "tools", "1 to 128"),
        ({"tools": [function(strict=True), function()]}, "tools", "two have the name 'f', and at least one of them"),
        ({"tools": [function(parameters=[])]}, "tools", "an object, got a list"),
        ({"tools": [function(parameters={"type": "array"}, strict=True)]}, "tools", "'array'"),
        (
            {"tools": [function(parameters={"properties": []}, strict=True)]},
            "tools",
            "'tools[0].function.parameters.properties': must be an object",
        ),
        ({"tools": [function(strict=1)]}, "tools", "true or false"),
        ({"tools": [{**STOP, "function": {"name": f"f{i}"}} for i in range(1025)]}, "tools", "at most 1024"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "got 'any'"),
        ({"tools": TOOLS, "tool_choice": 1}, "tool_choice", "got an integer"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "'tool_choice.function'"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "stop"}}}, "tool_choice", "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g'"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "g")}, "tool_choice", "'g'"),
        ({"tools": TOOLS, "tool_choice": allowed("never", "stop")}, "tool_choice", "'never'"),
        ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice", "at least one tool"),
        ({"tool_choice": "required"}, "tool_choice", "only allowed with 'tools'"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "must be true or false"),
        ({"functions": [{"name": "f"}]}, "functions", "Use 'tools' instead"),
        ({"tools": TOOLS, "function_call": "auto"}, "function_call", "Use 'tool_choice' instead"),
        (
            {"reasoning_format": "plain"},
            "reasoning_format",
            "'auto', 'deepseek', 'deepseek-legacy' or 'none', got 'plain'",
        ),
    ],
)
def test_what_is_wrong_with_tools_is_named(served: Served, body: dict[str, Any], param: str, words: str) -> None:
    for stream in (False, True):
        refused(served.chat(**body, stream=stream), param, words)


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"tool_calls": {}}, "tool_calls"),
        ({"tool_calls": [1]}, "tool_calls[0]"),
        ({"function_call": "f"}, "function_call"),
        ({"name": 5}, "name"),
    ],
)
def test_what_is_wrong_in_the_history_is_named(served: Served, message: dict[str, Any], where: str) -> None:
    messages = [*HI, {"role": "assistant", **message}]
    refused(served.chat(messages=messages), "messages", f"'messages[1].{where}'")


def test_a_message_of_the_history_may_have_reasoning_alone(serve: Serve) -> None:
    served = serve(template="{{ messages }}")
    message = {"role": "assistant", "reasoning_content": "Hm."}
    assert served.chat(messages=[*HI, message, *HI]).status_code == 200


def test_a_template_that_knows_tools_gets_them(serve: Serve) -> None:
    served = serve(template="{{ tools }}{{ messages }}")
    _, prompt = chatted(served, tools=TOOLS)
    without = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}}
    assert prompt.tools == [TIME, without]
    assert prompt.messages == [{"role": "user", "content": "Hi"}]
    assert chatted(served, tools=TOOLS, tool_choice="none")[1] == prompt, "an agent's last turn finds its prefix"
    assert chatted(served, tools=TOOLS, tool_choice=allowed("auto", "stop"))[1].tools == [TIME, without]


HISTORY: Sequence[dict[str, Any]] = (
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "get_time", "arguments": ZONE}},
            {"id": "b", "function": {"name": "stop", "arguments": ""}},
        ],
    },
    {"role": "tool", "content": "12:00", "tool_call_id": "a"},
    {"role": "tool", "content": [{"type": "text", "text": "Stopped."}], "tool_call_id": "b"},
)


def test_a_template_without_tools_gets_them_as_text(served: Served) -> None:
    _, prompt = chatted(served, messages=[*HI, *HISTORY], tools=TOOLS)
    introduction, *others = prompt.messages
    assert list(prompt.tools) == []
    assert introduction["role"] == "system"
    lines = introduction["content"].splitlines()
    assert json.loads(lines[1]) == TIME["function"]
    assert json.loads(lines[2])["name"] == "stop"
    assert lines[-3:] == [
        "<tool_call>",
        '{"name": "name-of-the-function", "arguments": {"name-of-an-argument": "its value"}}',
        "</tool_call>",
    ]
    assert others == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": f'{CALL}\n<tool_call>\n{{"name": "stop", "arguments": {{}}}}\n</tool_call>'},
        {
            "role": "user",
            "content": "<tool_response>\n12:00\n</tool_response>\n<tool_response>\nStopped.\n</tool_response>",
        },
    ]


def test_the_history_is_text_without_tools_in_the_request_as_well(served: Served) -> None:
    messages = chatted(served, messages=[*HI, *HISTORY])[1].messages
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"].startswith(CALL)


@pytest.mark.parametrize("template", [CHATML, HYBRID])
def test_text_before_a_call_comes_back_as_the_model_wrote_it(serve: Serve, template: str) -> None:
    """A template writes the line end between them itself."""
    said = {**HISTORY[0], "content": "I look.\n"}
    messages = chatted(serve(template=template), messages=[*HI, said, *HISTORY[1:]], tools=TOOLS)[1].messages
    (again,) = [message["content"] for message in messages if message["role"] == "assistant"]
    assert again.startswith(f"I look.\n{CALL}") if template == CHATML else again == "I look."


def test_the_tools_stand_in_front_of_the_clients_own_system_message(serve: Serve) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    _, prompt = chatted(serve(template=CHATML), messages=messages, tools=TOOLS)
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    assert prompt.messages[0]["content"].startswith("You may call functions.")
    assert prompt.messages[0]["content"].endswith("\n\nBe brief.")


@pytest.mark.plugin("dialects")
def test_ids_of_calls_have_nine_characters_for_mistral(serve: Serve) -> None:
    messages = chatted(serve(template="[TOOL_CALLS] {{ tools }}"), messages=[*HI, *HISTORY])[1].messages
    ids = [call["id"] for call in messages[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in messages[2:]] == ids
    assert all(len(each) == 9 and each.isalnum() for each in ids)


def test_a_call_in_a_whole_answer(served: Served) -> None:
    choice = choice_of(served)
    (call,) = choice["message"].pop("tool_calls")
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "get_time", "arguments": ZONE}}
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert choice["finish_reason"] == "tool_calls"
    record = served.telemetry.next_record()
    assert record.tool_calls == {"called": 1}
    assert (record.finish_reasons, record.answer_reasons) == (("stop",), ("tool_calls",))


def test_a_fenced_call_stays_text_where_none_may_be_made(serve: Serve) -> None:
    fenced = '```json\n{"name": "get_time", "arguments": {}}\n```'
    served = serve(template=CHATML, script=says(fenced))
    assert choice_of(served)["message"]["tool_calls"][0]["function"]["name"] == "get_time"
    assert choice_of(served, tool_choice="none")["message"]["content"] == fenced


def test_a_call_in_a_stream(served: Served) -> None:
    (role, _), (begin, _), *arguments, (end, reason) = deltas_of(served)
    assert role == {"role": "assistant", "content": None}
    (call,) = begin["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert call == {"index": 0, "type": "function", "function": {"name": "get_time", "arguments": ""}}
    assert "".join(delta["tool_calls"][0]["function"].pop("arguments") for delta, _ in arguments) == ZONE
    assert all(delta == {"tool_calls": [{"index": 0, "function": {}}]} for delta, _ in arguments)
    assert (end, reason) == ({}, "tool_calls")


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        ("Hello world", {}),
        ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', {"unparsed": 1}),
        ('<tool_call>{"name": "stop"', {"unparsed": 1}),
    ],
)
def test_no_call_or_one_of_no_tool_or_without_an_end_is_text_without_a_key_for_calls(
    served: Served, text: str, counted: dict[str, int]
) -> None:
    served.engine.script = says(*text)
    choice = choice_of(served)
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert served.telemetry.next_record().tool_calls == counted
    assert "".join(delta.get("content") or "" for delta, _ in deltas_of(served)) == text


def test_a_choice_that_forces_no_call_may_come_without_functions(served: Served) -> None:
    for tools in ([], [{"type": "web_search"}], None):
        assert choice_of(served, tools=tools, tool_choice="auto")["message"]["content"] == CALL


def test_calls_are_neither_read_nor_forced_where_they_are_not_allowed(serve: Serve, served: Served) -> None:
    for body in ({"tool_choice": "none"}, {"tools": None}, {"tool_choice": allowed("auto", "stop")}):
        assert choice_of(served, **body)["message"]["content"] == CALL
    reads_none = serve(template=CHATML, script=says(*PIECES), tool_call_parser="none")
    assert choice_of(reads_none)["message"]["content"] == CALL
    refused(reads_none.chat(tools=TOOLS, tool_choice="required"), "tool_choice")


def test_without_parallel_calls_the_first_is_the_last(served: Served) -> None:
    served.engine.script = says(CALL, "\n", CALL, " Well?")
    message = choice_of(served, parallel_tool_calls=False)["message"]
    assert (len(message["tool_calls"]), message["content"]) == (1, None)
    message = choice_of(served)["message"]
    assert (len(message["tool_calls"]), message["content"]) == (2, " Well?")
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_each_choice_calls_for_itself(served: Served) -> None:
    choices = served.chat(tools=TOOLS, n=3).json()["choices"]
    assert len({call["id"] for choice in choices for call in choice["message"]["tool_calls"]}) == 3


def test_an_answer_that_is_cut_within_a_call_has_the_arguments_so_far(served: Served) -> None:
    served.engine.script = says(*PIECES[:3], finish=FinishReason.LENGTH)
    choice = choice_of(served)
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"zo'
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("tool_choice", "reason"),
    [("required", "tool_calls"), (NAMED, "stop"), (allowed("required", "get_time"), "tool_calls")],
)
def test_the_finish_reason_of_forced_calls(served: Served, tool_choice: Any, reason: str) -> None:
    choice = choice_of(served, tool_choice=tool_choice)
    assert choice["finish_reason"] == reason
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ZONE
    assert deltas_of(served, tool_choice=tool_choice)[-1] == ({}, reason)
    served.engine.script = says(*PIECES[:2], finish=FinishReason.LENGTH)
    choice = choice_of(served, tool_choice=tool_choice)
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")


def takes(grammar: Grammar, answer: str) -> bool:
    """Return whether the grammar takes the whole answer, and may end there."""
    backend = byte_level()
    guidance = LLTokenizer(backend.to_str(), n_vocab=backend.get_vocab_size())
    # The double's tokenizer has the opening mark as a special token, this one has not.
    text = translate(grammar.kind, grammar.text.replace("<[998]>", '\\"<tool_call>\\"')).text
    matcher = LLMatcher(guidance, text)
    assert not matcher.get_error()
    ids = backend.encode(answer, add_special_tokens=False).ids
    return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())


def test_special_tokens_that_are_marks_are_seen_and_an_unforced_call_has_no_grammar(served: Served) -> None:
    params = chatted(served, tools=TOOLS)[0].params
    assert (params.visible_special_ids, params.grammar) == ({998}, None)
    assert chatted(served)[0].params.visible_special_ids == frozenset()


def test_a_grammar_goes_on_from_the_message_that_is_continued(served: Served) -> None:
    parts = [{"type": "text", "text": '{"a"'}, {"type": "text", "text": ": 1,"}]
    body = {"messages": [{"role": "assistant", "content": parts}], "response_format": {"type": "json_object"}}
    forced = {"tools": TOOLS, "tool_choice": "required"}
    for more, continued in (
        ({"continue_final_message": True}, '{"a"\n: 1,'),
        ({}, ""),
        ({"continue_final_message": True, **forced}, ""),
    ):
        one_request, _ = chatted(served, **body, **more)
        assert one_request.params.grammar.continued == continued


ANSWER = '{"color": "red"}'
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "pick", "schema": {"properties": {"color": {"enum": ["red"]}}, "required": ["color"]}},
}


@pytest.mark.parametrize(
    ("body", "accepted", "refused"),
    [
        # Calls that are forced, and calls that may come instead of the JSON that an answer must be.
        ({"tool_choice": "required"}, [CALL, f"{CALL}\n{CALL}"], ["", "Hello", '{"zone": "utc"}']),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [CALL], [f"{CALL}\n{CALL}"]),
        ({"tool_choice": NAMED}, [CALL], [f"{CALL}\n{CALL}", CALL.replace("get_time", "stop")]),
        ({"tool_choice": allowed("required", "stop")}, [CALL.replace("get_time", "stop").replace(ZONE, "{}")], [CALL]),
        (
            {"response_format": FORMAT},
            [ANSWER, CALL, f"{CALL}\n{CALL}"],
            [f"{CALL}{ANSWER}", '{"color": "blue"}', "Hi"],
        ),
        ({"response_format": FORMAT, "parallel_tool_calls": False}, [ANSWER, CALL], [f"{CALL}\n{CALL}"]),
        ({"response_format": FORMAT, "tool_choice": "none"}, [ANSWER], [CALL]),
        ({"response_format": FORMAT, "tool_choice": allowed("auto", "stop")}, [ANSWER], [CALL]),
        ({"response_format": {"type": "json_object"}}, [ANSWER, "{}", CALL, CALL.replace(ZONE, "{}")], ["[]", ""]),
        ({"structured_outputs": {"regex": "a"}}, ["a"], [CALL]),
    ],
)
def test_a_grammar_takes_the_calls_and_the_json_that_may_come(
    served: Served, body: dict[str, Any], accepted: list[str], refused: list[str]
) -> None:
    grammar = asking.grammar_of(served, tools=TOOLS, **body)
    assert grammar.param == next(iter(body)).replace("tool_choice", "tools")
    assert [takes(grammar, answer) for answer in accepted] == [True] * len(accepted)
    assert [takes(grammar, answer) for answer in refused] == [False] * len(refused)


def test_a_format_that_cannot_be_obeyed_is_refused_beside_tools_too(served: Served) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"properties": {"a": {"not": {}}}}}}
    grammar = asking.grammar_of(served, tools=TOOLS, response_format=bad)
    assert grammar.param == "response_format"
    with pytest.raises(Refused, match=r"\$\.properties\.a\.not"):
        translate(grammar.kind, grammar.text)


def test_another_constraint_beside_a_forced_call_is_refused(served: Served) -> None:
    body = {"structured_outputs": {"regex": "a"}}
    refused(served.chat(tools=TOOLS, tool_choice="required", **body), "structured_outputs", "together with")
    assert served.chat(tools=TOOLS, **body).status_code == 200


def test_a_format_of_the_text_leaves_a_forced_call_as_it_is(served: Served) -> None:
    forced = {"tools": TOOLS, "tool_choice": "required"}
    for kind in ("text", "json_object"):
        beside = asking.grammar_of(served, **forced, response_format={"type": kind})
        assert beside == asking.grammar_of(served, **forced)


def test_token_ids_and_logprobs_come_with_calls(served: Served) -> None:
    body = {"tools": TOOLS, "logprobs": True, "return_token_ids": True}
    (whole,) = served.chat(**body).json()["choices"]
    chunks = [chunk["choices"][0] for chunk in stream_of(served, CHAT, **body)]
    assert [i for chunk in chunks for i in chunk.get("token_ids", [])] == whole["token_ids"] == [10, 11, 12, 13, 14, 15]
    streamed = [entry for chunk in chunks for entry in (chunk["logprobs"] or {"content": []})["content"]]
    assert streamed == whole["logprobs"]["content"]


class GetTime(BaseModel):
    zone: str


def test_the_sdk_reads_streams_and_parses_calls(served: Served) -> None:
    served.engine.script = says("Well: ", *(piece.replace("get_time", "GetTime") for piece in (*PIECES, "\n", CALL)))
    fields: dict[str, Any] = {"model": "org/demo", "messages": HI, "tools": [pydantic_function_tool(GetTime)]}
    with served.sdk() as client:
        answer = client.chat.completions.create(**fields).choices[0]
        parsed = client.chat.completions.parse(**fields).choices[0]
        with client.chat.completions.stream(**fields) as stream:
            events = list(stream)
            final = stream.get_final_completion().choices[0]
    assert [call.function.arguments for call in answer.message.tool_calls or ()] == [ZONE, ZONE]
    for each in (parsed, final):
        calls = each.message.tool_calls or ()
        assert [call.function.parsed_arguments for call in calls] == [GetTime(zone="utc")] * 2
    assert (final.message.content, final.finish_reason) == ("Well: ", "tool_calls")
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.index, event.arguments) for event in done] == [("GetTime", at, ZONE) for at in (0, 1)]
    assert any(event.type == "tool_calls.function.arguments.delta" for event in events)
