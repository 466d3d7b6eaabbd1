"""Drafts: guesses at the next tokens of sequences, which the next step verifies at once. Engine thread only, no torch.

The model draws behind each guessed token as it would without a draft, from the same logits and with the same noise.
Draws are taken up to the first one other than the draft's, which is the right token there. So a draft changes no
answer, only the number of steps.

A guess is looked up in the sequence's own text. Its worth is the expected tokens, by the share of right guesses in this
sequence; its cost is the measured time of further tokens in a step.
"""

from __future__ import annotations

from typing import NamedTuple

from oaiserve.engine.drafting.lookup import COMMON_WEIGHT, FIRST_GUESS, Lookup, moved_share
from oaiserve.engine.drafting.step_times import MOST_STEP_TOKENS, StepTimes
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import ChunkResult, Step

MOST_DRAFT_TOKENS = 15  # of a sequence
PROBE_STEPS = 32  # in which no draft was worth its time, until one is verified all the same
PROBE_TOKENS = 3
LEAST_GAIN = 0.03  # of a step with drafts: measured times are not more exact than that


class _Option(NamedTuple):
    """A possible draft of a sequence, of the tokens of `guess` or fewer."""

    sequence: Sequence
    share: float  # the probability that the next token of it comes true
    guess: list[int]


class Drafts:
    """Writes the drafts of sequences before each step, and learns from its results.

    With `only_if_exact`, there are none while a token's logits, and so an answer, may depend on the rest of its step.
    """

    def __init__(self, *, only_if_exact: bool = False) -> None:
        self.only_if_exact = only_if_exact
        self._times = StepTimes()
        self._acceptance = [*FIRST_GUESS]  # of look-ups for any sequence, by the size of the match
        self._drafted: list[Sequence] = []  # those that have a draft
        self._num_declined = 0  # steps in a row for which there was a guess, but none that was worth its time

    def propose(self, running: list[Sequence], *, others_wait: bool) -> None:
        """Write the drafts for the next step, of these sequences, as long as it has few tokens.

        A step with prompts, or with others waiting for admission, has more.
        """
        for sequence in self._drafted:
            sequence.draft = []
        self._drafted = []
        if others_wait or len(running) >= MOST_STEP_TOKENS:
            return
        num_tokens = sum(sequence.num_uncomputed for sequence in running)
        if not 0 < num_tokens < MOST_STEP_TOKENS:
            return
        room, num_sequences = MOST_STEP_TOKENS - num_tokens, len(running)
        able = [one for one in running if one.num_generated and not one.num_pending]
        found = [option for one in able if (option := self._look_up(one, room)) is not None]
        if not found:
            return
        lengths = self._lengths(num_tokens, num_sequences, found)
        if any(lengths):
            self._num_declined = 0
        else:
            self._num_declined += 1
            if self._num_declined % PROBE_STEPS == 0:  # find out whether guesses have become better
                likeliest = max(found, key=lambda option: option.share)
                lengths[found.index(likeliest)] = min(len(likeliest.guess), PROBE_TOKENS)
        for option, length in zip(found, lengths, strict=True):
            if length:
                option.sequence.draft = option.guess[:length]
                self._drafted.append(option.sequence)

    def verified(self, step: Step, results: list[ChunkResult], step_ns: int) -> None:
        """Learn from a computed step, before its commit."""
        self._times.observe(step.num_tokens, step_ns)
        for chunk, result in zip(step.chunks, results, strict=True):
            lookup = chunk.sequence.lookup
            if chunk.draft and lookup is not None:
                accepted, size = chunk.num_accepted(result.token_ids), lookup.size
                common = moved_share(self._acceptance[size], len(chunk.draft), accepted, weight=COMMON_WEIGHT)
                self._acceptance[size] = common
                lookup.verified(len(chunk.draft), accepted)

    def _look_up(self, sequence: Sequence, room: int) -> _Option | None:
        most = min(room, MOST_DRAFT_TOKENS, sequence.max_len - sequence.num_tokens - 1)
        if most < 1:
            return None
        if sequence.lookup is None:
            sequence.lookup = Lookup(self._acceptance)
        guess, share = sequence.lookup.guess(sequence.token_ids, most)
        if guess and sequence.constraint is not None:
            guess = sequence.constraint.possible(guess)
        return _Option(sequence, share, guess) if guess else None

    def _lengths(self, num_tokens: int, num_sequences: int, options: list[_Option]) -> list[int]:
        """Return the lengths of these drafts with the most expected tokens of answers in a time.

        The most probable tokens are taken first.
        """
        gains = [
            (option.share**length, index)
            for index, option in enumerate(options)
            for length in range(1, len(option.guess) + 1)
        ]
        gains.sort(key=lambda gain: gain[0], reverse=True)
        times_ns = self._times.expected_ns()
        expected = float(num_sequences)
        best, best_rate = 0, (1 + LEAST_GAIN) * expected / times_ns[num_tokens]
        for number, (chance, _) in enumerate(gains[: MOST_STEP_TOKENS - num_tokens], 1):
            expected += chance
            rate = expected / times_ns[num_tokens + number]
            if rate > best_rate:
                best, best_rate = number, rate
        chosen = [index for _, index in gains[:best]]
        return [chosen.count(index) for index in range(len(options))]
