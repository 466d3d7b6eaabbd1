"""Drafts: guesses at the next tokens of sequences, which the next step verifies at once. Engine thread only, no torch.

The model draws behind each guessed token as it would without a draft, from the same logits and with the same noise.
Draws are taken up to the first one other than the draft's, which is the right token there. So a draft changes no
answer, only the number of steps.

A guess is looked up in the sequence's own text, or made by a draft model. Its worth is the expected tokens, by the
share of right guesses in this sequence; its cost is the measured time of further tokens in a step and of the draft
model.
"""

from __future__ import annotations

from typing import NamedTuple

from oaiserve.engine.drafting.draft_model import MOST_BEHIND, DraftModel
from oaiserve.engine.drafting.lookup import COMMON_WEIGHT, FIRST_GUESS, Lookup, moved_share
from oaiserve.engine.drafting.step_times import MOST_STEP_TOKENS, StepTimes
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import ChunkResult, Step

MOST_DRAFT_TOKENS = 15  # of a sequence
PROBE_STEPS = 32  # in which no draft was worth its time, until one is verified all the same
PROBE_TOKENS = 3
LEAST_GAIN = 0.03  # of a step with drafts: measured times are not more exact than that
MOST_CREDIT_STEPS = 128  # of the draft model, in steps of the model; it has them at the start
CREDIT_SHARE = 1 / 128  # of the time of each step
MOST_AHEAD = 256  # tokens that an answer is expected to get at most, when the draft model would have to catch up


class _Option(NamedTuple):
    """A possible draft of a sequence, of `most` tokens or fewer."""

    sequence: Sequence
    share: float  # the probability that the next token of it comes true
    most: int
    guess: list[int] | None = None  # None: the draft model is to make it
    num_behind: int = 1  # tokens that the draft model computes before the first one is guessed


class _Plan(NamedTuple):
    """The lengths of drafts, for each of some options."""

    options: list[_Option]
    lengths: list[int]
    rate: float  # tokens of answers for each nanosecond


class Drafts:
    """Writes the drafts of sequences before each step, and learns from its results.

    With `only_if_exact`, there are none while a token's logits, and so an answer, may depend on the rest of its step.

    A draft model costs time before it saves any: it may be behind by a whole prompt, and must be tried again after bad
    guesses. This time is taken from a credit, which grows by the time saved by its drafts, and by a small share of all
    steps: a useless draft model costs no more than this share.
    """

    def __init__(self, *, only_if_exact: bool = False, model: DraftModel | None = None) -> None:
        self.only_if_exact = only_if_exact
        self.model = model
        self._times = StepTimes()
        self._acceptance = [*FIRST_GUESS]  # of look-ups for any sequence, by the size of the match
        self._drafted: list[Sequence] = []  # those that have a draft
        self._num_declined = 0  # steps in a row for which there was a guess, but none that was worth its time
        self._credit_steps = float(MOST_CREDIT_STEPS)

    def propose(self, running: list[Sequence], *, others_wait: bool) -> None:
        """Write the drafts for the next step, of these sequences, as long as it has few tokens.

        A step with prompts, or with others waiting for admission, has more.
        """
        for sequence in self._drafted:
            sequence.draft = []
        self._drafted = []
        if self.model is not None:
            self.model.begin_step(running)
        if others_wait or len(running) >= MOST_STEP_TOKENS:
            return
        num_tokens = sum(sequence.num_uncomputed for sequence in running)
        if not 0 < num_tokens < MOST_STEP_TOKENS:
            return
        room, num_sequences = MOST_STEP_TOKENS - num_tokens, len(running)
        able = [one for one in running if one.num_generated and not one.num_pending]
        found = [option for one in able if (option := self._look_up(one, room)) is not None]
        if not found and self.model is None:
            return
        plan = self._plan(num_tokens, num_sequences, found)
        near: list[_Option] = []
        if self.model is not None:
            asked = [option for one in able if (option := self._ask(self.model, one, room)) is not None]
            near = [option for option in asked if option.num_behind <= MOST_BEHIND]
            of_both = self._plan(num_tokens, num_sequences, _most_likely([*found, *near]))
            plan = max(plan, of_both, key=lambda plan: plan.rate)
            if late := [option for option in asked if option.num_behind > MOST_BEHIND]:
                nearest = min(late, key=lambda option: option.num_behind)
                self._catch_up(self.model, nearest, plan, num_tokens, num_sequences)
        if any(plan.lengths):
            self._num_declined = 0
        elif found or near:
            self._num_declined += 1
            if self._num_declined % PROBE_STEPS == 0:
                plan = self._probe(found, near) or plan
        for option, length in zip(plan.options, plan.lengths, strict=True):
            if length:
                self._write(option, length)

    def verified(self, step: Step, results: list[ChunkResult], step_ns: int, draft_ns: int = 0) -> None:
        """Learn from a computed step, before its commit. The draft model took `draft_ns` of the time before it."""
        self._times.observe(step.num_tokens, step_ns)
        num_drafted = num_accepted = 0  # of the draft model's tokens
        for chunk, result in zip(step.chunks, results, strict=True):
            if not chunk.draft:
                continue
            sequence, accepted = chunk.sequence, chunk.num_accepted(result.token_ids)
            if sequence.draft_is_models and self.model is not None:
                self.model.verified(sequence, len(chunk.draft), accepted)
                num_drafted += len(chunk.draft)
                num_accepted += accepted
            elif sequence.lookup is not None:
                size = sequence.lookup.size
                common = moved_share(self._acceptance[size], len(chunk.draft), accepted, weight=COMMON_WEIGHT)
                self._acceptance[size] = common
                sequence.lookup.verified(len(chunk.draft), accepted)
        if self.model is not None and step.num_tokens <= MOST_STEP_TOKENS:
            self._settle(step, num_drafted, num_accepted, draft_ns)

    def _settle(self, step: Step, num_drafted: int, num_accepted: int, draft_ns: int) -> None:
        """Take the draft model's cost of a step from its credit, and add its gain."""
        times_ns = self._times.expected_ns()
        without_ns = times_ns[step.num_tokens - num_drafted]
        spent_ns = draft_ns + times_ns[step.num_tokens] - without_ns
        gained_steps = num_accepted / len(step.chunks) - spent_ns / without_ns
        self._credit_steps = min(self._credit_steps + CREDIT_SHARE + gained_steps, MOST_CREDIT_STEPS)

    def _look_up(self, sequence: Sequence, room: int) -> _Option | None:
        most = min(room, MOST_DRAFT_TOKENS, sequence.max_len - sequence.num_tokens - 1)
        if most < 1:
            return None
        if sequence.lookup is None:
            sequence.lookup = Lookup(self._acceptance)
        guess, share = sequence.lookup.guess(sequence.token_ids, most)
        if guess and sequence.constraint is not None:
            guess = sequence.constraint.possible(guess)
        return _Option(sequence, share, len(guess), guess) if guess else None

    def _ask(self, model: DraftModel, sequence: Sequence, room: int) -> _Option | None:
        end = min(sequence.max_len - 1, model.max_len)
        most = min(room, MOST_DRAFT_TOKENS, end - sequence.num_tokens)
        if most < 1:
            return None
        return _Option(sequence, model.share(sequence), most, num_behind=model.num_behind(sequence))

    def _plan(self, num_tokens: int, num_sequences: int, options: list[_Option]) -> _Plan:
        """Return the lengths of these drafts with the most expected tokens of answers in a time.

        The most probable tokens are taken first. The draft model guesses the first tokens of all sequences at once,
        then the second ones, and so on.
        """
        gains = [
            (option.share**length, index)
            for index, option in enumerate(options)
            for length in range(1, option.most + 1)
        ]
        gains.sort(key=lambda gain: gain[0], reverse=True)
        times_ns = self._times.expected_ns()
        passes_ns = self.model.times.expected_ns() if self.model is not None else []
        passes, lengths = [0] * MOST_DRAFT_TOKENS, [0] * len(options)  # passes: their tokens
        expected, draft_ns = float(num_sequences), 0.0
        best, best_rate = 0, (1 + LEAST_GAIN) * expected / times_ns[num_tokens]
        for number, (chance, index) in enumerate(gains[: MOST_STEP_TOKENS - num_tokens], 1):
            option, length = options[index], lengths[index]
            if option.guess is None:
                before = passes[length]
                passes[length] = min(MOST_STEP_TOKENS, before + (option.num_behind if length == 0 else 1))
                draft_ns += passes_ns[passes[length]] - (passes_ns[before] if before else 0.0)
            lengths[index] += 1
            expected += chance
            rate = expected / (times_ns[num_tokens + number] + draft_ns)
            if rate > best_rate:
                best, best_rate = number, rate
        chosen = [index for _, index in gains[:best]]
        return _Plan(options, [chosen.count(index) for index in range(len(options))], best_rate)

    def _catch_up(self, model: DraftModel, option: _Option, plan: _Plan, num_tokens: int, num_sequences: int) -> None:
        """Let the draft model catch up, if that is expected to save time later, or if it has rested for long."""
        cost_ns = option.num_behind * model.catch_up_ns
        if cost_ns > self._credit_steps * self._times.expected_ns()[num_tokens]:
            return
        then = self._plan(num_tokens, num_sequences, _most_likely([*plan.options, option._replace(num_behind=1)]))
        num_ahead = min(option.sequence.max_len - option.sequence.num_tokens, MOST_AHEAD)
        if (1 / plan.rate - 1 / then.rate) * num_ahead > cost_ns or self._credit_steps >= MOST_CREDIT_STEPS:
            model.ask_to_catch_up(option.sequence)

    def _probe(self, found: list[_Option], near: list[_Option]) -> _Plan | None:
        """Return a plan to find out whether guesses have become better, of each kind in turn."""
        kinds = [found, near if self._credit_steps > 0 else []]
        best = [max(options, key=lambda option: option.share) for options in kinds if options]
        if not best:
            return None
        option = best[self._num_declined // PROBE_STEPS % len(best)]
        return _Plan([option], [min(option.most, PROBE_TOKENS)], 0.0)

    def _write(self, option: _Option, length: int) -> None:
        sequence = option.sequence
        sequence.draft_is_models = option.guess is None
        if option.guess is not None:
            sequence.draft = option.guess[:length]
        elif self.model is not None:
            self.model.ask(sequence, length)
        self._drafted.append(sequence)


def _most_likely(options: list[_Option]) -> list[_Option]:
    """Return the option of each sequence whose tokens come true most often."""
    best: dict[Sequence, _Option] = {}
    for option in options:
        if option.sequence not in best or option.share > best[option.sequence].share:
            best[option.sequence] = option
    return list(best.values())
