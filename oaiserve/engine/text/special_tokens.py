"""Special tokens in the contents of messages: marks within them, at which a rendered text is cut before it is encoded.

A chat template cannot tell its own `<|im_end|>` from one that a client has sent, which would end the message and begin
another role's. A special token that is cut is encoded as plain text. Texts without any keep all their ids.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

MARK = "\ufdd0"  # a noncharacter, which no text for people has
_START_CHARACTERS = 3  # of a special token, by which a text is searched: there may be thousands of tokens
# Tokens with these texts end an answer in every model that has them as tokens of their own. `end_tokens.py` has the
# exceptions.
END_TEXTS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end|>", "<|im_end|>"),
        *("<|end_of_text|>", "<|endoftext|>"),
        *("<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "[e~["),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
        *("<eos>", "<EOT>", "_<EOT>", "▁<EOT>", "<|EOT|>", "[EOT]", "[EOS]"),
        # After the text in a gap, a model for code goes on with another file.
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|repo_name|>", "<|fim_repo|>", "<fim-repo>", "<REPO>"),
        *("<reponame>", "<|file_sep|>"),
    }
)


class SpecialTexts:
    """The texts of a tokenizer's special tokens. Those of one character cannot be cut, and are left out."""

    def __init__(self, texts: Collection[str]) -> None:
        self._by_start: dict[str, tuple[str, ...]] = {}
        texts = [text for text in texts if len(text) > 1]
        size = min([_START_CHARACTERS, *map(len, texts)])
        for text in texts:
            self._by_start[text[:size]] = (*self._by_start.get(text[:size], ()), text)
        self._starts = re.compile("|".join(map(re.escape, self._by_start)) or "(?!)")
        self._beginnings = {text[:length] for text in texts for length in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    def marked(self, value: Any) -> Any:
        """Return JSON data with a mark behind the first character of each special token in a string or a name.

        A text among several parts that ends with the beginning of one gets a mark behind it, too.
        """
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            marked = {self._marked(name): self.marked(one) for name, one in value.items()}
            if value.get("type") == "text" and isinstance(text := marked.get("text"), str):
                marked["text"] = text + MARK if self._ends_within(text) else text
            return marked
        return [self.marked(one) for one in value] if isinstance(value, (list, tuple)) else value

    def _marked(self, text: str) -> str:
        places = [0, *self._places(text)]
        return text if len(places) == 1 else MARK.join(map(text.__getitem__, map(slice, places, [*places[1:], None])))

    def _places(self, text: str) -> Iterator[int]:
        """Yield where to cut each special token, also those that overlap."""
        start = 0
        while (found := self._starts.search(text, start)) is not None:
            start = found.start() + 1
            if text.startswith(self._by_start[found[0]], start - 1):
                yield start

    def _ends_within(self, text: str) -> bool:
        return any(text[-length:] in self._beginnings for length in range(1, self._longest))
