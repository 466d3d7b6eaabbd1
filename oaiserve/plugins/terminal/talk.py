"""A chat in a terminal: typed lines, answers as Markdown while they arrive, and commands that begin with a slash."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from oaiserve.errors import StartupError
from oaiserve.plugins.terminal.conversation import Chat

HELP = """\
/time           where the time of the last answer went
/system TEXT    text that the model gets first; without TEXT, none
/new            forget what has been said
/quit           leave, as Ctrl-D does. Ctrl-C stops an answer."""
_FENCED = re.compile(r"^ *(```+|~~~+).*?(^ *\1[^\S\n]*$|\Z)", re.MULTILINE | re.DOTALL)
_MOST_CHARACTERS = 2**17  # A longer block is split, so that an endless one can be shown.
_NEXT_BLOCK = re.compile(r"\n\s*\n(?=\S)")


def talk(chat: Chat) -> None:
    with suppress(ImportError):  # a Python without it
        import readline  # noqa: F401 - arrows, and earlier lines
    console = Console(highlight=False)
    console.print(Text(f"{chat.model} at {chat.url}. Ctrl-C stops an answer, Ctrl-D leaves, /help has more.\n"))
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if line == "/quit":
            return
        try:
            if line.startswith("/"):
                console.print(Text(_obeyed(chat, line)), "", sep="\n")
            elif line:
                _show_answer(console, chat, line)
        except StartupError as error:
            console.print(Text(f"{error}\n", style="red"))


def _obeyed(chat: Chat, line: str) -> str:
    name, _, text = line.partition(" ")
    if name == "/time":
        return chat.times()
    if name == "/new":
        chat.forget()
        return "What was said is forgotten."
    if name == "/system":
        chat.system = text.strip()
        if chat.system:
            return "From now on, the model gets this text first."
        return "There is no system prompt any more."
    return HELP


def _show_answer(console: Console, chat: Chat, question: str) -> None:
    pieces = chat.answer(question)
    shown = Answer()
    try:
        with Live(shown, console=console, refresh_per_second=8, transient=True) as live:
            for kind, text in pieces:
                for block in shown.add(kind, text):
                    live.console.print(block)
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
        shown.add("content", " *(stopped)*")
    console.print(*shown.rest(), "", sep="\n")


class Answer:
    """The end of an answer, which may still change. Blocks that are complete are printed once, above it."""

    def __init__(self) -> None:
        self._kind = "content"
        self._text = ""

    def add(self, kind: str, text: str) -> Iterator[Markdown]:
        """Take a piece, and return the blocks that are complete now."""
        blocks = []
        if kind != self._kind:
            blocks += self.rest()
            self._kind = kind
            self._text = ""
        self._text += text
        fences = [match.span() for match in _FENCED.finditer(self._text)]
        ends = [match.end() for match in _NEXT_BLOCK.finditer(self._text)]
        outside = [end for end in ends if not any(begin < end < fence_end for begin, fence_end in fences)]
        if outside:
            blocks.append(self._rendered(self._text[: outside[-1]]))
            self._text = self._text[outside[-1] :]
        if len(self._text) > _MOST_CHARACTERS:
            blocks += self.rest()
            self._text = ""
        return iter(blocks)

    def rest(self) -> list[Markdown]:
        if self._text.strip():
            return [self._rendered(self._text)]
        return []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        """Show the last lines, as many as the screen has room for."""
        lines = [line for part in self.rest() for line in console.render_lines(part, options, pad=False)]
        for line in lines[-max(1, console.height - 2) :]:
            yield from (*line, Segment.line())

    def _rendered(self, text: str) -> Markdown:
        return Markdown(text, style="dim" if self._kind == "reasoning" else "none")
