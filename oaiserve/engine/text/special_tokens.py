"""Control tokens in the contents of messages: marks within them, so that they are encoded as plain text.

A chat template cannot distinguish its own `<|im_end|>` or `<tool_call>` from one that a client or a web page has sent,
which would end the message or forge a call. So texts are marked before they are rendered. If a rendered text has marks,
the control tokens that the template wrote get their ids, and everything else is encoded by a tokenizer without control
tokens. Texts without control tokens keep all their ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

MARK = "\ufdd0\ufdd1"  # noncharacters, which occur in no real text
ESCAPED_MARK = MARK.encode("unicode_escape").decode()  # in JSON of ASCII, and in Python's notation of a string
_WRITTEN = "\ufdd2"  # replaces a control token that the template wrote
_START_CHARACTERS = 3  # characters of each control token that a text is searched for: there may be thousands of tokens
# An added token is a control token if it is special, or a tag in brackets or bars, such as `<tool_call>`, `[THINK]`
# or `｜DSML｜`. Others are text, such as several spaces. So are tags of HTML (Gemma), unless the template writes them.
_TAG = re.compile(r"▁?[<\[{|｜](?=\S*\w)\S*[>\]}|｜]")
_HTML = re.compile(
    r"</?(a|article|b|blockquote|body|br|button|caption|center|code|col|dd|del|details|div|dl|dt|em|figcaption|figure"
    r"|font|footer|form|h[1-6]|head|header|hr|html|i|iframe|img|input|ins|kbd|label|li|link|main|mark|meta|nav|ol"
    r"|option|p|pre|s|script|section|select|small|span|strong|style|sub|summary|sup|svg|table|tbody|td|textarea|tfoot"
    r"|th|thead|title|tr|u|ul|video)>"
)
# Reasoning at the beginning of an assistant's message, as servers that do not separate it return it.
_REASONING = re.compile(
    r"(\s*[<\[]([^\s<>\[\]/]{0,20}think[^\s<>\[\]]{0,20})[>\]])(?:(.*?)([<\[]/\2[>\]]))?", re.I | re.S
)
# Tokens with these texts end an answer in every model that has them as tokens of their own. `end_tokens.py` has the
# exceptions.
END_TEXTS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end|>", "<|im_end|>"),
        *("<|end_of_text|>", "<|endoftext|>"),
        *("<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "[e~["),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
        *("<eos>", "<EOT>", "_<EOT>", "▁<EOT>", "<|EOT|>", "[EOT]", "[EOS]"),
        # After the text in a gap, a model for code continues with another file.
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|repo_name|>", "<|fim_repo|>", "<fim-repo>", "<REPO>"),
        *("<reponame>", "<|file_sep|>", "<file_sep>", "<|file_separator|>"),
    }
)


def control_tokens(tokenizer: Tokenizer, template: str, *, splits_special: bool) -> dict[str, int]:
    """Return the ids of the control tokens by their texts. With `splits_special`, special tokens are not included.
    Tokens of one character cannot be cut, and are left out."""
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
        """`normalize` is the tokenizer's, if it turns other texts into control tokens, such as full-width letters."""
        self._texts = frozenset(texts)
        self._lengths: dict[str, list[int]] = {}  # lengths of the tokens with the same start, longest first
        size = min([_START_CHARACTERS, *map(len, texts)])
        for start, length in sorted({(text[:size], len(text)) for text in texts}, reverse=True):
            self._lengths.setdefault(start, []).append(length)
        self._starts = re.compile("|".join(map(re.escape, self._lengths)) or "(?!)")
        self._beginnings = {text[:length] for text in texts for length in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)
        self._normalize = normalize

    def marked_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with marked texts. If an assistant's content begins with reasoning, the tags around that
        stay unmarked, because templates look for them."""
        return [self._marked_message(message) for message in messages]

    def _marked_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        match message:
            case {"role": "assistant", "content": str(text)}:
                reasoning, rest = self._after_reasoning(text)
                marked: dict[str, Any] = self.marked({**message, "content": rest})
                marked["content"] = reasoning + marked["content"]
            case {"role": "assistant", "content": [{"type": "text", "text": str(text)} as part, *more]}:
                reasoning, rest = self._after_reasoning(text)
                marked = self.marked({**message, "content": [{**part, "text": rest}, *more]})
                marked["content"][0]["text"] = reasoning + marked["content"][0]["text"]
            case _:
                marked = self.marked(message)
        return marked

    def marked(self, value: Any) -> Any:
        """Return JSON data with a mark after the first character of each control token in a string or a name.

        One of several text parts also gets a mark at its end, if it ends with the beginning of a control token.
        """
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            marked = {self._marked(name): self.marked(one) for name, one in value.items()}
            if value.get("type") == "text" and isinstance(text := marked.get("text"), str):
                if self._ends_within(text):
                    marked["text"] = text + MARK
                else:
                    marked["text"] = text
            return marked
        if isinstance(value, (list, tuple)):
            return [self.marked(one) for one in value]
        return value

    def written(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield each unmarked control token after the text before it, as pairs; then the rest of the text, with ""."""
        start = 0
        at = 0
        while (match := self._starts.search(text, at)) is not None:
            at = match.start()
            if token := self._token(text, at, match[0]):
                yield text[start:at], token
                start = at = at + len(token)
            else:
                at += 1
        yield text[start:], ""

    def _after_reasoning(self, text: str) -> tuple[str, str]:
        """Split off reasoning at the beginning of a text. Return it, marked except for its tags, and the rest."""
        if (match := _REASONING.match(text)) is None:
            return "", text
        opening, _, reasoning, closing = match.groups(default="")
        return opening + self._marked(reasoning) + closing, text[match.end() :]

    def _marked(self, text: str) -> str:
        places = [0, *self._places(text)]
        if len(places) > 1:
            return MARK.join(map(text.__getitem__, map(slice, places, [*places[1:], None])))
        if self._normalize is not None and any(self._places(self._normalize(text))):
            return text + MARK
        return text

    def _places(self, text: str) -> Iterator[int]:
        """Yield where to cut each control token, including overlapping ones."""
        start = 0
        while (match := self._starts.search(text, start)) is not None:
            start = match.start() + 1
            if self._token(text, match.start(), match[0]):
                yield start

    def _token(self, text: str, at: int, start: str) -> str:
        """Return the longest control token at a place where one may start, or ""."""
        texts = (text[at : at + length] for length in self._lengths[start])
        return next((each for each in texts if each in self._texts), "")

    def _ends_within(self, text: str) -> bool:
        return any(text[-length:] in self._beginnings for length in range(1, self._longest))


class MarkedTexts:
    """Encodes marked texts with a tokenizer without control tokens, which shares the model of the complete one."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, control_ids: Mapping[str, int], texts: SpecialTexts
    ) -> None:
        """`vocab_size` is greater than every id of the tokenizer."""
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
        # The placeholders of this class get ids that no token of the tokenizer has.
        unused = [f"{MARK}{number}{_WRITTEN}" for number in range(vocab_size - plain.get_vocab_size())]
        plain.add_tokens([AddedToken(text, normalized=False) for text in (*unused, MARK, _WRITTEN)])
        self._dropped = {*map(plain.token_to_id, (*unused, MARK))}
        self._written_id = plain.token_to_id(_WRITTEN)
        self._control = {text: (token_id, added[token_id]) for text, token_id in control_ids.items()}
        self.control_ids = frozenset(control_ids.values())
        self._texts = texts

    def prepared(self, text: str) -> tuple[str, list[int]]:
        """Return the text to encode, and the ids of the control tokens that the template wrote into it."""
        parts: list[str] = []
        written: list[int] = []
        takes_space = False
        for before, token in self._texts.written(text):
            part = before.replace(_WRITTEN, MARK)
            part = part.lstrip() if takes_space else part
            if token:
                token_id, added = self._control[token]
                written.append(token_id)
                part = part.rstrip() if added.lstrip else part
                takes_space = added.rstrip
            parts.append(part)
        return _WRITTEN.join(parts), written

    def restored(self, token_ids: Sequence[int], written: Sequence[int]) -> list[int]:
        """Return the ids of a prepared text, with those of the control tokens in their places."""
        rest = iter(written)
        return [
            next(rest) if token_id == self._written_id else self._ids.get(token_id, token_id)
            for token_id in token_ids
            if token_id not in self._dropped
        ]
