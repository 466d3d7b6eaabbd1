"""Drafts: proposals for the next tokens of sequences, which the next step verifies. Engine thread only, no torch.

The model draws behind each drafted token as it would without a draft, from the same logits and with the same noise.
Draws are taken up to the first one other than the draft's, which is the right token there. So a draft changes no
answer, only the number of steps.

A draft is looked up in the sequence's own text. Its worth is the expected number of tokens, by how often drafts after
such a match came true in this sequence; its cost is the measured time of further tokens in a step. Both are averages of
noisy measurements, so a step gets drafts only if they promise a clear gain.
"""

from __future__ import annotations

from typing import NamedTuple

from oaiserve.engine.drafting.step_times import MOST_STEP_TOKENS, StepTimes
from oaiserve.engine.sequences.lookup import FIRST_CHANCES, Lookup
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Step

MOST_DRAFT_TOKENS = 15  # limit for one sequence
LEAST_GAIN = 0.12  # in expected tokens per second: neither chances nor times are known more exactly
# Steps in a row that had drafts, or had none though they might have been worth their time. The next step is made the
# other way, so that the times of both stay known.
PROBE_STEPS = 64
PROBE_TOKENS = 3


class _Option(NamedTuple):
    """A draft that a sequence may have, as a whole or its first tokens."""

    sequence: Sequence
    draft: list[int]
    chances: list[float]  # chance that the draft is right up to each of its tokens


class Drafts:
    """Writes the drafts of sequences before each step, and learns from its results.

    With `only_if_exact`, there are none while a token's logits, and so an answer, may depend on the rest of its step.
    """

    def __init__(self, *, only_if_exact: bool = False) -> None:
        self.only_if_exact = only_if_exact
        self._times = StepTimes()
        self._chances = [*FIRST_CHANCES]  # chances of drafts for any sequence, by the length of the match
        self._drafted: list[Sequence] = []  # those that have a draft
        self._num_alike = 0  # steps in a row with drafts, or without

    def propose(self, running: list[Sequence], *, others_wait: bool) -> None:
        """Write the drafts for the next step, of these sequences, as long as it has few tokens.

        A step with prompts, or with others waiting for admission, has more.
        """
        had_drafts = bool(self._drafted)
        for sequence in self._drafted:
            sequence.draft = []
        self._drafted = []
        if others_wait or len(running) >= MOST_STEP_TOKENS:
            return
        num_tokens = sum(sequence.num_uncomputed for sequence in running)
        if not 0 < num_tokens < MOST_STEP_TOKENS:
            return
        room = MOST_STEP_TOKENS - num_tokens
        num_sequences = len(running)
        able = [one for one in running if one.num_generated and not one.num_pending]
        options = [option for one in able if (option := self._look_up(one, room)) is not None]
        if not options or sum(sum(option.chances) for option in options) < LEAST_GAIN * num_sequences:
            return
        lengths = self._lengths(num_tokens, num_sequences, options)
        has_drafts = any(lengths)
        self._num_alike = self._num_alike + 1 if has_drafts == had_drafts else 0
        most_alike = PROBE_STEPS
        if has_drafts:  # the less the time without drafts is known, the sooner it is measured again
            most_alike = min(most_alike, self._times.num_measured(num_tokens))
        if self._num_alike >= most_alike:
            self._num_alike = 0
            if has_drafts:
                return
            likeliest = max(options, key=lambda option: option.chances[0])
            lengths[options.index(likeliest)] = min(len(likeliest.draft), PROBE_TOKENS)
        for option, length in zip(options, lengths, strict=True):
            if length:
                option.sequence.draft = option.draft[:length]
                self._drafted.append(option.sequence)

    def verified(self, step: Step, step_ns: int) -> None:
        """Learn the time of a computed step, its host part included. Prompts cost otherwise than decodes do."""
        if step.num_tokens - step.num_draft_tokens == len(step.chunks):
            self._times.observe(step.num_tokens, step_ns)

    def _look_up(self, sequence: Sequence, room: int) -> _Option | None:
        most = min(room, MOST_DRAFT_TOKENS, sequence.max_len - sequence.num_tokens - 1)
        if most < 1:
            return None
        if sequence.lookup is None:
            sequence.lookup = Lookup(self._chances)
        draft, chances = sequence.lookup.draft(sequence.token_ids, most)
        if draft and sequence.constraint is not None:
            draft = sequence.constraint.possible(draft)
        if draft:
            return _Option(sequence, draft, chances[: len(draft)])
        return None

    def _lengths(self, num_tokens: int, num_sequences: int, options: list[_Option]) -> list[int]:
        """Return the lengths of these drafts with the most expected tokens of answers in a time.

        The most probable tokens are taken first.
        """
        gains = [(chance, index) for index, option in enumerate(options) for chance in option.chances]
        gains.sort(reverse=True)
        times = self._times.expected()
        expected = float(num_sequences)
        best = 0
        best_rate = (1 + LEAST_GAIN) * expected / times[num_tokens]
        for number, (chance, _) in enumerate(gains[: MOST_STEP_TOKENS - num_tokens], 1):
            expected += chance
            rate = expected / times[num_tokens + number]
            if rate > best_rate:
                best = number
                best_rate = rate
        lengths = [0] * len(options)
        for _, index in gains[:best]:
            lengths[index] += 1
        return lengths
