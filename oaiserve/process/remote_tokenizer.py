"""`RemoteTokenizer`: the tokenizer of an engine process, as routes in the front use it.

Building a tokenizer holds Python's interpreter lock for up to two seconds, and a vocabulary takes 200 MB. So the front
has only the small parts, and asks an engine process for everything that needs the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oaiserve.engine.request import Prompt
from oaiserve.engine.text.chat_template import ChatTemplate
from oaiserve.engine.text.fill import FillTokens
from oaiserve.engine.text.stored_tokenizer import TokenizerParts
from oaiserve.engine.text.tokenizer import Tokenizer

Method = Literal["decode", "lone_texts", "token_texts", "text_parts", "rendered", "first_tokens"]
# Calls a method of the tokenizer in an engine process, and waits for its result.
Call = Callable[..., Any]


@dataclass(slots=True, kw_only=True)
class TokenizerFacts:
    """The facts about a tokenizer that the front needs."""

    parts: TokenizerParts
    special_token_ids: dict[str, int]
    special_ids: frozenset[int]
    fill: FillTokens | None
    why_no_chat: str

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerFacts:
        return cls(
            parts=tokenizer.stored.parts,
            special_token_ids=tokenizer.special_token_ids,
            special_ids=tokenizer.special_ids,
            fill=tokenizer.fill,
            why_no_chat=tokenizer.why_no_chat,
        )


class RemoteTokenizer:
    """A tokenizer whose methods wait for an engine process, so only work in turns may call them. They raise
    APIError."""

    def __init__(self, facts: TokenizerFacts, encode: Callable[[Prompt, int | None], list[int]], call: Call) -> None:
        self.facts = facts
        self._encode = encode
        self._call = call
        parts = facts.parts
        self.stored = parts
        self.special_token_ids = facts.special_token_ids
        self.special_ids = facts.special_ids
        self.fill = facts.fill
        self.why_no_chat = facts.why_no_chat
        self.chat_template: ChatTemplate | None = None
        if parts.chat_template:
            self.chat_template = ChatTemplate(parts.chat_template, parts.special_tokens_map, parts.response_template)

    def encode_in_pieces(self, prompt: Prompt, most_tokens: int | None = None) -> Generator[None, None, list[int]]:
        """See `Tokenizer`."""
        yield from ()
        return self._encode(prompt, most_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._call("decode", [*token_ids])
        return text

    def lone_texts(self, token_ids: Sequence[int]) -> list[str]:
        texts: list[str] = self._call("lone_texts", [*token_ids])
        return texts

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        texts: list[str] = self._call("token_texts", [*token_ids])
        return texts

    def text_parts(self, prompt: Prompt, token_ids: Sequence[int]) -> list[str]:
        texts: list[str] = self._call("text_parts", [*token_ids], prompt=prompt)
        return texts

    def rendered(self, prompt: Prompt) -> tuple[str, list[tuple[int, int]]]:
        text, outside = self._call("rendered", prompt=prompt)
        return text, [(start, end) for start, end in outside]

    def first_tokens(self, text: str, num_tokens: int, param: str) -> str:
        start: str = self._call("first_tokens", text, num_tokens, param)
        return start
