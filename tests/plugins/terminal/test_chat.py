"""A chat in a terminal or through pipes, with a server that repeats what it is told."""

import io
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.markdown import Markdown

from oaiserve import cli
from oaiserve.commands.client import Client, NoAnswer
from oaiserve.commands.servers import announced
from oaiserve.plugins.terminal.conversation import Chat
from oaiserve.plugins.terminal.talk import Answer
from tests.agents.scripted import ScriptedServer
from tests.commands.terminal import END, terminal
from tests.plain_http import Handler, running_http

CODE = "```python\nfirst()\n\nsecond()\n```"


def said(chat: Chat, question: str) -> str:
    return "".join(text for _, text in chat.answer(question))


def chat_with(server: ScriptedServer) -> Chat:
    return Chat(Client(server.url), "demo", "", 0)


def test_a_pipe_has_one_question_and_its_answer(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in (["--url", server.url], ["demo"], []):
        monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines"))
        with announced("http://127.0.0.1:1", "gone"), announced(server.url, "demo"):
            assert cli.main(["chat", *arguments]) == 0
        assert capsys.readouterr().out == "You said **two\nlines** after 0.\n"


def test_a_question_mark_stands_for_what_the_encoding_of_a_terminal_lacks(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdin", io.StringIO("naïve œuvre"))
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main(["chat", "--url", server.url]) == 0
    out.seek(0)
    assert out.read() == "You said **naïve ?uvre** after 0.\n"


def test_a_model_that_the_server_lacks_is_one_sentence(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["chat", "other", "--url", server.url]) == 2
    assert capsys.readouterr().err == f"oaiserve chat: {server.url} has no model 'other': it has demo.\n"


def test_a_model_that_cannot_be_served_is_the_servers_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "/nowhere"]) == 2
    assert "oaiserve chat: MODEL is '/nowhere', which does not exist." in capsys.readouterr().err


def test_a_conversation_is_remembered_until_it_is_forgotten(server: ScriptedServer) -> None:
    chat = chat_with(server)
    assert said(chat, "a") == "You said **a** after 0."
    assert said(chat, "b") == "You said **b** after 1."
    chat.forget()
    chat.system = "Be brief."
    assert said(chat, "c") == "You said **c** after 0."
    assert "<|im_start|>system\nBe brief.<|im_end|>" in list(server.prompts.values())[-1]


def test_of_an_answer_that_is_stopped_the_begin_is_remembered(server: ScriptedServer) -> None:
    chat = chat_with(server)
    answer: Any = chat.answer("a")
    begin = next(answer)[1]
    answer.close()
    assert said(chat, "b") == "You said **b** after 1."
    assert f"<|im_start|>assistant\n{begin}<|im_end|>" in list(server.prompts.values())[-1]


@pytest.mark.parametrize(
    ("event", "reason"),
    [(b'{"error": {"message": "The model failed."}}', "The model failed."), (b'{"cut', "has ended the answer")],
)
def test_an_answer_that_fails_says_why(event: bytes, reason: str) -> None:
    class Failing(Handler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b": a comment\ndata: " + event)

    with running_http(Failing) as url, pytest.raises(NoAnswer, match=reason):
        said(Chat(Client(url), "demo", "", 0), "a")


def test_a_model_cannot_write_control_characters(server: ScriptedServer) -> None:
    assert said(chat_with(server), "a\x1b]52;c;cm0=\x07\tb") == "You said **a]52;c;cm0=\tb** after 0."


@given(st.text("a \n`-#", max_size=60))
def test_blocks_are_the_answer_in_pieces(text: str) -> None:
    answer = Answer()
    blocks = list[Markdown]()
    for character in text:
        blocks += answer.add("content", character)
    assert "".join(block.markup for block in [*blocks, *answer.rest()]).strip() == text.strip()


def test_code_is_one_block_whatever_it_holds() -> None:
    answer = Answer()
    blocks = list[Markdown]()
    for character in f"Thus:\n\n{CODE}\n\nDone.":
        blocks += answer.add("content", character)
    assert [block.markup.strip() for block in blocks] == ["Thus:", CODE]
    assert [block.markup for block in answer.rest()] == ["Done."]


def test_thoughts_are_apart_from_the_answer_and_dim() -> None:
    answer = Answer()
    assert list(answer.add("reasoning", "Hm")) == []
    (thought,) = answer.add("content", "Yes")
    assert (thought.markup, thought.style) == ("Hm", "dim")
    assert [(block.markup, block.style) for block in answer.rest()] == [("Yes", "none")]


def test_of_an_answer_longer_than_the_screen_the_end_is_shown() -> None:
    answer = Answer()
    answer.add("content", "- a line\n" * 50 + "- the last")
    console = Console(file=io.StringIO(), width=40, height=10)
    shown = console.render_lines(answer, console.options)
    assert len(shown) <= 10
    assert "the last" in str(shown)


def test_a_chat_in_a_terminal(server: ScriptedServer) -> None:
    with terminal("chat", "--url", server.url) as screen:
        screen.shows(rf"(?s)demo at {server.url}\..*\n\n> $")
        screen.types("Hello\r")
        screen.shows(r"You said Hello after 0\.\n\n> $")  # without the asterisks
        screen.types("/new\r")
        screen.shows(r"What was said is forgotten\.\n\n> $")
        screen.types("/system Be brief.\r")
        screen.shows(r"the model gets this text first\.\n\n> $")
        screen.types("/what\r")
        screen.shows(r"(?s)/time .*/quit .*> $")
        screen.types("half a line")
        screen.shows("half a line")
        screen.interrupts(r"\n> $")
        screen.types("Again\r")
        screen.shows(r"You said Again after 0\.\n\n> $")
        screen.types(END)
    assert screen.process.returncode == 0
