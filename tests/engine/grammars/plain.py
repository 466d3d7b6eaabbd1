"""Plain references for what a grammar does: grammars of a few answers, given by their token ids, and a plain loop."""

from collections.abc import Callable

import numpy as np

from oaiserve.engine.grammars.constraint import Constraint
from oaiserve.engine.grammars.grammar import GrammarViolation, Matcher
from oaiserve.engine.grammars.thinking import Thinking
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.text.tokenizer import Tokenizer


class OneOf:
    """The matcher of an answer that is one of `answers`."""

    def __init__(self, *answers: list[int], eos: tuple[int, ...] = (0,)) -> None:
        self._answers = answers
        self._eos = eos
        self._pushed: list[int] = []

    @property
    def is_complete(self) -> bool:
        return self._next() <= set(self._eos)

    def fill_mask(self, words: np.ndarray, ahead: list[int] | None = None) -> None:
        words[:] = 0
        for token_id in self._next(ahead):
            words[token_id // 32] |= np.uint32(1 << token_id % 32)

    def fill_masks_behind(self, token_ids: list[int], rows: np.ndarray) -> None:
        for number, words in enumerate(rows, 1):
            self.fill_mask(words, list(token_ids[:number]))

    def forced_ids(self) -> list[int]:
        forced: list[int] = []
        while len(left := self._next(forced)) == 1 and not left & set(self._eos):
            forced += left
        return forced

    def push(self, token_id: int) -> None:
        if token_id in self._next() - set(self._eos):
            self._pushed.append(token_id)
        else:
            raise GrammarViolation(f"{token_id} after {self._pushed}")

    def _next(self, ahead: list[int] | None = None) -> set[int]:
        before = [*self._pushed, *(ahead or [])]
        longer = [answer for answer in self._answers if answer[: len(before)] == before]
        ids = {answer[len(before)] for answer in longer if len(answer) > len(before)}
        return ids | (set(self._eos) if before in longer else set())


def allowed_ids(mask: np.ndarray) -> list[int]:
    """Return the ids whose bits are set."""
    return [int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def mask_of(matcher: Matcher, vocab_size: int) -> np.ndarray:
    words = np.full(-(-vocab_size // 32), 0xAAAAAAAA, np.uint32)
    matcher.fill_mask(words)
    return words


def plain_answer(
    matcher: Matcher | None,
    prompt: list[int],
    params: SamplingParams,
    draw: Callable[[list[int], np.ndarray | None], int],
    *,
    eos: int,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
) -> tuple[list[int], str]:
    """Return the ids of an answer and why it ends, one token after the other: mask, draw, push.

    Texts of reasoning are single letters, and the tokens of answers begin with them or do not have them.
    """
    ids, reasoning = list(prompt), params.reasoning
    assert tokenizer is not None or reasoning is None
    thinks = reasoning is not None and not (matcher is not None and reasoning.opening)
    num_thought = 0
    while len(ids) < len(prompt) + params.max_tokens:
        is_begun = thinks and (not reasoning.opening or len(ids) > len(prompt))
        is_spent = is_begun and reasoning.budget is not None and num_thought >= reasoning.budget
        ends = [eos] if params.ignore_eos or len(ids) - len(prompt) < params.min_tokens else []
        mask = None
        if is_spent:
            mask = np.zeros(-(-vocab_size // 32), np.uint32)
            (closing,) = tokenizer.encode_plain(reasoning.closing)
            mask[closing // 32] = np.uint32(1 << closing % 32)
            ends = []
        elif matcher is not None:
            mask = mask_of(matcher, vocab_size)
            if thinks:
                matcher.fill_free(mask)
                ends = [eos]
        if mask is not None and set(allowed_ids(mask)) - set(ends):
            for end in ends:
                mask[end // 32] &= np.uint32(0xFFFFFFFF ^ (1 << end % 32))
        token_id = draw(ids, mask)
        ids.append(token_id)
        if token_id == eos and not (matcher is None and params.ignore_eos):
            return ids[len(prompt) :], "stop"
        if thinks:
            text = tokenizer.backend.decode([token_id])
            if not is_begun:
                thinks = text.startswith(reasoning.opening)
            else:
                num_thought += 1
                thinks = reasoning.closing not in text
                behind = text.partition(reasoning.closing)[2].strip()
                if not thinks and behind and matcher is not None:
                    raise AssertionError("a token goes on behind the end of the reasoning")
        elif matcher is not None:
            matcher.push(token_id)
        if not thinks and matcher is not None and matcher.is_complete:
            return ids[len(prompt) :], "stop"
    return ids[len(prompt) :], "length"


def constraint(matcher: OneOf | None, *, thinking: Thinking | None = None, **params: object) -> Constraint:
    """Return the constraint of a choice, whose end-of-sequence id is 0."""
    asked = SamplingParams(**params)
    ends = frozenset() if asked.ignore_eos else frozenset([0])
    stop_ids = ends | set(asked.stop_token_ids)
    return Constraint(matcher, asked, thinking=thinking, eos_token_ids=frozenset([0]), stop_ids=stop_ids)
