"""The scheduler chooses the sequences of the next step and their tokens. Engine thread only, no torch.

A sequence has a number of tokens and a number of computed tokens; steps spend their token budget until the second has
caught up with the first. After a prefix hit, a fork from another choice, or a preemption, it only starts higher.

Each step is scheduled, launched, advanced, and committed when its results are on the host. The next one may be
scheduled before that commit, and is settled after it (`Draw`). Where the step before can draw only one token for a
sequence, their number is known, and the sequence takes part; where it can draw several, it is held until the commit.

Background work has a scheduler of its own, for the same pool: see `Scheduler.background`.

A sequence that `is_whole` is computed in one step, alone if it is longer than the token budget. It needs no blocks, and
leaves with the launch. Where layers keep a state, it belongs to all computed tokens and cannot go back: there are no
drafts, and chunks of prompts end where a state is to be copied. None ends inside an image whose tokens see each other,
so a step may have more tokens than its budget, by less than one image. A commit may bring tokens without a draw,
because a grammar forces them: the next steps compute these like a prompt.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass
from operator import attrgetter

from oaiserve.engine.accounts.waits import QueueWaits
from oaiserve.engine.disk_tier import BlocksRead, DiskTier
from oaiserve.engine.scheduling.blocks import BlockHash, BlockPool, StatePool
from oaiserve.engine.scheduling.clients import Client
from oaiserve.engine.scheduling.pacing import StepTime
from oaiserve.engine.scheduling.policy import Policy, fcfs
from oaiserve.engine.scheduling.prefixes import Prefixes
from oaiserve.engine.scheduling.slack import PATIENCE_NS, Slack
from oaiserve.engine.scheduling.waiting import WaitingQueue
from oaiserve.engine.sequence import Place, Sequence
from oaiserve.engine.step import Chunk, Draw, Step
from oaiserve.facts.record import WaitReason

_key = attrgetter("key")
_client_and_key = attrgetter("client.service", "key")
_last_turn = attrgetter("last_turn")
MASKS_NS = 5_000_000  # of one client in a step beside others: a further mask waits for the next step
MOST_OVERTAKEN = 16  # how often a sequence that does not fit is overtaken
# A prompt is short beside one with so many times its tokens left. For so many steps behind its arrival, prompts get
# this share of their time in a step. On a Zen 4, 36 tokens beside 3,000 have their first token after 2.4 times as long
# as alone, with all of the time 5.4 times; the 3,000 take 1.11 times as long, with a share of 0.25 1.2 times.
SHORT_BESIDE, SHORTER_STEPS, SHORTER_SHARE = 8, 128, 0.3
# The weight of a prompt token with log-probabilities in a step in which others decode: the model's last
# layer is computed for it, and the whole vocabulary is searched for the best. The number is chosen, not measured.
PROMPT_LOGPROBS_COST = 4


@dataclass(frozen=True, slots=True)
class Limits:
    max_running: int
    max_step_tokens: int
    prefill_max_requests: int | None = None  # sequences that prefill in one step
    prefill_max_tokens: int | None = None  # tokens of a step for those that prefill
    lookahead: int = 8  # waiting sequences that are tried after one that does not fit

    def __post_init__(self) -> None:
        if self.max_step_tokens < self.max_running:
            # Every running sequence that decodes takes one token of the budget, every step.
            raise ValueError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_running ({self.max_running})"
            )


def _planned(sequence: Sequence, known_end: int) -> Draw:
    """Return the moment of the draw of a chunk with the last token of its sequence, in the new step."""
    if sequence.needs_ids and (sequence.constraint is not None or known_end > len(sequence.token_ids)):
        return Draw.LATE
    return Draw.AT_LAUNCH


class Scheduler:
    """Chooses the chunks of steps. Each sequence is in one place: waiting, parked, running or nowhere.

    A running sequence owns blocks for all its tokens but the next to decode; and if it had a draft, for that.
    A waiting one owns blocks only if it shares them with another choice of its prompt (`_forked`). If there are states,
    whoever owns blocks owns one of them.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        *,
        policy: Policy = fcfs,
        prefix_cache: bool = True,
        states: StatePool | None = None,
        disk: DiskTier | None = None,
        background: Scheduler | None = None,
    ) -> None:
        """Begin without sequences. `background` has the same pool and limits, and schedules those that can wait.

        The foreground is scheduled as if there were none: it takes places and blocks from it. Then background work gets
        the rest of the step: all, if nobody else has work; else what lengthens it by few per cent at the learnt cost,
        and nothing while that is not known. None of it begins while others wait.
        """
        if states is not None and states.num_states < limits.max_running:
            raise ValueError(f"{states.num_states} states are too few for {limits.max_running} running sequences")
        self.pool = pool
        self.states = states
        self.limits = limits
        self._key_of = policy.key
        self._by_client = policy.by_client
        self._by_key = policy.passes
        self._now_ns = 0
        self.disk = disk
        self.background = background
        self._own_step = Step()  # of the background: its part of the step that is being scheduled
        self._beside: Step | None = None  # the foreground's part of it, where that has work
        self._prefixes = Prefixes(pool, states, disk) if prefix_cache else None
        self._num_arrived = 0
        self._num_shorter_steps = 0
        self._num_turns = 0  # of decodes, in steps that leave some out
        self._waiting = WaitingQueue(by_client=policy.by_client)
        self.running: list[Sequence] = []  # by key
        # By the reason: a block under way, or a sequence that computes their prompt.
        self._parked: dict[Hashable, list[Sequence]] = {}
        self.num_parked = 0
        self._by_adapter: dict[int, tuple[int, int]] = {}
        self._forked: dict[Sequence, None] = {}  # waiting sequences that own blocks
        self._state_copies: list[tuple[int, int]] = []  # states to copy before the next step (from, to)
        self.waits = QueueWaits()
        self.step_time: StepTime | None = None  # set by the engine loop: the time of steps, where it is to be expected
        self.slack: Slack | None = None  # set by the open requests: what answers of late took
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # prompt tokens that were looked up in the prefix cache
        self.num_prefix_hits = 0  # prompt tokens that were found there
        # The engine loop sets the limit of a step, at least 1 and lower while the device is short of memory.
        self.max_step_tokens = limits.max_step_tokens
        self.max_running = limits.max_running  # of the background, what the foreground leaves
        if background is not None:
            background._by_adapter, background._state_copies = self._by_adapter, self._state_copies

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._waiting or (self.background is not None and self.background.has_work))

    @property
    def foremost(self) -> Scheduler:
        """Return the background if nobody else has work, else this."""
        return self if self.background is None or self.running or self._waiting else self.background

    def of(self, sequence: Sequence) -> Scheduler:
        """Return the scheduler of a sequence: this or the background."""
        return self.background if sequence.is_background and self.background is not None else self

    @property
    def has_prefix_cache(self) -> bool:
        return self._prefixes is not None

    @property
    def num_shorter_steps(self) -> int:
        """Return in how many next steps prompts get a part of their time only. Any thread may ask."""
        return self._num_shorter_steps if self._by_client else 0

    def client_of(self, name: str) -> str:
        """Return the client with whose sequences others take turns: all are of one, if the policy has no turns."""
        return name if self._by_client else ""

    def due_of(self, client: str, num_tokens: int, turn_ns: int) -> float:
        """Return about when a prompt with so many tokens and this turn would be due if it came now, as in
        `Sequence.key`. Any thread may ask."""
        if self._by_key:
            return turn_ns
        return self._waiting.due_of(client, num_tokens) if self._by_client else self._num_arrived

    def service_of(self, client: str) -> int:
        """Return the counter of a client. Any thread may ask."""
        return self._waiting.service_of(client)

    def by_adapter(self) -> dict[int, tuple[int, int]]:
        """Return the numbers of running sequences, and of waiting or parked ones, by adapter."""
        return self._by_adapter.copy()

    def add(self, sequence: Sequence, leader: Sequence | None = None, *, since_ns: int = 0) -> None:
        """Add a sequence, ready since `since_ns`.

        A `leader` has the same prompt and was added before: it computes the prompt for both. Raises ValueError if the
        sequence can never fit in the KV cache.
        """
        if (own := self.of(sequence)) is not self:
            return own.add(sequence, leader, since_ns=since_ns)
        num_blocks = self._blocks_for(sequence, sequence.max_len)
        if num_blocks + 1 > self.pool.num_blocks and leader is not None:
            leader = None  # there is no room for a copy of the block in which the two part
        if num_blocks > self.pool.num_blocks:
            raise ValueError(f"a sequence of {sequence.max_len} tokens can never fit in the KV cache")
        sequence.key = self._key_of(sequence, self._num_arrived)
        self._num_arrived += 1
        num_cached = (
            len(self._look_up(sequence)[0]) * self.pool.block_size if leader is None else sequence.num_tokens - 1
        )
        num_new = sequence.num_tokens - num_cached
        self._waiting.arrive(sequence, num_new)
        if any(one.num_uncomputed >= SHORT_BESIDE * num_new for one in self.running):
            self._num_shorter_steps = SHORTER_STEPS
        self._count(sequence, waiting=1)
        if leader is not None and leader.place is not Place.NOWHERE and leader.num_computed < self._fork_end(leader):
            leader.siblings.append(sequence)
            self._park(sequence, leader, since_ns)
        else:
            self.waits.arrive(sequence, since_ns)
            self._wait(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished, failed or aborted sequence. This does nothing if it has been removed."""
        if (own := self.of(sequence)) is not self:
            return own.remove(sequence)
        place, sequence.place = sequence.place, Place.NOWHERE
        if place is Place.RUNNING:
            self._leave_running(sequence)
        elif place is Place.WAITING:
            self._waiting.discard(sequence)
            self._count(sequence, waiting=-1)
        elif place is Place.PARKED:
            self.num_parked -= 1
            self._count(sequence, waiting=-1)
        self._forked.pop(sequence, None)
        self._release(sequence)
        self._unpark(sequence)
        if sequence.num_due:
            self._waiting.served(sequence, sequence.num_due)

    def schedule(self, now_ns: int = 0) -> Step | None:
        """Return the next step, or None if there is nothing to compute. The time is for the account of waits."""
        self.pool.at(now_ns)
        step, later = Step(), self.background
        if later is not None:
            later._own_step = Step()
        self._fill(step, now_ns)
        if later is not None and later.has_work:
            self._add_background(later, step, now_ns)
        if not step.chunks:
            return None
        step.state_copies = self._state_copies.copy()
        return step

    def _fill(self, step: Step, now_ns: int) -> None:
        """Add own decodes and prompts to an empty step."""
        self.waits.begin_step(now_ns)
        self._now_ns = now_ns
        if self.step_time is not None and self._beside is not None:
            self.step_time.begin(step, self._beside)  # bounds decodes, too
        num_decodes = self._continue_decodes(step)
        budget = max(0, self.max_step_tokens - num_decodes)
        if self.limits.prefill_max_tokens is not None:
            budget = min(budget, self.limits.prefill_max_tokens)
        if self.step_time is not None and self._beside is None:
            self.step_time.begin(step, paces_ns=self._paces_ns(step))
        self._compute_prompts(step, budget)
        self._num_shorter_steps -= self._num_shorter_steps > 0
        self._waiting.charge_draws(step)

    def _paces_ns(self, decodes: Step) -> list[float]:
        """Return the times of a step by which decodes keep their deadlines, where the policy is to keep these."""
        has_prompts = bool(self._waiting) or len(decodes.chunks) < len(self.running)
        if self.slack is None or not self._by_key or not has_prompts:
            return []
        return self.slack.paces_ns((chunk.sequence for chunk in decodes.chunks), self._now_ns)

    def _add_background(self, later: Scheduler, step: Step, now_ns: int) -> None:
        """Add background work to a step that has all of the foreground."""
        others_work, more = self.foremost is self, later._own_step
        later.max_running = len(later.running) if self._waiting else self.limits.max_running - len(self.running)
        later.max_step_tokens = max(0, self.max_step_tokens - step.num_tokens)
        later._beside = step if others_work else None
        if not others_work or (step.chunks and later.step_time is not None and later.step_time.is_known):
            later._fill(more, now_ns)
        else:
            later.waits.begin_step(now_ns)
        if others_work:
            later.waits.reason = WaitReason.FOREGROUND
        step.chunks = sorted(step.chunks + more.chunks, key=lambda chunk: chunk.num_tokens > 1)
        step.copies += more.copies
        step.admitted += more.admitted
        step.preempted += more.preempted

    def _take_from_background(self) -> bool:
        """Have the last sequence of background work give up its place and its blocks. Return False if there is none."""
        later = self.background
        if later is None or not (later.running or later._forked):
            return False
        victim = later._last_in_turn(later.running) if later.running else next(reversed(later._forked))
        later._preempt(victim, later._own_step)
        return True

    def _allocate(self, num_blocks: int, shared: list[int]) -> list[int] | None:
        while (blocks := self.pool.allocate(num_blocks, shared)) is None and self._take_from_background():
            pass
        return blocks

    def _has_free(self, num_blocks: int) -> bool:
        """Return whether so many blocks are free, or belonged to background work."""
        while self.pool.num_blocks - self.pool.num_used < num_blocks:
            if not self._take_from_background():
                return False
        return True

    def take_read(self, read: BlocksRead) -> None:
        """Put blocks that were read from disk into the prefix cache. Whoever waited for the last one looks again."""
        assert self.disk is not None
        if (awaited := self.disk.take(read)) is not None:
            self._unpark(awaited)

    def lose_states(self) -> list[Sequence]:
        """Forget all cached states and pending copies, because a failed step may have changed states.

        Return the sequences with one: they cannot go on.
        """
        assert self.states is not None
        self.states.forget_kept()
        self._state_copies.clear()
        return self._owners()

    def advance(self, step: Step) -> None:
        """Count the tokens of a launched step as computed, and reserve places for its draws.

        Steps run one after the other, so a later step finds this one's content in its blocks. A sequence
        with its last draw by length leaves at once. The token is committed as all others are.
        """
        size = self.pool.block_size
        self._state_copies.clear()
        for chunk in step.chunks:
            sequence, start, num_tokens, max_draws, draft, _ = chunk
            sequence.num_computed = end = start + num_tokens - len(draft)
            if end % size < end - start and end <= len(sequence.token_ids):  # it has filled a block
                self.of(sequence)._publish(sequence, start, end)
            if end in sequence.state_ends:
                self._keep_state(sequence, end)
            if sequence.siblings and end >= self._fork_end(sequence):
                self.of(sequence)._fork(sequence)
            if max_draws:
                if end < sequence.max_len:
                    sequence.num_tokens = end + max_draws
                if end + 1 >= sequence.max_len and max_draws == 1:
                    self.remove(sequence)

    def settle(self, step: Step) -> None:
        """Decide which draws of a launched step count, after the commit of the step before: see `Draw`."""
        chunks = step.chunks
        for index, (sequence, start, num_tokens, max_draws, draft, _) in enumerate(chunks):
            num_missing = start + num_tokens - len(draft) - len(sequence.token_ids)
            if max_draws and num_missing:
                chunks[index] = chunks[index]._replace(draw=Draw.VOID if num_missing > 0 else Draw.SUPERSEDED)

    def commit(self, chunk: Chunk, token_ids: list[int]) -> bool:
        """Append the drawn tokens of a chunk to its sequence: at most its `max_draws`, none for `max_tokens=0`.

        Behind at least one of these may be any number of forced ones. A superseded chunk brings no tokens, and a void
        one is not committed. Where the tokens are those of the chunk's draft, they have been computed already.
        Chunks of a sequence are committed in their order, and none after the sequence was removed. If other than the
        reserved number of tokens came, the sequence goes on from those that are known.
        Return True if it had left for its length and turns out to be shorter: then it waits again, like a preempted
        sequence.
        """
        sequence, start, num_tokens, max_draws, draft, draw = chunk
        if sequence.is_background and (own := self.of(sequence)) is not self:
            return own.commit(chunk, token_ids)
        known, end = sequence.token_ids, chunk.known_end
        known += token_ids
        # A token whose id was not known when the step was launched may have filled a block. A sequence that was
        # preempted since has lost it.
        if num_tokens == 1 and end % self.pool.block_size == 0 and sequence.place is Place.RUNNING:
            self._publish(sequence, start, end)
        if draw is Draw.SUPERSEDED:
            return False
        if draft and sequence.place is Place.RUNNING:
            # The last known token is computed again, also where it was in the draft: its logits draw the next one.
            sequence.num_computed = min(end + chunk.num_accepted(token_ids), len(known) - 1)
            self._publish(sequence, end, sequence.num_computed)
        if len(token_ids) > 1:
            self._waiting.charge_further(sequence, len(token_ids) - 1)
        if len(token_ids) == max_draws:
            if max_draws > 1 and len(known) >= sequence.max_len:
                self.remove(sequence)
            return False
        sequence.num_tokens = len(known)
        # If the last known token was computed already, it is computed again: its logits draw the next one.
        sequence.num_computed = min(sequence.num_computed, len(known) - 1)
        if sequence.place is not Place.NOWHERE or len(known) >= sequence.max_len:
            return False
        self._wait_again(sequence)
        return True

    # -- the parts of a step ------------------------------------------------------------------------------------------

    def _continue_decodes(self, step: Step) -> int:
        """Add the decoding sequences, and return their number of tokens in the step, with those of drafts."""
        chunks, size, is_writable = step.chunks, self.pool.block_size, self.pool.is_writable
        drafting: list[Sequence] = []
        left_out: set[Sequence] = set()
        if self._beside is not None:
            left_out = self._left_out_beside()
        elif self._by_client and self._waiting.has_several_clients:
            left_out = self._left_out()
        for sequence in self.running.copy():  # the one loop of every step whose cost grows with the running sequences
            start, blocks = sequence.num_computed, sequence.blocks
            if sequence.num_tokens - start != 1 or sequence.place is not Place.RUNNING:
                self._make_room_for_several(sequence, step)
                continue
            if sequence in left_out:
                continue
            index = start // size
            if (index < len(blocks) and is_writable(blocks[index])) or self._make_room(sequence, index, step):
                if sequence.draft:
                    drafting.append(sequence)
                elif sequence.needs_ids:
                    chunks.append(Chunk(sequence, start, 1, 1, (), _planned(sequence, start + 1)))
                else:
                    chunks.append(Chunk(sequence, start, 1))
        # Drafts get the rest when all others have their tokens and blocks. A sequence may have been preempted.
        drafting = [sequence for sequence in drafting if sequence.place is Place.RUNNING]
        num_tokens = len(chunks) + len(drafting)
        for sequence in drafting:
            draft = self._fitting_draft(sequence, self.max_step_tokens - num_tokens)
            start = sequence.num_computed
            draw = _planned(sequence, start + 1)
            chunk = Chunk(sequence, start, 1 + len(draft), 1 + len(draft), draft, draw)
            chunks.insert(len(chunks) if draft else 0, chunk)
            num_tokens += len(draft)
        return num_tokens

    def _left_out(self) -> set[Sequence]:
        """Return decodes that this step leaves out, in turns: of clients with more than their share of rows, or whose
        masks take too long.

        Otherwise a thousand sequences of one client would make each token of another one take as long as theirs.
        """
        waiting = self._waiting.next_client()
        by_client: dict[Client, list[Sequence]] = {} if waiting is None else {waiting: []}
        for sequence in self.running:
            decodes = by_client.setdefault(sequence.client, [])
            if sequence.num_tokens - sequence.num_computed == 1:
                decodes.append(sequence)
        left_out: set[Sequence] = set()
        num_decodes = sum(map(len, by_client.values()))
        if self.step_time is None or len(by_client) < 2:
            return left_out
        large = [decodes for decodes in by_client.values() if len(decodes) * len(by_client) > num_decodes]
        num_others = num_decodes - sum(map(len, large))
        most = (self.step_time.rows_beside(num_others) - num_others) // max(1, len(large))
        self._num_turns += 1
        for decodes in by_client.values():
            number = max(1, most) if decodes in large else len(decodes)
            if number >= len(decodes) and not any(one.constraint for one in decodes):
                continue
            masks_ns = 0
            for sequence in sorted(decodes, key=_last_turn):
                if number <= 0 or (sequence.constraint is not None and masks_ns > MASKS_NS):
                    left_out.add(sequence)
                    continue
                number -= 1
                sequence.last_turn = self._num_turns
                masks_ns += 0 if sequence.constraint is None else sequence.constraint.mask_ns
        return left_out

    def _left_out_beside(self) -> set[Sequence]:
        """Return decodes of background work for which the step of others has no room. They take turns."""
        assert self.step_time is not None
        decodes = sorted((one for one in self.running if one.num_uncomputed == 1), key=_last_turn)
        number = min(self.max_step_tokens, self.step_time.decodes_beside(decodes))
        for one in decodes[:number]:
            self._num_turns += 1
            one.last_turn = self._num_turns
        return {*decodes[number:]}

    def _fitting_draft(self, sequence: Sequence, most_tokens: int) -> tuple[int, ...]:
        """Cut a sequence's draft to fit. It takes only blocks that no running sequence needs for its next token."""
        if sequence.num_pending:
            return ()  # the token before the draft is not known
        end, blocks, pool = sequence.num_tokens, sequence.blocks, self.pool
        length = max(0, min(len(sequence.draft), most_tokens, sequence.max_len - end - 1))
        while pool.blocks_for(end + length) > len(blocks):
            if not self._has_free(len(self.running) + 1) or (new := pool.allocate(1)) is None:
                length = len(blocks) * pool.block_size - end
                break
            blocks += new
        return tuple(sequence.draft[: max(0, length)])

    def _make_room_for_several(self, sequence: Sequence, step: Step) -> None:
        """Give a sequence with several draws in one step the blocks to compute them.

        `_compute_prompts` gives it the tokens. The blocks are allocated before that because a sequence can only be
        preempted while it has no chunk in the step. A prompt got its blocks when it was admitted.
        """
        if sequence.place is not Place.RUNNING or sequence.is_held:
            return
        blocks, first = sequence.blocks, sequence.num_computed // self.pool.block_size
        is_shared = first < len(blocks) and not self.pool.is_writable(blocks[first])
        new = range(len(blocks), self.pool.blocks_for(sequence.num_tokens))
        for index in (first, *new) if is_shared else new:
            if not self._make_room(sequence, index, step):
                return

    def _make_room(self, sequence: Sequence, index: int, step: Step) -> bool:
        """Give a sequence a block of its own, by preemption if need be. Return False if it was preempted itself."""
        is_new = index == len(sequence.blocks)
        while (block := self._allocate(1, [])) is None:
            victim = next(reversed(self._forked), None) or self._last_in_turn(self.running)
            self._preempt(victim, step)
            if victim is sequence:
                return False
            if not is_new and self.pool.is_writable(sequence.blocks[index]):
                return True  # the sequence that shared it was preempted
        if is_new:
            sequence.blocks += block
        else:
            self._copy_on_write(sequence, index, block[0], step)
        return True

    def _last_in_turn(self, sequences: list[Sequence]) -> Sequence:
        """Return the sequence to preempt first: the last one by key of the client with most service."""
        return max(sequences, key=_client_and_key) if self._waiting.has_several_clients else sequences[-1]

    def _copy_on_write(self, sequence: Sequence, index: int, new_block: int, step: Step) -> None:
        shared, sequence.blocks[index] = sequence.blocks[index], new_block
        step.copies.append((shared, new_block))
        sequence.held_ns += self.pool.release([shared])

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        """Take the blocks of a sequence, and let it wait. Published blocks keep their content until they are needed."""
        if sequence.place is Place.RUNNING:
            self._leave_running(sequence)
            self._wait_again(sequence)
            step.preempted.append(sequence)
            if self._by_client:  # or else it is the last, and has none
                step.chunks[:] = [chunk for chunk in step.chunks if chunk.sequence is not sequence]
        self._forked.pop(sequence, None)
        self._release(sequence)
        sequence.num_computed = 0

    def _compute_prompts(self, step: Step, budget: int) -> None:
        """Add chunks of prompts under way, and of those that wait, in the order of the policy.

        Prompts under way come first, but for those that a waiting one of the same client passes. A bounded number of
        waiting sequences overtakes one without enough room.
        """
        # A client whose turn it is does not have to wait for a long prompt of another one to be computed.
        is_shared = self._newcomer_is_next(step) or self._is_behind_prompts()
        share = (budget + 1) // 2 if is_shared else budget
        prefills = [one for one in self.running if one.num_uncomputed > 1 and not one.is_held]
        prefills.sort(key=_client_and_key if self._waiting.has_several_clients else _key, reverse=True)
        num_prefills, is_held = 0, False
        most_prefills = self.limits.prefill_max_requests or self.limits.max_running
        passed: list[Sequence] = []
        while True:
            head = self._waiting.head()
            is_full = len(self.running) >= self.max_running and not self._may_make_way(head, step)
            while prefills and min(share, budget) > 0 and not self._passes(head, prefills[-1]):
                sequence = prefills.pop()
                if sequence.place is Place.RUNNING and self._has_room(sequence):  # it was not preempted for another
                    num_prefills += 1
                    spent = self._add_chunk(
                        sequence, step, min(share, budget), prefills[-1] if prefills else None if is_full else head
                    )
                    share -= spent
                    budget -= spent
            if head is not None and self._by_key and (head.latest_start_ns or self._now_ns) < self._now_ns:
                self._put_further_back(head)
                continue
            if head is None:  # whoever waits next arrives during the step, or is held
                reason = WaitReason.TOKEN_BUDGET if is_held else WaitReason.STEP_UNDER_WAY
                break
            if is_full:
                reason = WaitReason.BATCH_FULL
                break
            if step.preempted:
                reason = WaitReason.NO_BLOCKS
                break
            if budget <= 0 or num_prefills >= most_prefills or not self._has_room(head):
                reason = WaitReason.TOKEN_BUDGET
                break
            if (
                head.turn.num_running
                and self.step_time is not None
                and self._by_client
                and self.step_time.decodes_are_long
            ):
                self._waiting.hold(head.client)
                is_held = True
                continue
            if len(passed) > self.limits.lookahead or (passed and passed[-1].num_overtaken >= MOST_OVERTAKEN):
                reason = WaitReason.BEHIND_OTHERS
                break
            sequence = head
            self._waiting.take(sequence)
            has_others = bool(step.chunks or self._beside)
            if sequence.is_whole and has_others and self._fitting(sequence, step, budget, None) < sequence.num_tokens:
                self._waiting.put_back(sequence)  # a step of its own is as long as it has to be
                reason = WaitReason.TOKEN_BUDGET
                break
            shared, computed_by_other = self._look_up(sequence)
            if computed_by_other is not None:
                self._park(sequence, computed_by_other)
                continue
            if not self._admit(sequence, shared, step) and not self._make_way(sequence, shared, step):
                if not self.running and self._forked:
                    self._preempt(next(reversed(self._forked)), step)  # otherwise nothing would ever run again
                    self._waiting.put_back(sequence)
                    continue
                if len(self.running) >= self.max_running:
                    self._waiting.put_back(sequence)
                    reason = WaitReason.BATCH_FULL
                    break
                passed.append(sequence)
                continue
            for other in passed:
                other.num_overtaken += 1
            num_prefills += sequence.num_uncomputed > 1
            budget -= self._add_chunk(sequence, step, budget, self._waiting.head())
        for sequence in passed:
            self.waits.lack_blocks(sequence)
            self._waiting.put_back(sequence)
        for sequence in reversed(prefills):  # those that waiting ones might have passed
            if budget > 0 and sequence.place is Place.RUNNING and self._has_room(sequence):
                budget -= self._add_chunk(sequence, step, budget)
        self._waiting.release()
        self.waits.reason = reason

    def _put_further_back(self, late: Sequence) -> None:
        """Let a sequence that has to begin earlier than now wait for those that may still keep their deadlines."""
        self._waiting.take(late)
        late.key, late.latest_start_ns = (late.key[0] + PATIENCE_NS, *late.key[1:]), None
        self._waiting.put_back(late)

    def _admit(self, sequence: Sequence, shared: list[int], step: Step) -> bool:
        """Give a waiting sequence its blocks, `shared` ones first, and let it run. Return False if there is no room."""
        if len(self.running) >= self.max_running:
            return False
        is_forked = sequence in self._forked
        num_owned = len(sequence.blocks) + len(shared)
        num_new = self._blocks_for(sequence, sequence.num_tokens) - num_owned
        needs_copy = is_forked and not self.pool.is_writable(sequence.blocks[-1])
        blocks = self._allocate(num_new + needs_copy, shared)
        if blocks is None:
            return False
        sequence.held_ns -= self.pool.held_ns(shared)
        later = self.background
        while later is not None and later.running and len(self.running) + len(later.running) >= self.max_running:
            self._take_from_background()
        if is_forked:
            del self._forked[sequence]
            if needs_copy:
                self._copy_on_write(sequence, len(sequence.blocks) - 1, blocks.pop(), step)
        else:
            sequence.num_computed = len(shared) * self.pool.block_size
            if sequence.num_preemptions == 0:
                sequence.num_cached = sequence.num_computed
                if self._prefixes is not None and not sequence.wants_prompt_logprobs:
                    self.num_prefix_queries += sequence.prompt_len
                    self.num_prefix_hits += sequence.num_cached
        sequence.blocks += blocks
        if self.states is not None and sequence.state is None:
            self._give_state(self.states, sequence, step)
        self.waits.leave(sequence)
        self._count(sequence, running=1, waiting=-1)
        sequence.place, sequence.latest_start_ns = Place.RUNNING, None
        self._waiting.begin(sequence)
        step.admitted.append(sequence)
        insort(self.running, sequence, key=_key)
        if self._prefixes is not None:
            self._prefixes.begin(sequence)
        return True

    def _give_state(self, states: StatePool, sequence: Sequence, step: Step) -> None:
        """Give a sequence a state, with that of its cached tokens. If none is free, a waiting one loses its own."""
        num_blocks = sequence.num_computed // self.pool.block_size
        kept = states.find(sequence.hashes[num_blocks - 1]) if num_blocks else None
        assert num_blocks == 0 or kept is not None
        while (state := states.allocate()) is None:
            if not self._take_from_background():
                self._preempt(next(reversed(self._forked)), step)
        if kept is not None and kept != state:
            self._state_copies.append((kept, state))
        sequence.state = state
        sequence.state_ends = [] if self._prefixes is None else self._prefixes.ends_to_keep(states, sequence)

    def _newcomer_is_next(self, step: Step) -> bool:
        """Return whether the client whose turn it is has nothing running, and none was admitted in this step."""
        client = self._waiting.next_client() if self._waiting.has_several_clients and not step.admitted else None
        return client is not None and client.num_running == 0

    def _is_behind_prompts(self) -> bool:
        """Return whether there is a place for the client in turn, while only prompts of clients ahead are under way."""
        if not self._waiting.has_several_clients or len(self.running) >= self.max_running:
            return False
        client = self._waiting.next_client()
        if client is None:
            return False
        others = [one.client.service for one in self.running if one.num_uncomputed > 1]
        return bool(others) and min(others) > client.service

    def _may_make_way(self, head: Sequence | None, step: Step) -> bool:
        """Return whether others may give the next sequence a place: of another client, or of a request with several."""
        if head is None or step.admitted or not self._by_client:
            return False
        return self._newcomer_is_next(step) or (head.turn.num_running == 0 and head.client.num_spare > 0)

    def _passes(self, head: Sequence | None, sequence: Sequence) -> bool:
        """Return whether the next waiting sequence goes before the prompt of this one, which is under way."""
        if self._by_key:
            return head is not None and head.key < sequence.key
        if head is None or head.client is not sequence.client or not self._by_client:
            return False
        return head.turn.num_running == 0 and head.key < sequence.key

    def _make_way(self, sequence: Sequence, shared: list[int], step: Step) -> bool:
        """Admit a sequence in place of others, if its client or request has none running. Return False if it cannot be.

        Otherwise a client would wait for as long as the answers of an earlier one, which may be minutes. Each preempted
        sequence is of a client with more service and another one running, so the waiting one gets something, and nobody
        loses all. One client at most gets in this way in a step.
        """
        if step.admitted:
            return False
        client = sequence.client
        if client.num_running:
            if sequence.turn.num_running or not client.num_spare:
                return False
            victim = max(
                (one for one in self.running if one.client is client and one.turn.num_running > 1),
                key=lambda one: (one.turn.num_running, one.key),
            )
            num_blocks = self._blocks_for(sequence, sequence.num_tokens) - len(shared)
            if not self._has_free(num_blocks - len(victim.blocks)):
                return False
            self._preempt(victim, step)
            return self._admit(sequence, shared, step)
        while victims := [
            one for one in self.running if one.client.num_running > 1 and one.client.service > sequence.client.service
        ]:
            self._preempt(self._last_in_turn(victims), step)
            if self._admit(sequence, shared, step):
                return True
        return False

    def _add_chunk(self, sequence: Sequence, step: Step, budget: int, behind: Sequence | None = None) -> int:
        """Add a chunk of a sequence with as many tokens as budget and time allow, and return its cost.

        If it does not end with the chunk, it leaves half to the one `behind` it, if that one is shorter.
        """
        num_uncomputed = sequence.num_uncomputed
        others_decode = bool(step.chunks) and step.chunks[0].num_tokens == 1
        cost = PROMPT_LOGPROBS_COST if sequence.wants_prompt_logprobs and others_decode else 1
        num_tokens = num_uncomputed
        if not sequence.is_whole:
            num_tokens = self._fitting(sequence, step, max(1, budget // cost), behind)
        if self.states is not None:
            # A state is copied behind the step that leaves it, so the step must not go on.
            ends = [*sequence.state_ends, self._fork_end(sequence)] if sequence.siblings else sequence.state_ends
            num_tokens = min(
                [num_tokens, *(end - sequence.num_computed for end in ends if end > sequence.num_computed)]
            )
        if num_tokens < 1:  # of background work, beside a step of others
            return 0
        if sequence.media is not None:  # a step grows for tokens that see each other
            start = sequence.num_computed
            num_tokens = sequence.media.whole_end(start, start + num_tokens) - start
        draft: tuple[int, ...] = ()
        if sequence.draft and num_tokens == num_uncomputed:
            draft = self._fitting_draft(sequence, budget - num_tokens)
            num_tokens += len(draft)
        max_draws = 1 + len(draft) if num_tokens >= num_uncomputed else 0
        draw = _planned(sequence, sequence.num_tokens) if max_draws else Draw.AT_LAUNCH
        chunk = Chunk(sequence, sequence.num_computed, num_tokens, max_draws, draft, draw)
        self._waiting.charge_prompt(chunk)
        if self.step_time is not None:
            self.step_time.add(chunk.start, chunk.num_tokens)
        if num_tokens == 1:
            step.chunks.insert(0, chunk)  # with the decodes, which come first (see Step)
        else:
            step.chunks.append(chunk)
        return cost * num_tokens

    def _has_room(self, sequence: Sequence) -> bool:
        return self.step_time is None or self.step_time.has_room(sequence.num_uncomputed)

    def _fitting(self, sequence: Sequence, step: Step, most: int, behind: Sequence | None) -> int:
        """Return how many tokens of a prompt fit into the budget and the time of a step."""
        num_tokens = sequence.num_uncomputed
        is_shared = (
            self._by_client
            and behind is not None
            and behind.client is sequence.client
            and behind.num_uncomputed < num_tokens
        )
        if num_tokens > most:
            num_tokens = (most + 1) // 2 if is_shared else most
        if self.step_time is None:
            return num_tokens
        share = SHORTER_SHARE if self._by_client and self._num_shorter_steps else 1.0
        return self.step_time.fitting(sequence.num_computed, num_tokens, share / 2 if is_shared else share)

    def _blocks_for(self, sequence: Sequence, num_tokens: int) -> int:
        return 0 if sequence.is_whole else self.pool.blocks_for(num_tokens)

    # -- sharing ------------------------------------------------------------------------------------------------------

    def _look_up(self, sequence: Sequence) -> tuple[list[int], BlockHash | None]:
        """Return the cached first blocks of a waiting sequence, and the hash of a block to wait for, or None."""
        if self._prefixes is None or sequence in self._forked or sequence.wants_prompt_logprobs:
            return [], None  # prompt logprobs need the logits of every position
        return self._prefixes.look_up(sequence)

    def _keep_state(self, sequence: Sequence, end: int) -> None:
        """Cache a copy of a sequence's state behind its first `end` tokens, which are full blocks."""
        assert self.states is not None
        assert sequence.state is not None
        kept = self.states.keep(sequence.hashes[end // self.pool.block_size - 1])
        if kept is not None:
            self._state_copies.append((sequence.state, kept))

    def _publish(self, sequence: Sequence, start: int, end: int) -> None:
        """Publish the full blocks of a sequence between two positions. Their tokens are known and computed."""
        if self._prefixes is not None:
            for block_hash in self._prefixes.publish(sequence, start, end):
                self._unpark(block_hash)

    def _fork_end(self, leader: Sequence) -> int:
        """Return how many tokens a leader computes until its siblings can share them: all but the last."""
        return leader.prompt_len if self.states is None else leader.prompt_len - 1

    def _fork(self, leader: Sequence) -> None:
        """Let the siblings of a leader share its computed blocks of the prompt, and copy its state.

        Each sibling computes the last token again, for its own logits. A sequence that writes into a shared block
        copies it before. A sibling for which no state is free computes all of its prompt; and so do all of them if the
        leader began so late, behind a kept state, that its own has gone on.
        """
        blocks = leader.blocks[: self.pool.blocks_for(leader.prompt_len)]
        siblings, leader.siblings = leader.siblings, []
        for sibling in siblings:
            if sibling.place is not Place.PARKED:
                continue
            if self.states is not None:
                sibling.state = self.states.allocate() if leader.num_computed == self._fork_end(leader) else None
                if sibling.state is None:
                    continue
                assert leader.state is not None
                self._state_copies.append((leader.state, sibling.state))
            shared = self.pool.allocate(0, blocks)
            assert shared is not None
            sibling.blocks = shared
            sibling.held_ns -= self.pool.held_ns(shared)
            sibling.num_computed = sibling.num_cached = leader.prompt_len - 1
            self._forked[sibling] = None
        self._unpark(leader)

    # -- places -------------------------------------------------------------------------------------------------------

    def _wait(self, sequence: Sequence) -> None:
        sequence.place = Place.WAITING
        self._waiting.add(sequence)

    def _wait_again(self, sequence: Sequence) -> None:
        """Let a sequence without its blocks wait. It is computed again from the still cached prefix."""
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waits.join(sequence)
        self._count(sequence, waiting=1)
        self._wait(sequence)

    def _count(self, sequence: Sequence, *, running: int = 0, waiting: int = 0) -> None:
        if sequence.adapter:
            before = self._by_adapter.pop(sequence.adapter, (0, 0))
            after = (before[0] + running, before[1] + waiting)
            if any(after):
                self._by_adapter[sequence.adapter] = after

    def _park(self, sequence: Sequence, reason: Hashable, since_ns: int | None = None) -> None:
        is_read = self.disk is not None and reason in self.disk.readings
        self.waits.park(sequence, WaitReason.PREFIX_READ if is_read else WaitReason.SAME_PREFIX, since_ns)
        sequence.place = Place.PARKED
        self.num_parked += 1
        self._parked.setdefault(reason, []).append(sequence)

    def _unpark(self, reason: Hashable) -> None:
        for sequence in self._parked.pop(reason, ()):
            if sequence.place is Place.PARKED:
                self.num_parked -= 1
                self.waits.unpark(sequence)
                self._wait(sequence)

    def _leave_running(self, sequence: Sequence) -> None:
        del self.running[bisect_left(self.running, sequence.key, key=_key)]
        self._waiting.leave(sequence)
        self._count(sequence, running=-1)
        if self._prefixes is not None:
            for block_hash in self._prefixes.leave(sequence):
                self._unpark(block_hash)

    def _release(self, sequence: Sequence) -> None:
        # Of what others have cached, nothing goes.
        sequence.held_ns += self.pool.release(sequence.blocks, first=sequence.is_background)
        sequence.blocks = []
        if self.states is not None and sequence.state is not None:
            self.states.release(sequence.state)
            sequence.state = None

    def _owners(self) -> list[Sequence]:
        """Return the sequences that own blocks or a state, those of background work included."""
        own, later = [*self.running, *self._forked], self.background
        return own if later is None else own + later._owners()

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks and places are inconsistent."""
        self.pool.check_integrity()
        owners = self._owners()
        if (later := self.background) is not None:
            if later.running and len(self.running) + len(later.running) > self.limits.max_running:
                raise AssertionError("background work has a place too many")
            later._check_places()
        references = [0] * self.pool.num_blocks
        for sequence in owners:
            for block in sequence.blocks:
                references[block] += 1
        if references != [self.pool.references(block) for block in range(self.pool.num_blocks)]:
            raise AssertionError("the references of the blocks are not those of the sequences")
        if self.states is not None:
            states = {sequence.state for sequence in owners}
            if None in states or not len(states) == len(owners) == self.states.num_owned:
                raise AssertionError("not every sequence with blocks has a state of its own")
        self._check_places()

    def _check_places(self) -> None:
        if [sequence.key for sequence in self.running] != sorted(sequence.key for sequence in self.running):
            raise AssertionError("the running sequences are out of order")
        if any(sequence.place is not Place.RUNNING for sequence in self.running):
            raise AssertionError("a running sequence is in another place, too")
        if any(sequence.num_uncomputed < 1 for sequence in self.running):
            raise AssertionError("a running sequence has nothing left to compute")
        if self._prefixes is not None:
            self._prefixes.check_integrity(self.running)
        parked = [s for row in self._parked.values() for s in row if s.place is Place.PARKED]
        if len(parked) != self.num_parked:
            raise AssertionError("the number of parked sequences is wrong")
        self._waiting.check_integrity(self.running)
