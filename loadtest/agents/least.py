"""Estimates how much of a prompt a server had to read at least, from the texts that it has read before.

A prefix cache helps up to the first difference between two prompts. The tokens themselves are unknown here, so the
server's token counts are distributed over the texts in proportion to their lengths.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from loadtest.agents.shapes import Ask, Message

LEAST_LINE = 20  # least characters of a line that counts as repeated; shorter lines occur in any source code


class ReadText(NamedTuple):
    """A prompt with its answer, and the token counts that the server reported."""

    prompt: str
    answer: str
    prompt_tokens: float
    answer_tokens: int

    @property
    def num_tokens(self) -> float:
        return self.prompt_tokens + self.answer_tokens

    def num_common(self, text: str) -> float:
        """Return how many tokens another prompt has in common with this text, from the beginning."""
        length = _num_common(text, self.prompt + self.answer)
        in_answer = max(0, length - len(self.prompt))
        in_prompt = (length - in_answer) / max(1, len(self.prompt))
        return self.prompt_tokens * in_prompt + self.answer_tokens * in_answer / max(1, len(self.answer))


class Needed(NamedTuple):
    """How many tokens of a prompt even the best cache could not have provided."""

    new: float  # tokens of texts that were in no earlier prompt
    again: float  # tokens that earlier prompts had too, but after a different text

    @property
    def total(self) -> float:
        return self.new + self.again


@dataclass(slots=True)
class AlreadyRead:
    """All texts that a server has read in a run."""

    texts: list[ReadText] = field(default_factory=list)
    _lines: set[str] = field(default_factory=set)
    _latest: dict[int, ReadText] = field(default_factory=dict)  # keyed by agent

    def needed(self, text: str, prompt_tokens: int) -> Needed:
        """Return how many tokens of this prompt a server with the best cache has to read."""
        common = max((read.num_common(text) for read in self.texts), default=0.0)
        total = max(1.0, prompt_tokens - common)
        rest = text[max((_num_common(text, read.prompt + read.answer) for read in self.texts), default=0) :]
        known = sum(len(line) for line in _lines(rest) if line in self._lines)
        again = total * known / max(1, len(rest))
        return Needed(total - again, again)

    def add(self, read: ReadText, agent: int) -> None:
        self.texts.append(read)
        self._lines.update(_lines(read.prompt), _lines(read.answer))
        self._latest[agent] = read

    @property
    def num_kept(self) -> float:
        """Return how many tokens a cache has to keep for the next turns of all agents. A common beginning of their
        prompts counts once."""
        kept = 0.0
        before: list[ReadText] = []
        for read in self._latest.values():
            kept += read.num_tokens - max((one.num_common(read.prompt) for one in before), default=0.0)
            before.append(read)
        return kept


def text_of(ask: Ask) -> str:
    """Return the text of a prompt in the order in which most templates write it: tools, then messages."""
    written = [json.dumps(tool) + "\n" for tool in ask.tools]
    return "".join([*written, *map(_message, ask.messages)]) + answer_of("")


def answer_of(text: str) -> str:
    """Return the text of an answer in the form in which the next prompt contains it."""
    return f"assistant\n{text}"


def _message(message: Message) -> str:
    content: Any = message["content"]
    return f"{message['role']}\n{content if isinstance(content, str) else json.dumps(content)}\n"


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines(keepends=True) if len(line) >= LEAST_LINE]


def _num_common(one: str, other: str) -> int:
    """Return how many characters at the beginning of two texts are the same."""
    low = 0
    high = min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
