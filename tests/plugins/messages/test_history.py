"""Histories of /v1/messages that began elsewhere or lost a part: what the model reads of them, and what is noted."""

from base64 import b64encode
from typing import Any

import pytest

from oaiserve.engine.request import ChatPrompt
from oaiserve.routes.adaptations import HEADER
from oaiserve.routes.chat.history import NO_RESULT, ORPHAN
from tests.plugins.messages.asking import COUNT, TIME, said
from tests.routes import asking
from tests.routes.asking import HI, MESSAGES, answered, refused
from tests.serving import Serve, Served

ASKED = {"role": "user", "content": "Who won?"}
MORE = {"role": "user", "content": "By how much?"}
PDF = {"type": "document", "title": "a.pdf", "source": {"type": "base64", "media_type": "application/pdf", "data": "J"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
NOTE = {"type": "document", "title": "Mills", "context": "1904", "source": {"type": "text", "data": "It stood still."}}
FOUND = {"type": "search_result", "title": "Mills", "source": "https://a.example", "content": [said("Still.")]}
USE = {"type": "tool_use", "id": "1", "name": "get_time", "input": {"zone": "utc"}}


def prompt_of(served: Served, *turns: dict[str, Any], **body: Any) -> tuple[list[dict[str, Any]], str]:
    """Return the messages of a prompt, and the notes on how it was read. The count of its tokens must agree."""
    whole = {"model": "org/demo", "messages": turns, **body}
    response = served.post(MESSAGES, **whole, max_tokens=64)
    answered(response)
    prompt: ChatPrompt = asking.submitted(served)[1]
    counted = served.post(COUNT, **whole)
    assert answered(counted)["input_tokens"] == len(served.engine.tokenizer.encode(prompt))
    assert counted.headers.get(HEADER) == response.headers.get(HEADER)
    return [*map(dict, prompt.messages)], response.headers.get(HEADER, "")


@pytest.mark.parametrize("role", ["user", "system"])
def test_tools_change_within_a_conversation(serve: Serve, role: str) -> None:
    served = serve(template="{{ messages }}{{ tools }}<tool_call></think>")
    added = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {**TIME, "name": "get_date"}}}
    removed = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "get_time"}}
    body = {"model": "org/demo", "max_tokens": 8, "tools": [TIME]}
    turn = {"role": role, "content": [said("Hi"), added, removed]}
    response = served.post(MESSAGES, **body, messages=[turn, MORE], tool_choice={"type": "tool", "name": "get_date"})
    answered(response)
    assert [tool["function"]["name"] for tool in asking.submitted(served)[1].tools] == ["get_date"]
    assert response.headers[HEADER] == (
        "messages[0].content[1]: its tool is shown with the others, before the conversation; "
        "messages[0].content[2]: its tool is left out of the whole prompt"
    )


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def result(content: Any, call: str = "1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, "content": content, **more}


def of_search(**content: Any) -> dict[str, Any]:
    return {"type": "web_search_result", "encrypted_content": "secret", "page_age": None, **content}


@pytest.mark.parametrize(
    ("kind", "content", "text"),
    [
        ("web_search", [of_search(url="https://a.example", title="Cup")], "Cup\nhttps://a.example"),
        ("web_search", [], ""),
        ("web_search", {"type": "web_search_tool_result_error", "error_code": "unavailable"}, "Error: unavailable"),
        (
            "web_fetch",
            {"type": "web_fetch_result", "url": "https://a.example", "content": NOTE},
            "https://a.example\n[Document]\nMills\n1904\nIt stood still.",
        ),
        ("web_fetch", {"type": "web_fetch_result", "url": "u", "content": PDF}, "u\n[Document left out]\na.pdf"),
        (
            "code_execution",
            {"type": "code_execution_result", "stdout": "1", "stderr": "bad", "return_code": 2, "content": []},
            "1\nbad\nExit code 2",
        ),
        (
            "bash_code_execution",
            {"type": "bash_code_execution_result", "stdout": "1", "stderr": "", "return_code": 0, "content": []},
            "1",
        ),
        (
            "text_editor_code_execution",
            {"type": "text_editor_code_execution_view_result", "content": "def f():", "file_type": "text"},
            "def f():",
        ),
        (
            "text_editor_code_execution",
            {"type": "text_editor_code_execution_str_replace_result", "lines": ["-a", "+b"], "old_lines": 1},
            "-a\n+b",
        ),
        (
            "tool_search",
            {
                "type": "tool_search_tool_search_result",
                "tool_references": [{"type": "tool_reference", "tool_name": "f"}],
            },
            "[Tool found]\nf",
        ),
        ("mcp", [said("one"), said("two")], "one\ntwo"),
        ("advisor", {"type": "advisor_result", "text": "Wait."}, "Wait."),
        ("future", {"type": "future_result", "text": "New.", "number": 3}, "New."),
    ],
)
def test_tools_that_ran_elsewhere_are_calls_with_their_results(
    served: Served, kind: str, content: Any, text: str
) -> None:
    use = {"type": "mcp_tool_use" if kind == "mcp" else "server_tool_use", "id": "s1", "name": kind, "input": {"q": 1}}
    ran = {"type": f"{kind}_tool_result", "tool_use_id": "s1", "content": content}
    messages, notes = prompt_of(served, ASKED, assistant(said("Wait."), use, ran, said("They.")), MORE)
    call = {"id": "s1", "type": "function", "function": {"name": kind, "arguments": '{"q":1}'}}
    assert messages == [
        ASKED,
        {"role": "assistant", "content": "Wait.", "tool_calls": [call]},
        {"role": "tool", "content": text, "tool_call_id": "s1"},
        {"role": "assistant", "content": "They."},
        MORE,
    ]
    assert "messages[1].content[2]: the text of " in notes


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (NOTE, "[Document]\nMills\n1904\nIt stood still."),
        ({"type": "document", "source": {"type": "content", "content": "Text."}}, "[Document]\nText."),
        ({"type": "document", "source": {"type": "content", "content": [said("Text.")]}}, "[Document]\nText."),
        (
            {
                "type": "document",
                "source": {"type": "base64", "media_type": "text/plain", "data": b64encode("Größe".encode()).decode()},
            },
            "[Document]\nGröße",
        ),
        (FOUND, "[Search result]\nMills\nhttps://a.example\nStill."),
        ({**said("Cited."), "citations": [{"type": "char_location", "cited_text": "x"}]}, "Cited."),
    ],
)
def test_documents_are_text_in_turns_and_in_results(served: Served, block: dict[str, Any], text: str) -> None:
    messages, notes = prompt_of(served, user(block))
    assert (messages, notes) == ([{"role": "user", "content": text}], "")
    messages, notes = prompt_of(served, ASKED, assistant(USE), user(result([block, said("!")])))
    assert (messages[-1]["content"], notes) == (f"{text}\n!", "")


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (PDF, "[Document left out]\na.pdf"),
        ({"type": "document", "source": {"type": "file", "file_id": "f"}}, "[Document left out]"),
        (IMAGE, "[Image left out]"),
    ],
)
def test_files_are_refused_where_they_are_asked_about_and_left_out_elsewhere(
    served: Served, block: dict[str, Any], text: str
) -> None:
    body = {"model": "org/demo", "messages": [user(block, said("What is this?"))], "max_tokens": 8}
    refused(served.post(MESSAGES, **body), "messages", "'messages[0].content[0]")
    messages, notes = prompt_of(served, user(block), assistant(USE), user(result([block])))
    assert [message["content"] for message in messages] == [text, "", text]
    assert notes.count("is left out") == 2


@pytest.mark.parametrize(
    "block",
    [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "container_upload", "file_id": "f"},
        {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
        {"type": "compaction", "content": None},
        {"type": "mcp_tool_listing", "mcp_server_name": "s", "tools": [{"name": "f"}]},
        {"type": "made_up_later", "content": 3, "text": ["", {"deep": [1]}], "source": [None]},
    ],
)
def test_blocks_without_text_are_left_out_with_a_note(served: Served, block: dict[str, Any]) -> None:
    messages, notes = prompt_of(served, ASKED, assistant(block, said("Yes.")), user(block, said("And?")))
    assert messages == [ASKED, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
    assert notes.count("is left out") == 2
    assert "made_up" not in notes


def test_compaction_stands_for_all_turns_before_it(served: Served) -> None:
    summary = {"type": "compaction", "content": "They won.", "signature": "x"}
    messages, _ = prompt_of(served, ASKED, assistant(USE, summary, said("Yes.")), MORE, system="Be brief.")
    summarized = "This is a summary of the conversation so far:\n\nThey won."
    assert [message["content"] for message in messages] == ["Be brief.", summarized, "Yes.", "By how much?"]


@pytest.mark.parametrize(
    ("turns", "roles"),
    [
        ([ASKED, assistant(USE), MORE], "user assistant tool user"),
        ([ASKED, assistant(USE)], "user assistant tool"),
        ([ASKED, assistant(USE, {**USE, "id": "2"}), user(result("1"), said("?"))], "user assistant tool tool user"),
    ],
)
def test_call_without_result_gets_one(served: Served, turns: list[dict[str, Any]], roles: str) -> None:
    messages, notes = prompt_of(served, *turns)
    assert [message["role"] for message in messages] == roles.split()
    assert [each["content"] for each in messages if each["role"] == "tool"][-1] == NO_RESULT
    assert "a call has no result" in notes


def test_result_without_call_is_text_of_the_user(served: Served) -> None:
    messages, notes = prompt_of(served, ASKED, assistant(USE), user(result("11"), result("12"), said("So?")))
    assert [message["content"] for message in messages[2:]] == ["11", f"{ORPHAN}12", "So?"]
    assert "without its call" in notes
    messages, notes = prompt_of(served, ASKED, assistant(USE), user(result("12", "lost"), said("So?")))
    assert messages[2:] == [{"role": "tool", "content": "12", "tool_call_id": "1"}, {"role": "user", "content": "So?"}]
    assert notes.startswith("messages[2].content[0]: a result has the id of no call")


def test_encoded_text_of_a_result_is_no_file(served: Served) -> None:
    messages, notes = prompt_of(served, ASKED, assistant(USE), user(result("QUJD" * 100)))
    assert (messages[-1]["content"], notes) == ("QUJD" * 100, "")


def test_ids_that_recur_belong_to_the_last_call(served: Served) -> None:
    turns = [turn for answer in ("a", "b") for turn in (assistant(USE), user(result(answer)))]
    messages, notes = prompt_of(served, ASKED, *turns)
    assert [each["content"] for each in messages if each["role"] == "tool"] == ["a", "b"]
    assert notes == ""


@pytest.mark.parametrize(
    ("given", "arguments", "note"),
    [
        (None, "{}", "messages[1].content[0].input: is missing, and read as empty"),
        ("x", '{"arguments":"x"}', ".input: is read as JSON; messages[1].content[0]: the arguments of a call are not"),
        ('{"zone": "u', '{"zone":"u"}', "are cut, and completed"),
        ([1], '{"arguments":[1]}', "messages[1].content[0]: the arguments of a call are no object"),
    ],
)
def test_input_that_is_no_object_becomes_one(served: Served, given: Any, arguments: str, note: str) -> None:
    messages, notes = prompt_of(served, ASKED, assistant({**USE, "input": given}), user(result("12")))
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == arguments
    assert note in notes
    assert bool(note) == bool(notes)


@pytest.mark.parametrize(
    ("block", "message", "note"),
    [
        ({"type": "text", "text": None}, {"content": "Ja."}, "text is left out"),
        ({"type": "thinking", "thinking": None}, {"content": "Ja."}, "thinking is left out"),
        ({"text": "O"}, {"content": [said("O"), said("Ja.")]}, "has no type, and is read as text"),
        ({**USE, "name": None}, {"content": "Ja."}, "a call has no name"),
    ],
)
def test_malformed_block_of_an_earlier_turn_is_noted(
    served: Served, block: dict[str, Any], message: dict[str, Any], note: str
) -> None:
    messages, notes = prompt_of(served, ASKED, assistant(block, said("Ja.")), MORE)
    assert messages[1].items() >= message.items()
    assert f"messages[1].content[0]: {note}" in notes


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([user()], [("user", "")]),
        ([user(), assistant(), user()], [("user", "")]),
        ([ASKED, assistant()], [("user", "Who won?")]),
        ([ASKED, {"role": "assistant", "content": None}, MORE], [("user", [said("Who won?"), said("By how much?")])]),
        ([ASKED, assistant({"type": "thinking", "thinking": "Hm.", "signature": "x"})], [("user", "Who won?")]),
        ([ASKED, assistant(said("They "))], [("user", "Who won?"), ("assistant", "They ")]),
        ([assistant(said("They "))], [("user", ""), ("assistant", "They ")]),
        ([{"role": "system", "content": "Be brief."}], [("system", "Be brief."), ("user", "")]),
        (
            [
                ASKED,
                {"role": "system", "content": "Once.", "clear_at": "next_user_message"},
                assistant(said("Ja.")),
                MORE,
            ],
            [("user", "Who won?"), ("assistant", "Ja."), ("user", "By how much?")],
        ),
    ],
)
def test_turns_without_content(served: Served, turns: list[dict[str, Any]], expected: list[tuple[str, Any]]) -> None:
    messages, _ = prompt_of(served, *turns)
    assert [(message["role"], message["content"]) for message in messages] == expected


def test_tools_change_in_the_midst_of_a_conversation(served: Served) -> None:
    def change(kind: str, **tool: Any) -> dict[str, Any]:
        return {"role": "system", "content": [{"type": f"tool_{kind}", "tool": tool}]}

    added = change("addition", type="tool_definition", definition={**TIME, "name": "new"})
    removed, again = (change(kind, type="tool_reference", name="get_time") for kind in ("removal", "addition"))
    for turns, names in (([added, removed], {"new"}), ([removed, again], {"get_time"}), ([], {"get_time"})):
        asking.answered(
            served.post(MESSAGES, model="org/demo", max_tokens=8, tools=[TIME], messages=[ASKED, *turns, MORE])
        )
        _, prompt = asking.submitted(served)
        assert {tool["function"]["name"] for tool in prompt.tools} == names


def test_tools_of_servers_are_left_out_with_a_note(served: Served) -> None:
    servers = [{"type": "url", "url": "u", "name": "s"}]
    toolset = {"type": "mcp_toolset", "mcp_server_name": "s"}
    _, notes = prompt_of(served, *HI, mcp_servers=servers, tools=[toolset])
    assert notes == "mcp_servers: tools of servers are left out; tools[0]: a tool that Anthropic defines is left out"


@pytest.mark.parametrize(
    ("block", "where"),
    [
        ({"type": "text"}, "messages[0].content[0].text"),
        ({"type": "text", "text": 3}, "messages[0].content[0].text"),
        ({"text": "x"}, "messages[0].content[0].type"),
        ({"type": "image", "source": {"type": "base64"}}, "messages[0].content[0].source.data"),
        ({"type": "image", "source": {"type": "made_up"}}, "messages[0].content[0].source"),
        ({"type": "tool_result"}, "messages[0].content[0].tool_use_id"),
    ],
)
def test_malformed_block_is_refused_by_its_place(served: Served, block: dict[str, Any], where: str) -> None:
    body = {"model": "org/demo", "messages": [user(block)], "max_tokens": 8}
    for media in (frozenset(), frozenset({"image"})):
        served.engine.media = media
        refused(served.post(MESSAGES, **body), "messages", f"'{where}")


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/messages in a turn", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("joined", ["", "\n\nBe brief."])
def test_billing_is_left_out_of_system_messages(served: Served, route: str, joined: str) -> None:
    billing = f"x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;{joined}"
    system = {"role": "system", "content": billing}
    body: dict[str, Any] = {"model": "org/demo", "messages": [system, *HI]}
    if route == "/v1/messages":
        body = {"model": "org/demo", "system": [said(billing)], "messages": HI}
    if route == "/v1/responses":
        body = {"model": "org/demo", "instructions": billing, "input": "Hi"}
    answered(served.post(route.partition(" ")[0], **body, **({} if "input" in body else {"max_tokens": 64})))
    _, prompt = asking.submitted(served)
    assert [message["content"] for message in prompt.messages] == (["Be brief.", "Hi"] if joined else ["Hi"])
