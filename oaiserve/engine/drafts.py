"""Drafts: guesses at the next tokens of sequences, which the next step verifies at once. Engine thread only, no torch.

A step reads all weights of the model, whether it computes one token or a few. So the tokens that probably come next are
computed together with the last known one. The model draws behind each of them as it would without a draft, from the
same logits and with the same noise. Draws are taken up to the first one that is not the draft's, which is the right
token there. So a draft changes no answer: only the number of steps.

What decides about a draft is time. It is worth what it brings in tokens, by how often guesses in this sequence came
true, and costs what a step with more tokens takes longer, as measured.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from oaiserve.engine.lookup import Lookup
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import ChunkResult, Step

MOST_STEP_TOKENS = 32  # of a step with drafts, in all; larger steps compute, and hardly wait for the weights
MOST_DRAFT_TOKENS = 15  # of a sequence
PROBE_STEPS = 32  # in which no draft was worth its time, until one is verified all the same
PROBE_TOKENS = 3


class StepTimes:
    """Moving averages of the time that steps have taken lately, by their number of tokens."""

    WEIGHT = 0.2  # of the newest step
    MOST_GROWTH = 2  # by one step, which may be slow for other reasons
    MOST_AGE = 256  # in steps; a time that was measured before is forgotten, since sequences have grown or ended

    def __init__(self) -> None:
        self._ns = [0.0] * (MOST_STEP_TOKENS + 1)
        self._measured = [0] * (MOST_STEP_TOKENS + 1)  # in which step, the last time
        self._num_steps = 0

    def observe(self, num_tokens: int, step_ns: int) -> None:
        self._num_steps += 1
        if num_tokens > MOST_STEP_TOKENS:
            return
        before_ns = self._ns[num_tokens] if self._is_known(num_tokens) else step_ns
        self._ns[num_tokens] = before_ns + self.WEIGHT * (min(step_ns, self.MOST_GROWTH * before_ns) - before_ns)
        self._measured[num_tokens] = self._num_steps

    def expected_ns(self) -> list[float]:
        """Return the times of steps by their number of tokens, each at least those of smaller steps.

        Numbers that were not measured are given the least that they may take, so they are tried, and then measured: as
        much as the largest one that was, or below the smallest one, a share of that. Between two, there is a line.
        """
        known = [number for number in range(1, len(self._ns)) if self._is_known(number)]
        if not known:
            return [1.0] * len(self._ns)
        least_ns = [*accumulate((self._ns[number] for number in reversed(known)), min)][::-1]
        return np.interp(range(len(self._ns)), [0, *known], [0.0, *least_ns]).tolist()

    def _is_known(self, num_tokens: int) -> bool:
        measured = self._measured[num_tokens]
        return measured > 0 and self._num_steps - measured < self.MOST_AGE


class Drafts:
    """Writes the drafts of sequences before each step, and learns from the step how good they were.

    With `only_if_exact`, there are none while a token's logits may depend on what else is in its step: then the last
    bits of its logits, and so an answer, could depend on how long a draft was.
    """

    def __init__(self, *, only_if_exact: bool = False) -> None:
        self.only_if_exact = only_if_exact
        self._times = StepTimes()
        self._drafted: list[Sequence] = []  # those that have a draft
        self._num_declined = 0  # steps in a row for which there was a guess, but none that was worth its time

    def propose(self, running: list[Sequence], *, others_wait: bool) -> None:
        """Write the drafts for the next step, which is of these sequences, as long as it has few tokens.

        If others wait to be admitted, or prompts are computed, the step is not of that kind.
        """
        for sequence in self._drafted:
            sequence.draft = []
        self._drafted = []
        if others_wait or len(running) >= MOST_STEP_TOKENS:
            return
        num_tokens = sum(sequence.num_uncomputed for sequence in running)
        if not 0 < num_tokens < MOST_STEP_TOKENS:
            return
        guesses: list[tuple[Sequence, list[int]]] = []
        gains: list[tuple[float, int]] = []  # of each token: how probable it is that it comes true, and whose it is
        for sequence in running:
            guess, share = self._guess(sequence, MOST_STEP_TOKENS - num_tokens)
            if not guess:
                continue
            chance = 1.0
            for _ in guess:
                chance *= share
                gains.append((chance, len(guesses)))
            guesses.append((sequence, guess))
        if not gains:
            return
        gains.sort(key=lambda gain: gain[0], reverse=True)
        gains = gains[: MOST_STEP_TOKENS - num_tokens]
        chosen = gains[: self._most_worth(num_tokens, len(running), gains)]
        if chosen:
            self._num_declined = 0
        else:
            self._num_declined += 1
            if self._num_declined % PROBE_STEPS == 0:
                chosen = [gain for gain in gains if gain[1] == gains[0][1]][:PROBE_TOKENS]
        for _, index in chosen:
            sequence, guess = guesses[index]
            if not sequence.draft:
                self._drafted.append(sequence)
            sequence.draft.append(guess[len(sequence.draft)])

    def verified(self, step: Step, results: list[ChunkResult], step_ns: int) -> None:
        """Learn from a step that has been computed, before its tokens are committed."""
        self._times.observe(step.num_tokens, step_ns)
        for chunk, result in zip(step.chunks, results, strict=True):
            if chunk.draft and chunk.sequence.lookup is not None:
                chunk.sequence.lookup.verified(len(chunk.draft), chunk.num_accepted(result.token_ids))

    def _guess(self, sequence: Sequence, most: int) -> tuple[list[int], float]:
        most = min(most, MOST_DRAFT_TOKENS, sequence.max_len - sequence.num_tokens - 1)
        if most < 1 or sequence.num_pending or not sequence.num_generated:
            return [], 0.0
        if sequence.lookup is None:
            sequence.lookup = Lookup()
        guess, share = sequence.lookup.guess(sequence.token_ids, most)
        if guess and sequence.constraint is not None:
            guess = sequence.constraint.possible(guess)
        return guess, share

    def _most_worth(self, num_tokens: int, num_sequences: int, gains: list[tuple[float, int]]) -> int:
        """Return how many of these draft tokens, best first, make for the most tokens of answers in a time."""
        times_ns = self._times.expected_ns()
        expected: float = num_sequences
        best, best_rate = 0, expected / times_ns[num_tokens]
        for number, (chance, _) in enumerate(gains, 1):
            expected += chance
            rate = expected / times_ns[num_tokens + number]
            if rate > best_rate:
                best, best_rate = number, rate
        return best
