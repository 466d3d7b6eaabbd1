"""The vocabulary and the tokenizer settings in a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from oaiserve.checkpoints.bad_file import BadFile
from oaiserve.engine.text.special_tokens import END_TEXTS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens
SPACE = "▁"  # how tokens write a space
CONTINUES = "##"

_PREFIX = "tokenizer.ggml."
# Ids that the metadata leave out, by the kind of tokenizer and the token's role.
_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"bos": 101, "seperator": 102, "unknown": 100, "padding": 0, "mask": 103},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
}
_END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_FILL_ROLES = (("fim_pre", "prefix"), ("fim_suf", "suffix"), ("fim_mid", "middle"))  # new and old names
_ROLES = ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "cls", "mask")  # the files spell it so


def _in_word_pieces(token: str, kind: int) -> str:
    """Spell a token as BERT does: files mark the beginning of a word, while BERT marks its continuation."""
    if kind == CONTROL:
        return token
    if token.startswith(SPACE):
        return token[1:]
    return f"{CONTINUES}{token}"


class Vocabulary:
    """The tokens of a file, in the order of their ids, and its settings."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Read the metadata of a file. Raises BadFile if some are missing or do not fit together."""
        self._values = values
        self.kind = str(self.get("model", ""))
        self.architecture = str(values.get("general.architecture", ""))
        tokens = self._list("tokens", str)
        if not tokens:
            raise BadFile("it has no tokenizer")
        self.types = self._list("token_type", int) or [NORMAL] * len(tokens)
        if len(self.types) < len(tokens):
            raise BadFile(f"it has {len(tokens)} tokens, and types of {len(self.types)}")
        # A token without text would match everywhere.
        self.tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]
        if self.kind == "bert":
            self.tokens = list(map(_in_word_pieces, self.tokens, self.types))
        self.ids: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            self.ids.setdefault(token, token_id)

    def get(self, name: str, default: Any = None) -> Any:
        value = self._values.get(f"{_PREFIX}{name}")
        if value is None:
            return default
        return value

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The model's chat template, or several by name, if there is a separate one for requests with tools."""
        name = "tokenizer.chat_template"
        template = self._values.get(name)
        for_tools = self._values.get(f"{name}.tool_use")
        if template and for_tools:
            return {"default": template, "tool_use": for_tools}
        return template or None

    def token_id(self, role: str) -> int | None:
        """Return the id of the token with a role, or None if the vocabulary has no such token."""
        token_id = self.get(f"{role}_token_id", _DEFAULT_IDS.get(self.kind, {}).get(role))
        if type(token_id) is int and 0 <= token_id < len(self.tokens):
            return token_id
        return None

    @property
    def end_ids(self) -> list[int]:
        """The ids of the tokens that end a text, according to their roles, the main one first."""
        ids = [self.token_id(role) for role in _END_ROLES]
        more = self.get("eos_token_ids", [])
        ids += [one for one in more if type(one) is int] if isinstance(more, list) else []
        return list(dict.fromkeys(i for i in ids if i is not None and 0 <= i < len(self.tokens)))

    @property
    def fill_texts(self) -> list[str]:
        """The tokens before the prefix, the suffix and the middle for fill-in-the-middle; empty if one is missing."""
        ids = [next(filter(None, map(self.token_id, roles)), None) for roles in _FILL_ROLES]
        if None in ids:
            return []
        return [self.tokens[i] for i in ids if i is not None]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of tokens that are not text: they are matched in a text as they are written, and hidden in answers.

        Some files have wrong types, or none. A token with a role is always special, unless it is a single character,
        such as the "!" that an unset id of 0 makes the end of texts.
        """
        special = {token_id for token_id, kind in self._numbered_types() if kind in (UNKNOWN, CONTROL)}
        others = {self.token_id(role) for role in _ROLES} | {self.ids.get(text) for text in END_TEXTS}
        special |= {i for i in others if i is not None and self.types[i] == NORMAL and len(self.tokens[i]) > 1}
        return frozenset(special)

    @cached_property
    def user_defined_ids(self) -> frozenset[int]:
        """The ids of the other tokens that are matched literally in a text."""
        return frozenset(i for i, kind in self._numbered_types() if kind == USER_DEFINED) - self.special_ids

    @property
    def has_bytes(self) -> bool:
        return BYTE in self.types or "<0x00>" in self.ids

    @property
    def merges(self) -> list[tuple[str, str]]:
        """The pairs of tokens to merge, in order of priority. Raises BadFile if there are none."""
        merges = []
        for merge in self._list("merges", str):
            if not merge.startswith(" "):
                left, space, right = merge.partition(" ")
            else:
                left = " "
                space = " "
                right = merge[2:]
            if not space or not right:
                raise BadFile(f"its merge {merge[:100]!r} is no pair")
            merges.append((left, right))
        if not merges:
            raise BadFile("its tokenizer has no merges")
        return merges

    @property
    def scores(self) -> list[float]:
        """The scores of the tokens. Raises BadFile if there are none."""
        scores = [float(score) for score in self._list("scores", int, float)]
        if len(scores) < len(self.tokens):
            raise BadFile(f"it has {len(self.tokens)} tokens, and scores of {len(scores)}")
        return scores

    @property
    def splits(self) -> str | None:
        """The name of the rule that splits a text before bytes are merged."""
        value = self.get("pre")
        if isinstance(value, str):
            return value
        return None

    def is_normal(self, token_id: int) -> bool:
        return self.types[token_id] not in (UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE)

    def _numbered_types(self) -> Iterator[tuple[int, int]]:
        return zip(range(len(self.tokens)), self.types, strict=False)

    def _list(self, name: str, *kinds: type) -> list[Any]:
        values = self.get(name, [])
        if not isinstance(values, list) or (values and not isinstance(values[0], kinds)):
            raise BadFile(f"its {_PREFIX}{name} is no list of {' or '.join(kind.__name__ for kind in kinds)}")
        return values
