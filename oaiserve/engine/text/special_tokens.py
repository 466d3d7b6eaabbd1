"""Control tokens in prompts: those that the chat template wrote get their ids, and no other text becomes one.

A client or a web page may send `<|im_end|>` or `<tool_call>`, or a part of one that the template completes, such as
`|im_end|` between its own `<` and `>`. So a rendered text says which characters the template wrote. If any character of
a control token comes from elsewhere, only the control tokens that the template wrote get their ids, and everything else
is encoded by a tokenizer without control tokens. All other texts keep all their ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from oaiserve.engine.text.template_text import by_template, is_written, joined, outside, plain

MARK = "\ufdd0\ufdd1"  # noncharacters, which occur in no real text
_ESCAPED_MARK = MARK.encode("unicode_escape").decode()  # the mark in ASCII JSON and in a Python string literal
_WRITTEN = "\ufdd2"  # stands in for a control token that the template wrote
_START_CHARACTERS = 3  # characters of a control token that a text is searched for; there may be thousands of tokens
# An added token is a control token if it is special, or a tag in brackets or bars, such as `<tool_call>`, `[THINK]` or
# `｜DSML｜`. Others, such as several spaces, are text. Tags of HTML (Gemma) are text, too, unless the template writes
# them.
_TAG = re.compile(r"▁?[<\[{|｜](?=\S*\w)\S*[>\]}|｜]")
_HTML = re.compile(
    r"</?(a|article|b|blockquote|body|br|button|caption|center|code|col|dd|del|details|div|dl|dt|em|figcaption|figure"
    r"|font|footer|form|h[1-6]|head|header|hr|html|i|iframe|img|input|ins|kbd|label|li|link|main|mark|meta|nav|ol"
    r"|option|p|pre|s|script|section|select|small|span|strong|style|sub|summary|sup|svg|table|tbody|td|textarea|tfoot"
    r"|th|thead|title|tr|u|ul|video)>"
)
# The roles of the API. Templates make control tokens of them, such as `<|user|>`.
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_ANSWER_TEXTS = ("content", "text", "reasoning_content", "reasoning", "thinking")  # keys of an assistant's message
# Reasoning at the beginning of an assistant's message, as servers return it that do not separate it.
_REASONING = re.compile(
    r"(\s*[<\[]([^\s<>\[\]/]{0,20}think[^\s<>\[\]]{0,20})[>\]])(?:(.*?)([<\[]/\2[>\]]))?", re.I | re.S
)
# Tokens with these texts end an answer in every model that has them as tokens. `end_tokens.py` lists the exceptions.
END_TEXTS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end|>", "<|im_end|>"),
        *("<|end_of_text|>", "<|endoftext|>"),
        *("<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "[e~["),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
        *("<eos>", "<EOT>", "_<EOT>", "▁<EOT>", "<|EOT|>", "[EOT]", "[EOS]"),
        # After filling a gap, a code model continues with another file.
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|repo_name|>", "<|fim_repo|>", "<fim-repo>", "<REPO>"),
        *("<reponame>", "<|file_sep|>", "<file_sep>", "<|file_separator|>"),
    }
)


def control_tokens(tokenizer: Tokenizer, template: str, *, splits_special: bool) -> dict[str, int]:
    """Return the ids of the control tokens, keyed by their texts. With `splits_special`, special tokens are left out,
    and so are tokens of one character in any case, because they cannot be cut."""
    return {
        token.content: token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if len(token.content) > 1
        and (not splits_special if token.special else _is_control_tag(token.content, template))
    }


def _is_control_tag(text: str, template: str) -> bool:
    return _TAG.fullmatch(text) is not None and (_HTML.fullmatch(text) is None or text in template)


class SpecialTexts:
    """The texts of a tokenizer's control tokens, and the search for them in other texts."""

    def __init__(self, texts: Collection[str], normalize: Callable[[str], str] | None = None) -> None:
        """`normalize` is the tokenizer's normalizer, if it can turn other texts, such as full-width letters, into
        control tokens."""
        self.texts = frozenset(texts)
        self._lengths: dict[str, list[int]] = {}  # lengths of the tokens with each beginning, longest first
        self._size = size = min([_START_CHARACTERS, *map(len, texts)])
        self._longest = max(map(len, texts), default=0)
        for start, length in sorted({(text[:size], len(text)) for text in texts}, reverse=True):
            self._lengths.setdefault(start, []).append(length)
        self._starts = re.compile("|".join(map(re.escape, self._lengths)) or "(?!)")
        self._normalize = normalize
        self._normalized = self if normalize is None else SpecialTexts({*texts, *map(normalize, texts)})

    def prepared(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return copies of messages for a template. Their contents stay text from outside, except for roles of the API
        and the tags around reasoning at the beginning of an assistant's message, which count as the template's.

        Other control tokens in an assistant's texts are marked, because templates search these for the end of
        reasoning, and would mistake such a token for it.
        """
        return [self._prepared_message(message) for message in messages]

    def _prepared_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        prepared: dict[str, Any] = copied(message)
        role = prepared.get("role")
        if isinstance(role, str) and role in _ROLES:
            prepared["role"] = by_template(role)
        if role == "assistant":
            content = prepared.get("content")
            parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
            first = (parts[0], "text") if parts else (prepared, "content")
            for owner in (prepared, *parts):
                for name in _ANSWER_TEXTS:
                    if isinstance(text := owner.get(name), str):
                        is_first = owner is first[0] and name == first[1]
                        owner[name] = self._answer(text) if is_first else self._cut(text)
        return prepared

    def unmarked(self, text: str) -> str:
        """Return a rendered text without the marks in its messages."""
        for mark in (MARK, _ESCAPED_MARK):
            if mark in text:
                text = text.replace(mark, "")
        return text

    def pieces(self, text: str) -> list[str]:
        """Cut each control token in a text after its first character. Return the parts."""
        places = [0, *self._places(text)]
        return [text[start:end] for start, end in zip(places, [*places[1:], None], strict=True)]

    def is_forged(self, text: str) -> bool:
        """Return whether encoding a rendered text as it is could yield control tokens with characters that the template
        didn't write."""
        bare = plain(text)
        for start, end in outside(text):
            for at, token in self._tokens(bare, max(0, start - self._longest + 1), end):
                if at + len(token) > start:
                    return True
        if self._normalize is None:
            return False
        num_written = sum(1 for _ in self._tokens(bare))
        return sum(1 for _ in self._normalized._tokens(self._normalize(bare))) > num_written

    def written(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield pairs of a control token that the template wrote and the text before it, text first; then the rest of
        the text, with ""."""
        bare = plain(text)
        start = 0
        for at, token in self._tokens(bare):
            if at >= start and is_written(text, at, at + len(token)):
                yield bare[start:at], token
                start = at + len(token)
        yield bare[start:], ""

    def _answer(self, text: str) -> str:
        """Return an assistant's content. Tags around reasoning at its beginning count as the template's."""
        if (match := _REASONING.match(text)) is None:
            return self._cut(text)
        opening, _, reasoning, closing = match.groups(default="")
        rest = self._cut(text[match.end() :])
        return joined((by_template(opening), self._cut(reasoning), by_template(closing), rest))

    def _cut(self, text: str) -> str:
        return MARK.join(self.pieces(text))

    def _places(self, text: str) -> Iterator[int]:
        """Yield where to cut each control token, including overlapping ones."""
        last = 0
        for at, _ in self._tokens(text):
            if at + 1 > last:
                last = at + 1
                yield last

    def _tokens(self, text: str, at: int = 0, end: int | None = None) -> Iterator[tuple[int, str]]:
        """Yield the position and the text of each control token that begins in a part of a text, including overlapping
        ones. The longest of those that begin at the same position comes first."""
        end = len(text) if end is None else end + self._size - 1
        while (match := self._starts.search(text, at, end)) is not None:
            at = match.start()
            for length in self._lengths[match[0]]:
                if (token := text[at : at + length]) in self.texts:
                    yield at, token
            at += 1


def copied(value: Any) -> Any:
    """Return a copy of JSON data, which a template may change."""
    if isinstance(value, Mapping):
        return {name: copied(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [copied(one) for one in value]
    return value


class PlainEncoding:
    """Encodes rendered texts with a copy of the tokenizer that has the same model but no control tokens."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, control_ids: Mapping[str, int], texts: SpecialTexts
    ) -> None:
        """`vocab_size` exceeds every id of the tokenizer."""
        self.backend = plain = Tokenizer(tokenizer.model)
        if tokenizer.normalizer is not None:
            plain.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            plain.pre_tokenizer = tokenizer.pre_tokenizer
        added = tokenizer.get_added_tokens_decoder()
        others = [token for token in added.values() if token.content not in control_ids and not token.special]
        plain.add_tokens(others)
        ids = {token.content: token_id for token_id, token in plain.get_added_tokens_decoder().items()}
        self._ids = {ids[token.content]: token_id for token_id, token in added.items() if token.content in ids}
        # This class's placeholders must get ids that no token of the tokenizer has.
        unused = [f"{MARK}{number}{_WRITTEN}" for number in range(vocab_size - plain.get_vocab_size())]
        plain.add_tokens([AddedToken(text, normalized=False) for text in (*unused, MARK, _WRITTEN)])
        self._dropped = {*map(plain.token_to_id, (*unused, MARK))}
        self._written_id = plain.token_to_id(_WRITTEN)
        self._control = {text: (token_id, added[token_id]) for text, token_id in control_ids.items()}
        self.control_ids = frozenset(control_ids.values()) - self._ids.keys()  # The others don't belong to the model.
        self._texts = texts

    def forms(self, text: str) -> tuple[list[int], Iterator[str]]:
        """Return the ids of the control tokens that the template wrote, and forms of the text to encode.

        A model of whole words or pieces may still produce control tokens from the remaining text. So there are three
        forms: with that text unchanged, with each control token in it cut, and with every character on its own.
        """
        parts: list[str] = []
        written: list[int] = []
        takes_space = False
        for before, token in self._texts.written(text):
            part = before.replace(_WRITTEN, "").replace(MARK, "")
            part = part.lstrip() if takes_space else part
            if token:
                token_id, added = self._control[token]
                written.append(token_id)
                part = part.rstrip() if added.lstrip else part
                takes_space = added.rstrip
            parts.append(part)
        cuts: tuple[Callable[[str], Iterable[str]], ...] = (lambda part: (part,), self._texts.pieces, iter)
        return written, (_WRITTEN.join(MARK.join(cut(part)) for part in parts) for cut in cuts)

    def restored(self, token_ids: Sequence[int], written: Sequence[int]) -> list[int]:
        """Return the ids of one of the forms, with the ids of the control tokens inserted."""
        rest = iter(written)
        return [
            next(rest) if token_id == self._written_id else self._ids.get(token_id, token_id)
            for token_id in token_ids
            if token_id not in self._dropped
        ]
