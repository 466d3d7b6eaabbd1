"""Drafts: proposals for the next tokens of sequences, which the next step verifies. Engine thread only, no torch.

After each drafted token, the model draws as it would without a draft, from the same logits and with the same noise.
Draws count up to the first one that differs from the draft, which is the correct token. So a draft changes no answer,
only the number of steps.

Where steps overlap, only a step with drafts waits for the results of the previous one. Whether it will have drafts is
known beforehand, because a match in the text so far also predicts the token that is still being computed.

A draft is looked up in the sequence's own text. Its value is the expected number of accepted tokens, judged by how
often drafts after such a match were accepted in this sequence; its cost is the measured time of further tokens in a
step. Both are averages of noisy measurements, so a step gets drafts only if they promise a clear gain.
"""

from __future__ import annotations

from typing import NamedTuple

from oaiserve.engine.drafting.step_times import MOST_STEP_TOKENS, StepTimes
from oaiserve.engine.sequences.lookup import FIRST_CHANCES, Lookup
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Step

MOST_DRAFT_TOKENS = 15  # limit for one sequence
LEAST_GAIN = 0.12  # relative gain in tokens per second; the estimates are no more exact than that
# Both kinds of steps must be measured now and then. So after this many steps in a row with drafts, a step has none, and
# after this many without drafts that might have paid off, a step has some.
PROBE_STEPS = 64
PROBE_TOKENS = 3


class _Option(NamedTuple):
    """A draft that a sequence may have, as a whole or its first tokens."""

    sequence: Sequence
    draft: list[int]
    chances: list[float]  # chance that the draft is right up to each of its tokens


class Drafts:
    """Proposes drafts for sequences before each step, and updates its estimates from the results.

    With `only_if_exact`, it proposes none while a token's logits, and so an answer, may depend on the other tokens of
    its step.
    """

    def __init__(self, *, only_if_exact: bool = False) -> None:
        self.only_if_exact = only_if_exact
        self._times = StepTimes()
        self._chances = [*FIRST_CHANCES]  # chances of drafts for any sequence, by the length of the match
        self._drafted: list[Sequence] = []  # sequences that have a draft
        self._num_alike = 0  # steps in a row with drafts, or without

    def need_results(self, running: list[Sequence], *, others_wait: bool) -> bool:
        """Return whether the next step has to wait for the results of the step under way.

        If that has drafts, the number of its tokens isn't known. Otherwise the next step waits if it will have drafts,
        provided that the step under way draws the first token of each.
        """
        if self._drafted:
            return True
        num_alike = self._num_alike
        if not self._choose(running, had_drafts=False, others_wait=others_wait):
            return False
        self._num_alike = num_alike  # `propose` counts this step once the tokens are known
        return True

    def propose(self, running: list[Sequence], *, others_wait: bool) -> None:
        """Write the drafts for the next step of these sequences, while no step is under way."""
        had_drafts = bool(self._drafted)
        for sequence in self._drafted:
            sequence.draft = []
        self._drafted = []
        for sequence, draft in self._choose(running, had_drafts=had_drafts, others_wait=others_wait):
            sequence.draft = draft
            self._drafted.append(sequence)

    def verified(self, step: Step, step_ns: int) -> None:
        """Learn from the time between the end of the previous step and the end of this one. Steps with prompts are left
        out, because their cost differs."""
        if len(step.chunks) > MOST_STEP_TOKENS:
            return  # The times of such steps are not needed, and it takes time to add up their tokens.
        if step.num_tokens - step.num_draft_tokens == len(step.chunks):
            self._times.observe(step.num_tokens, step_ns)

    def _choose(
        self, running: list[Sequence], *, had_drafts: bool, others_wait: bool
    ) -> list[tuple[Sequence, list[int]]]:
        """Return the drafts that are worthwhile in the next step, provided that it has few tokens.

        A step with prompts, or with others waiting for admission, has more. `had_drafts` says whether the last step had
        drafts.
        """
        if others_wait or len(running) >= MOST_STEP_TOKENS:
            return []
        num_tokens = sum(sequence.num_uncomputed for sequence in running)
        if not 0 < num_tokens < MOST_STEP_TOKENS:
            return []
        room = MOST_STEP_TOKENS - num_tokens
        num_sequences = len(running)
        able = [one for one in running if one.num_generated]
        options = [option for one in able if (option := self._look_up(one, room)) is not None]
        if not options or sum(sum(option.chances) for option in options) < LEAST_GAIN * num_sequences:
            return []
        lengths = self._lengths(num_tokens, num_sequences, options)
        has_drafts = any(lengths)
        self._num_alike = self._num_alike + 1 if has_drafts == had_drafts else 0
        most_alike = PROBE_STEPS
        if has_drafts:  # the fewer measurements without drafts, the sooner the next one
            most_alike = min(most_alike, self._times.num_measured(num_tokens))
        if self._num_alike >= most_alike:
            self._num_alike = 0
            if has_drafts:
                return []
            likeliest = max(options, key=lambda option: option.chances[0])
            lengths[options.index(likeliest)] = min(len(likeliest.draft), PROBE_TOKENS)
        return [(o.sequence, o.draft[:length]) for o, length in zip(options, lengths, strict=True) if length]

    def _look_up(self, sequence: Sequence, room: int) -> _Option | None:
        """Return the draft of a sequence. If its last token is still being computed, the draft starts after the
        predicted one."""
        most = min(room, MOST_DRAFT_TOKENS, sequence.max_len - sequence.num_tokens - 1)
        if most < 1:
            return None
        if sequence.lookup is None:
            sequence.lookup = Lookup(self._chances)
        num_pending = sequence.num_pending
        draft, chances = sequence.lookup.draft(sequence.token_ids, num_pending + most)
        if draft and sequence.constraint is not None:
            draft = sequence.constraint.possible(draft)
        if len(draft) > num_pending:
            return _Option(sequence, draft[num_pending:], chances[num_pending : len(draft)])
        return None

    def _lengths(self, num_tokens: int, num_sequences: int, options: list[_Option]) -> list[int]:
        """Return the lengths of these drafts that yield the most expected answer tokens per unit of time.

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
