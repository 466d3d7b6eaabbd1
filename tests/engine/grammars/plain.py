"""Plain references for what a grammar does: matchers of a few answers, given by their token ids.

Beside these, a small tokenizer and the grammars for it.
"""

from typing import TypeVar

import numpy as np

from oaiserve.engine.grammars.constraint import Constraint
from oaiserve.engine.grammars.grammar import CompiledGrammar, Grammars, GrammarViolation, Matcher
from oaiserve.engine.grammars.thinking import Thinking
from oaiserve.engine.request import Grammar, GrammarKind, SamplingParams
from tests.engine.text.tokenizers_for_tests import byte_level

BACKEND = byte_level()  # Its first 256 ids are single bytes.
EOS = BACKEND.token_to_id("<|im_end|>")
VOCAB_SIZE = BACKEND.get_vocab_size() + 5  # a model may know more ids than its tokenizer
Pushed = TypeVar("Pushed", Matcher, Constraint)


def make_grammars(vocab_size: int = VOCAB_SIZE, eos: tuple[int, ...] = (EOS,)) -> Grammars:
    return Grammars(BACKEND, vocab_size=vocab_size, eos_token_ids=frozenset(eos))


GRAMMARS = make_grammars()


def compiled(kind: GrammarKind, text: str = "") -> CompiledGrammar:
    return GRAMMARS.compile(Grammar(kind, text))


def ids(text: str) -> list[int]:
    return list(BACKEND.encode(text, add_special_tokens=False).ids)


def pushed(matcher: Pushed, text: str) -> Pushed:
    for token_id in ids(text):
        matcher.push(token_id)
    return matcher


def is_refused(text: str, matcher: Matcher) -> bool:
    try:
        pushed(matcher, text)
    except GrammarViolation:
        return True
    return False


class OneOf:
    """The matcher of an answer that is one of `answers`, after which 0 ends the sequence."""

    def __init__(self, *answers: list[int]) -> None:
        self._answers = answers
        self._pushed: list[int] = []

    @property
    def is_complete(self) -> bool:
        return self._next() <= {0}

    def fill_mask(self, words: np.ndarray, ahead: list[int] | None = None) -> None:
        words[:] = 0
        for token_id in self._next(ahead):
            words[token_id // 32] |= np.uint32(1 << token_id % 32)

    def fill_masks_behind(self, token_ids: list[int], rows: np.ndarray) -> None:
        for number, words in enumerate(rows, 1):
            self.fill_mask(words, list(token_ids[:number]))

    def forced_ids(self) -> list[int]:
        forced: list[int] = []
        while len(left := self._next(forced)) == 1 and left != {0}:
            forced += left
        return forced

    def push(self, token_id: int) -> None:
        if token_id in self._next() - {0}:
            self._pushed.append(token_id)
        else:
            raise GrammarViolation(f"{token_id} after {self._pushed}")

    def _next(self, ahead: list[int] | None = None) -> set[int]:
        before = [*self._pushed, *(ahead or [])]
        longer = [answer for answer in self._answers if answer[: len(before)] == before]
        ids = {answer[len(before)] for answer in longer if len(answer) > len(before)}
        return ids | ({0} if before in longer else set())


def allowed_ids(mask: np.ndarray) -> list[int]:
    """Return the ids whose bits are set."""
    ids: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return ids


def mask_of(matcher: Matcher, vocab_size: int) -> np.ndarray:
    words = np.full(-(-vocab_size // 32), 0xAAAAAAAA, np.uint32)
    matcher.fill_mask(words)
    return words


def allowed(matcher: Matcher, vocab_size: int = VOCAB_SIZE) -> set[int]:
    return set(allowed_ids(mask_of(matcher, vocab_size)))


def constraint(matcher: OneOf | None, *, thinking: Thinking | None = None, **params: object) -> Constraint:
    """Return the constraint of a choice, whose end-of-sequence id is 0."""
    sampling = SamplingParams(**params)
    ends = frozenset() if sampling.ignore_eos else frozenset([0])
    stop_ids = ends | set(sampling.stop_token_ids)
    return Constraint(matcher, sampling, thinking=thinking, eos_token_ids=frozenset([0]), stop_ids=stop_ids)
