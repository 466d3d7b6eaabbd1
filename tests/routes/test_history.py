"""Histories that other servers, cut answers or clients have damaged are read as far as they go, with a note."""

from typing import Any

import pytest

from oaiserve.routes.adaptations import HEADER
from oaiserve.routes.chat.history import NO_RESULT, ORPHAN, UNKNOWN
from tests.missing_plugins import has_plugin
from tests.routes.asking import CHAT, HI, HYBRID, RESPONSES, answered, refused, submitted
from tests.serving import Serve, Served


def call(name: str = "look", arguments: object = "{}", call_id: str | None = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **fields}


def result(content: Any = "seen", call_id: str | None = "c1") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def prompt_of(served: Served, path: str, given: Any, **more: Any) -> tuple[list[dict[str, Any]], str]:
    """Return the messages that reach the template, and the notes."""
    response = served.post(path, **{"input" if path == RESPONSES else "messages": given}, **more)
    answered(response)
    return list(submitted(served)[1].messages), response.headers.get(HEADER, "")


ORPHANED = {"role": "user", "content": f"{ORPHAN}seen"}
CASES: dict[str, tuple[list[Any], list[Any], str]] = {
    "cut arguments": (
        [calling(call(arguments='{"text": "a')), result()],
        [calling(call(arguments='{"text":"a"}')), result()],
        "messages[1]: the arguments of a call are cut, and completed",
    ),
    "no name": ([calling({"id": "c1", "function": {}}), result()], [calling(call(UNKNOWN)), result()], "has no name"),
    "custom tool": (
        [calling({"id": "c1", "type": "custom", "custom": {"name": "edit", "input": "x"}}), result()],
        [calling(call("edit", '{"input":"x"}')), result()],
        "",
    ),
    "no result": ([calling(call())], [calling(call()), result(NO_RESULT)], "messages[1]: a call has no result"),
    "no call": ([result()], [ORPHANED], "messages[1]: a result without its call is shown as the user's text"),
    "two results": ([calling(call()), result(), result()], [calling(call()), result(), ORPHANED], "without its call"),
    "other order": (
        [calling(call(), call(call_id="c2")), result("two", "c2"), *HI, result("one")],
        [calling(call(), call(call_id="c2")), result("one"), result("two", "c2"), *HI],
        "results are put behind their calls",
    ),
    "calls in a row": (
        [calling(call()), calling(call(call_id="c2")), result(), result("two", "c2")],
        [calling(call()), result(), calling(call(call_id="c2")), result("two", "c2")],
        "messages[1]: results are put behind their calls",
    ),
    "equal ids": (
        [calling(call(), call("stop")), result("one"), result("two")],
        [calling(call(), call("stop", call_id="call_1")), result("one"), result("two", "call_1")],
        "a call has no id of its own",
    ),
    "the same id in each turn": (
        [calling(call()), result("one"), calling(call()), result("two")],
        [calling(call()), result("one"), calling(call()), result("two")],
        "",
    ),
    "no ids": (
        [calling(call(call_id=None)), result(call_id=None)],
        [calling(call(call_id="call_0")), result(call_id="call_0")],
        "given to the last one without a result",
    ),
    "the older form": (
        [{"role": "assistant", "function_call": {"name": "look", "arguments": "{}"}}, {**result(), "role": "function"}],
        [calling(call(call_id="call_0")), result(call_id="call_0")],
        "a call has no id",
    ),
    "calls of the user": (
        [{"role": "user", "content": "Look", "tool_calls": [call(call_id=None)]}],
        [{"role": "user", "content": "Look"}],
        "not the assistant's are left out",
    ),
    "odd thoughts": (
        [{**calling(), "content": "Yes.", "thinking": 5}],
        [{"role": "assistant", "content": "Yes."}],
        "is no text",
    ),
    "nothing said": ([{"role": "assistant", "content": None}], [], "a message without anything is left out"),
    "no content": ([{"role": "user"}], [{"role": "user", "content": ""}], "messages[1].content: is missing"),
    "no parts": ([{"role": "user", "content": []}], [{"role": "user", "content": ""}], ""),
    "a result in JSON": (
        [calling(call()), result({"degrees": [18]})],
        [calling(call()), result('{"degrees":[18]}')],
        "messages[2].content: is read as a text in JSON",
    ),
    "a number as a result": (
        [calling(call()), result(18)],
        [calling(call()), result("18")],
        "messages[2].content: is read as a text in JSON",
    ),
    "a number as the id of a call": (
        [calling(call(call_id="7")), {**result(), "tool_call_id": 7}],
        [calling(call(call_id="7")), result(call_id="7")],
        "messages[2].tool_call_id: is read as a text in JSON",
    ),
    "thoughts as parts": (
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "output_text", "text": "Yes.", "annotations": []},
                ],
            }
        ],
        [{"role": "assistant", "content": [{"type": "text", "text": "Yes."}], "reasoning": "Hm."}],
        "messages[1].content[1]: redacted_thinking is left out",
    ),
    "a part of another type": (
        [{"role": "user", "content": [{"type": "new_part", "content": [{"title": "T", "text": "t"}]}]}],
        [{"role": "user", "content": [{"type": "text", "text": "T\nt"}]}],
        "messages[1].content[0]: content of another type is shown by its text",
    ),
    "reasoning as an object": (
        [{"role": "assistant", "content": "Yes.", "reasoning": {"text": "Hm."}}],
        [{"role": "assistant", "content": "Yes.", "reasoning": "Hm."}],
        "messages[1].reasoning: is read by its text",
    ),
    "null as a call": (
        [{"role": "assistant", "content": "Yes.", "tool_calls": [None]}],
        [{"role": "assistant", "content": "Yes."}],
        "messages[1].tool_calls: null is left out",
    ),
    "a file of text": (
        [{"role": "user", "content": [{"type": "file", "file": {"filename": "a.md", "file_data": "SGVsbG8="}}]}],
        [{"role": "user", "content": [{"type": "text", "text": "a.md\nHello"}]}],
        "file is shown by its text",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_history_of_chat_is_repaired(serve: Serve, name: str) -> None:
    damaged, expected, note = CASES[name]
    repaired, notes = prompt_of(serve(template=HYBRID), CHAT, [*HI, *damaged, *HI])
    assert repaired == [*HI, *expected, *HI]
    assert note in notes
    assert bool(note) == bool(notes)


def test_only_a_call_that_is_to_be_answered_gets_a_result(serve: Serve) -> None:
    served = serve(template=HYBRID)
    for asks, expected in ((True, [result(NO_RESULT)]), (False, [])):
        repaired, _ = prompt_of(served, CHAT, [*HI, calling(call())], add_generation_prompt=asks)
        assert repaired == [*HI, calling(call()), *expected]


def test_routes_that_count_tokens_note_what_they_read_differently(serve: Serve) -> None:
    served = serve(template=HYBRID)
    tokenized = served.post("/tokenize", messages=[*HI, calling(call())])
    assert tokenized.headers[HEADER] == "messages[1]: a call has no result"
    if has_plugin("responses"):
        counted = served.post(f"{RESPONSES}/input_tokens", input=[*HI, *HOSTED["mcp"][0]])
        assert counted.headers[HEADER] == "input[1]: mcp_call is shown as the call of a tool"


SHELL = {"type": "exec", "command": ["ls"], "env": {}}
HOSTED: dict[str, tuple[list[dict[str, Any]], list[Any], str]] = {
    "local shell": (
        [
            {"type": "local_shell_call", "id": "l1", "call_id": "s1", "status": "completed", "action": SHELL},
            {"type": "local_shell_call_output", "id": "s1", "output": "a.txt"},
        ],
        ["local_shell", "a.txt"],
        "local_shell_call_output is shown as the result of a tool",
    ),
    "shell": (
        [
            {"type": "shell_call", "call_id": "s1", "action": {"commands": ["ls"]}},
            {
                "type": "shell_call_output",
                "call_id": "s1",
                "output": [{"stdout": "a.txt", "stderr": "", "outcome": {"type": "exit", "exit_code": 2}}],
            },
        ],
        ["shell", "a.txt\nExit code 2"],
        "shell_call is shown",
    ),
    "patch": (
        [
            {"type": "apply_patch_call", "call_id": "s1", "operation": {"type": "create_file", "path": "a"}},
            {"type": "apply_patch_call_output", "call_id": "s1", "status": "failed", "output": "No."},
        ],
        ["apply_patch", "No."],
        "apply_patch_call is shown",
    ),
    "computer": (
        [
            {"type": "computer_call", "id": "x", "call_id": "s1", "action": {"type": "screenshot"}},
            {
                "type": "computer_call_output",
                "call_id": "s1",
                "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,AA=="},
            },
        ],
        ["computer", "[Screenshot left out]"],
        "input[2].output[0]: computer_screenshot is left out",
    ),
    "mcp": (
        [
            {
                "type": "mcp_call",
                "id": "m",
                "name": "ask",
                "server_label": "x",
                "arguments": '{"q": 1}',
                "output": "Yes.",
            }
        ],
        ["ask", "Yes."],
        "mcp_call is shown",
    ),
    "files": (
        [{"type": "file_search_call", "id": "f", "queries": ["q"], "results": [{"filename": "a.md", "text": "Hi."}]}],
        ["file_search", "a.md\nHi."],
        "file_search_call is shown",
    ),
    "code": (
        [{"type": "code_interpreter_call", "id": "c", "code": "1+1", "outputs": [{"type": "logs", "logs": "2"}]}],
        ["code_interpreter", "2"],
        "code_interpreter_call is shown",
    ),
    "future call": (
        [{"type": "teleport_call", "call_id": "t"}, {"type": "teleport_call_output", "call_id": "t", "output": "Mars"}],
        ["teleport", "Mars"],
        "another type is shown as the call",
    ),
    "web search": (
        [{"type": "web_search_call", "id": "w", "action": {"query": "q"}}],
        [],
        "web_search_call is left out",
    ),
    "image": ([{"type": "image_generation_call", "id": "i", "result": "iVBORw0K" * 99}], [], "is left out"),
    "tools of a server": ([{"type": "mcp_list_tools", "id": "t", "tools": []}], [], "mcp_list_tools is left out"),
    "approval": (
        [
            {"type": "mcp_approval_request", "id": "a", "name": "ask", "arguments": "{}"},
            {"type": "mcp_approval_response", "approval_request_id": "a", "approve": True},
        ],
        [],
        "mcp_approval_response is left out",
    ),
    "reasoning of others": (
        [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAA"}],
        [],
        "reasoning is left out",
    ),
    "compaction of others": ([{"type": "compaction", "encrypted_content": "gAAA"}], [], "compaction is left out"),
}


@pytest.mark.plugin("responses")
@pytest.mark.parametrize("name", HOSTED)
def test_items_of_hosted_tools_are_shown_as_calls_and_results_or_left_out(serve: Serve, name: str) -> None:
    items, expected, note = HOSTED[name]
    served = serve(template=HYBRID)
    repaired, notes = prompt_of(served, RESPONSES, [*HI, *items, *HI])
    assert (repaired[0], repaired[-1]) == (HI[0], HI[0])
    if expected:
        _, assistant, answer, _ = repaired
        (call_shown,) = assistant["tool_calls"]
        content = answer["content"] if isinstance(answer["content"], str) else answer["content"][0]["text"]
        assert [call_shown["function"]["name"], content] == expected
        assert answer["tool_call_id"] == call_shown["id"]
    else:
        assert len(repaired) == 2
    assert note in notes


@pytest.mark.plugin("responses")
def test_the_stored_items_of_a_response_keep_their_texts(serve: Serve) -> None:
    served = serve(template=HYBRID)
    items, _, _ = HOSTED["local shell"]
    first = answered(served.post(RESPONSES, input=[*HI, *items]))
    before = list(submitted(served)[1].messages)
    repaired, notes = prompt_of(served, RESPONSES, "How many?", previous_response_id=first["id"])
    assert repaired[: len(before)] == before
    assert "a stored item: local_shell_call is shown" in notes


@pytest.mark.plugin("responses")
def test_other_fields_of_a_text_reach_the_template_from_responses_too(served: Served) -> None:
    part = {"type": "input_text", "text": "Hallo", "source_lang_code": "de"}
    repaired, _ = prompt_of(served, RESPONSES, [{"role": "user", "content": [part]}])
    assert repaired == [{"role": "user", "content": [{**part, "type": "text"}]}]
    deep: Any = {}
    for _ in range(20):
        deep = [deep]
    repaired, notes = prompt_of(served, RESPONSES, [{"role": "user", "content": [{**part, "source_lang_code": deep}]}])
    assert repaired == [{"role": "user", "content": "Hallo"}]
    assert "too deep, and left out" in notes


ITEMS: dict[str, tuple[list[dict[str, Any]], list[Any]]] = {
    "no ids": (
        [
            {"type": "function_call", "name": "look", "arguments": {}},
            {"type": "function_call_output", "output": "seen"},
        ],
        ["seen"],
    ),
    "no call": ([{"type": "function_call_output", "call_id": "x", "output": "seen"}], []),
    "no output": ([{"type": "function_call", "call_id": "c", "name": "look", "arguments": "{"}], [NO_RESULT]),
    "null": (
        [
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": None},
            {"type": "function_call_output", "call_id": "c", "output": None},
        ],
        [""],
    ),
    "JSON": (
        [
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "null"},
            {"type": "function_call_output", "call_id": "c", "output": {"a": 1}},
        ],
        ['{"a":1}'],
    ),
    "parts": (
        [
            {"type": "custom_tool_call", "call_id": "c", "name": "look", "input": None},
            {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "new", "text": "t"}, "u"]},
        ],
        [[{"type": "text", "text": "t"}, {"type": "text", "text": "u"}]],
    ),
}


@pytest.mark.plugin("responses")
@pytest.mark.parametrize("name", ITEMS)
def test_damaged_items_of_responses_are_repaired(serve: Serve, name: str) -> None:
    items, results = ITEMS[name]
    repaired, _ = prompt_of(serve(template=HYBRID), RESPONSES, [*HI, *items, *HI])
    assert [message["content"] for message in repaired if message["role"] == "tool"] == results
    if not results:
        assert ORPHANED in repaired


@pytest.mark.plugin("responses")
def test_missing_texts_of_items_are_noted(serve: Serve) -> None:
    _, notes = prompt_of(serve(template=HYBRID), RESPONSES, [*HI, *ITEMS["null"][0], ITEMS["parts"][0][0], *HI])
    assert "input[2].output: is missing, and read as empty; input[3].input: is missing, and read as empty" in notes


@pytest.mark.plugin("responses")
def test_input_without_readable_items_is_refused(serve: Serve) -> None:
    items, _, _ = HOSTED["tools of a server"]
    refused(serve(template=HYBRID).post(RESPONSES, input=items), "input", "at least one item that the model can read")


@pytest.mark.plugin("responses")
def test_items_in_chats_form_are_calls_and_results(serve: Serve) -> None:
    chat_items = [
        calling(call(arguments="{}")),
        result(),
        calling(call(call_id="c2"), content="Wait."),
        result("18", "c2"),
    ]
    served = serve(template=HYBRID)
    repaired, notes = prompt_of(served, RESPONSES, [*HI, *chat_items, *HI])
    assert repaired == [*HI, *chat_items, *HI]
    assert notes == "; ".join(f"input[{number}]: is read in chat's form" for number in range(1, 5))
    conversation = served.post("/v1/conversations", items=[*HI, *chat_items])
    assert conversation.headers[HEADER] == notes.replace("input", "items")
    repaired, _ = prompt_of(served, RESPONSES, "Go on", conversation=answered(conversation)["id"])
    assert repaired == [*HI, *chat_items, {"role": "user", "content": "Go on"}]
