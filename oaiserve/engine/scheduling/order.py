"""The order of work: which sequence is next, may overtake others, makes room, skips a step, or is preempted first.

`Order` only answers; `Scheduler` acts on the answers. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from operator import attrgetter
from typing import NamedTuple

from oaiserve.engine.scheduling.lane import Lane
from oaiserve.engine.scheduling.limits import Limits
from oaiserve.engine.scheduling.pacing import UNIT, StepTime
from oaiserve.engine.scheduling.policy import Policy
from oaiserve.engine.sequences.clients import Client
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.facts.record import WaitReason

_key = attrgetter("key")
_client_and_key = attrgetter("client.service", "key")
_spare_and_key = attrgetter("turn.num_running", "key")
_last_turn = attrgetter("last_turn")
MOST_OVERTAKEN = 16  # maximum number of sequences that may pass one that doesn't fit
# A prompt is short compared with one that has at least SHORT_BESIDE times as many tokens left. When a short one
# arrives, the next SHORTER_STEPS steps with such long prompts are shorter, because others may follow it.
SHORT_BESIDE = 4
SHORTER_STEPS = 128
# The weight of a prompt token with log-probabilities in a step in which others decode: it goes through the model's last
# layer, and the whole vocabulary is searched for its best tokens. The number is chosen, not measured.
PROMPT_LOGPROBS_COST = 4


class Turns(NamedTuple):
    """Decodes that take turns: those in the step, in order, and those that sit it out."""

    decodes: list[Sequence]
    sitting_out: set[Sequence]


@dataclass(slots=True)
class PromptsOfStep:
    """The prompts of the step being filled, so far."""

    budget: int  # tokens left in the step
    under_way: list[Sequence]  # prompts in progress that aren't in the step yet, in reverse order
    num_prompts: int  # number of prompts in progress and of those that begin in the step
    of_several: bool  # whether prompts of several clients are in progress
    shortest: float = inf  # tokens of the shortest prompt that begins and ends in the step
    passed: list[Sequence] = field(default_factory=list)  # waiting sequences that didn't fit
    has_held: bool = False  # whether a client is held back until the end of the step


class Others(NamedTuple):
    """How much of a step other prompts could use."""

    num_tokens: int
    part: float  # maximum share of the step that it leaves to others


NOBODY = Others(0, 0.0)


class Order:
    """Decides the order of sequences by the policy. It changes no sequence."""

    def __init__(self, policy: Policy, limits: Limits, foreground: Lane, background: Lane) -> None:
        self.by_client = policy.by_client
        self.key_of = policy.key
        self.limits = limits
        self.foreground = foreground
        self.background = background

    # -- the prompts of a step ----------------------------------------------------------------------------------------

    def passes(self, head: Sequence | None, prompt: Sequence) -> bool:
        """Return whether the next waiting prompt goes before this one, which is in progress.

        It does if its client has received less service, or the same amount and has nothing running, or if it belongs to
        another request of the same client and is due earlier.
        """
        if head is None or not self.by_client:
            return False
        if head.client is not prompt.client:
            mine = head.client.service
            others = prompt.client.service
            return mine < others or (mine == others and not head.client.num_running)
        return head.turn.num_running == 0 and head.key < prompt.key

    # -- who is next --------------------------------------------------------------------------------------------------

    def prompts_under_way(self, lane: Lane) -> list[Sequence]:
        """Return the running prompts of a lane in the reverse of their order, so that `pop` returns the next one:
        by the client's service, lowest first, then by key."""
        prompts = (one for one in lane.running if one.num_uncomputed > 1 and not one.is_held)
        return sorted(prompts, key=_client_and_key, reverse=True)

    def prompts_of_step(self, lane: Lane, budget: int) -> PromptsOfStep:
        """Begin with the prompts of a step."""
        under_way = self.prompts_under_way(lane)
        of_several = False
        if self.by_client:
            wanting = chain(under_way, lane.waiting.heads())
            client = next((one.client for one in wanting), None)
            of_several = any(one.client is not client for one in wanting)
        return PromptsOfStep(budget, under_way, len(under_way), of_several)

    def sort_again(self, prompts: PromptsOfStep) -> None:
        """Sort the remaining prompts again if they belong to several clients, after one of them has received some of
        the step."""
        if prompts.of_several:
            prompts.under_way.sort(key=_client_and_key, reverse=True)

    def others_of(self, lane: Lane, prompts: PromptsOfStep, sequence: Sequence, head: Sequence | None) -> Others:
        """Return how many tokens of later prompts the step could use: prompts of other clients, and the same client's
        next prompt if it is shorter. `head` is the next waiting sequence. Counting stops once they fill the step."""
        if not self.by_client:
            return NOBODY
        number = 0
        has_own = False
        part = None
        mine = sequence.client
        for other in chain(reversed(prompts.under_way), self._waiting_heads(lane, head)):
            if other.client is not mine:
                number += other.num_uncomputed
                part = part or other.client.share / (mine.share + other.client.share)  # The first one is next.
            elif not has_own:
                has_own = True  # the client's next prompt
                number += other.num_uncomputed if other.num_uncomputed < sequence.num_uncomputed else 0
            if number >= prompts.budget:
                break
        return Others(number, part or 0.5)

    def _waiting_heads(self, lane: Lane, head: Sequence | None) -> Iterator[Sequence]:
        """Yield one next sequence per waiting client, `head` first."""
        if head is not None:
            yield head
            yield from (other for other in lane.waiting.heads() if other is not head)

    def is_held_back(self, lane: Lane, head: Sequence) -> bool:
        """Return whether the next sequence has to wait for the next step, because decodes fill this one and its request
        already has running sequences."""
        return bool(
            head.turn.num_running and lane.step_time is not None and self.by_client and lane.step_time.decodes_are_long
        )

    def has_room(self, lane: Lane, prompts: PromptsOfStep, sequence: Sequence) -> bool:
        """Return whether the step has time left for more of this prompt."""
        if lane.step_time is None:
            return True
        is_beside_short = self.is_beside_short(lane, prompts, sequence)
        return lane.step_time.has_room(sequence.num_uncomputed, sequence.num_computed, is_beside_short=is_beside_short)

    def is_beside_short(self, lane: Lane, prompts: PromptsOfStep, sequence: Sequence) -> bool:
        """Return whether a much shorter prompt than this one begins and ends in the step."""
        return self.favours_short(lane) and sequence.num_uncomputed >= SHORT_BESIDE * prompts.shortest

    def is_short(self, lane: Lane, num_tokens: int) -> bool:
        """Return whether a prompt with this many tokens to compute is short compared with one in progress."""
        return self.favours_short(lane) and any(one.num_uncomputed >= SHORT_BESIDE * num_tokens for one in lane.running)

    def shortens(self, lane: Lane, sequence: Sequence) -> bool:
        """Return whether the step should be shorter if this prompt is its first, because a much shorter one has arrived
        recently."""
        return lane.num_steps < lane.shorter_until and sequence.num_uncomputed >= SHORT_BESIDE * lane.short_tokens

    def favours_short(self, lane: Lane) -> bool:
        """Return whether long prompts in this lane make room for short ones."""
        return self.by_client and lane is self.foreground

    def obstacle(self, lane: Lane, head: Sequence | None, prompts: PromptsOfStep) -> WaitReason | None:
        """Return why no further waiting sequence may begin in this step, or None."""
        if head is None:  # The next waiting sequence will arrive during the step, or is held back.
            if prompts.has_held:
                return WaitReason.TOKEN_BUDGET
            return WaitReason.STEP_UNDER_WAY
        if self.is_full(lane, head):
            return WaitReason.BATCH_FULL
        if lane.step.preempted:
            return WaitReason.NO_BLOCKS
        most_prompts = self.limits.prefill_max_requests
        has_place = most_prompts is None or prompts.num_prompts < most_prompts
        if prompts.budget <= 0 or not has_place or not self.has_room(lane, prompts, head):
            return WaitReason.TOKEN_BUDGET
        return None

    def is_full(self, lane: Lane, head: Sequence | None) -> bool:
        """Return whether a lane has no slot for its next sequence, and no other sequence may be displaced."""
        return len(lane.running) >= lane.max_running and not self._may_take_place(lane, head)

    def _may_take_place(self, lane: Lane, head: Sequence | None) -> bool:
        """Return whether the next sequence may displace another one in a full batch.

        It may if its client has nothing running, or if its request has nothing running and another request of the
        client has several sequences running. At most one sequence per step is admitted in this way.
        """
        if head is None or lane.step.admitted or not self.by_client:
            return False
        client = head.client
        is_newcomer = lane.waiting.has_several_clients and client.num_running == 0
        return is_newcomer or (head.turn.num_running == 0 and client.num_spare > 0)

    def may_overtake(self, passed: list[Sequence]) -> bool:
        """Return whether another sequence may overtake those that don't fit: only if they are few, and none was
        overtaken too often."""
        if len(passed) > self.limits.lookahead:
            return False
        return not passed or passed[-1].num_overtaken < MOST_OVERTAKEN

    def num_tokens_in(
        self, lane: Lane, prompts: PromptsOfStep, sequence: Sequence, most: int, others: Others = NOBODY
    ) -> int:
        """Return how many tokens of a prompt, up to `most`, fit into the rest of a lane's step.

        A prompt that does not end in the step leaves room for the tokens that `others` could use, up to their share.
        """
        num_tokens = min(sequence.num_uncomputed, most)
        if lane.step_time is not None:
            is_beside_short = self.is_beside_short(lane, prompts, sequence)
            num_tokens = lane.step_time.fitting(sequence.num_computed, num_tokens, is_beside_short=is_beside_short)
        if not others.num_tokens or num_tokens == sequence.num_uncomputed:
            return num_tokens
        most = num_tokens - min(others.num_tokens, int(num_tokens * others.part))
        if lane.step_time is None:
            return most
        return max(most // UNIT * UNIT, min(num_tokens, UNIT))

    def cost_of_token(self, lane: Lane, sequence: Sequence) -> int:
        """Return the cost of a prompt token of this sequence, in tokens of the budget."""
        chunks = lane.step.chunks
        others_decode = bool(chunks) and chunks[0].num_tokens == 1
        if sequence.wants_prompt_logprobs and others_decode:
            return PROMPT_LOGPROBS_COST
        return 1

    # -- who sits out -------------------------------------------------------------------------------------------------

    def turns(self, lane: Lane) -> Turns:
        """Return the decodes of a lane that take turns in the step: some of them sit out."""
        if lane.beside is not None:
            return self._turns_beside(lane)
        if self.by_client and lane.waiting.has_several_clients and lane.step_time is not None:
            return self._turns_of_clients(lane, lane.step_time)
        return Turns([], set())

    def _turns_of_clients(self, lane: Lane, step_time: StepTime) -> Turns:
        """Let decodes of a client sit out if it has more than its share of rows, or if its masks take too long.

        Otherwise a client with a thousand sequences would slow down every other client's tokens to the speed of its
        own.
        """
        turns = Turns([], set())
        waiting = lane.waiting.next_client()
        by_client: dict[Client, list[Sequence]] = {} if waiting is None else {waiting: []}
        for sequence in lane.running:
            decodes = by_client.setdefault(sequence.client, [])
            if sequence.num_tokens - sequence.num_computed == 1:
                decodes.append(sequence)
        if len(by_client) < 2:
            return turns
        num_decodes = sum(map(len, by_client.values()))
        large = [decodes for decodes in by_client.values() if len(decodes) * len(by_client) > num_decodes]
        num_others = num_decodes - sum(map(len, large))
        most = (step_time.rows_beside(num_others) - num_others) // max(1, len(large))
        debts = lane.mask_debts if self._num_without_debt(lane, by_client) else {}
        for client, decodes in by_client.items():
            number = max(1, most) if decodes in large else len(decodes)
            if number >= len(decodes) and not any(one.constraint for one in decodes):
                continue
            masks_ns = 0
            most_masks_ns = step_time.masks_beside(num_decodes - len(decodes))
            for sequence in sorted(decodes, key=_last_turn):
                waits = sequence.constraint is not None and (client.name in debts or masks_ns > most_masks_ns)
                if number <= 0 or waits:
                    turns.sitting_out.add(sequence)
                    continue
                number -= 1
                turns.decodes.append(sequence)
                masks_ns += 0 if sequence.constraint is None else sequence.constraint.mask_ns
        turns.decodes.sort(key=_key)
        return turns

    def _num_without_debt(self, lane: Lane, by_client: Mapping[Client, list[Sequence]]) -> int:
        """Return the number of decodes that aren't delayed by their clients' debts for masks."""
        return sum(
            one.constraint is None or client.name not in lane.mask_debts
            for client, decodes in by_client.items()
            for one in decodes
        )

    def paid_for_masks(self, lane: Lane) -> float:
        """Return how many nanoseconds of masks the next step pays off: `inf` if no other client had to wait."""
        if lane.step_time is None or not (lane.beside is not None or lane.waiting.has_several_clients):
            return inf
        others = (one for one in lane.running if one.num_uncomputed == 1 and one.client.name not in lane.mask_debts)
        return lane.step_time.masks_beside(sum(1 for _ in others))

    def _turns_beside(self, lane: Lane) -> Turns:
        """Let decodes of background work sit out if they, or their masks, don't fit into the foreground's step."""
        assert lane.step_time is not None
        decodes = sorted((one for one in lane.running if one.num_uncomputed == 1), key=_last_turn)
        going = [one for one in decodes if one.constraint is None or not lane.mask_debts]
        number = min(lane.max_step_tokens, lane.step_time.decodes_beside(going))
        return Turns(going[:number], {*decodes}.difference(going[:number]))

    # -- who gives way ------------------------------------------------------------------------------------------------

    def gives_way(self, lane: Lane, sequence: Sequence) -> Sequence | None:
        """Return the running sequence that makes room for a waiting one, or None.

        It belongs to a client with more service and another sequence running. If the waiting sequence's client already
        has something running, it belongs to another request of that client with several sequences. So no client or
        request loses its last sequence. Without this, a client would have to wait until another client's answers end.
        """
        client = sequence.client
        if client.num_running:
            if sequence.turn.num_running or not client.num_spare:
                return None
            spare = (one for one in lane.running if one.client is client and one.turn.num_running > 1)
            return max(spare, key=_spare_and_key)
        ahead = [one for one in lane.running if one.client.num_running > 1 and one.client.service > client.service]
        if ahead:
            return self._last(ahead)
        return None

    def preempted_first(self, lane: Lane) -> Sequence:
        """Return the sequence to preempt first for a decode's block: a waiting one that owns blocks, or else the last
        running one."""
        return next(reversed(lane.forked), None) or self._last(lane.running)

    def needs_place(self, lane: Lane) -> bool:
        """Return whether the next sequence of a lane needs a slot that background work occupies."""
        num_later = len(self.background.running)
        return lane is self.foreground and num_later > 0 and len(lane.running) + num_later >= lane.max_running

    def preempted_in_background(self) -> Sequence | None:
        """Return the background sequence to preempt first for the foreground, or None."""
        lane = self.background
        if lane.running:
            return self._last(lane.running)
        return next(reversed(lane.forked), None)

    def _last(self, sequences: list[Sequence]) -> Sequence:
        """Return the last sequence: one whose client has received most service, and among these the one with the
        highest key."""
        return max(sequences, key=_client_and_key)
