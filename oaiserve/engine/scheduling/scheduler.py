"""The scheduler chooses the sequences of the next step and their tokens. Engine thread only, no torch.

A sequence has a number of tokens and a number of computed tokens; steps spend their token budget on sequences until the
second number has caught up with the first. A prefix hit, a fork from another choice, or a preemption only changes where
the second number starts.

Each step is scheduled, launched, advanced, and committed when its results are on the host. The next one may be
scheduled before that commit, and is settled after it (`Draw`). If the previous step can draw only one token for a
sequence, the number of its tokens is known, and it takes part. If that step can draw several, the sequence is held
until the commit.

Only the scheduler acts. `Order` says which sequence is next and which makes room; the scheduler moves sequences within
their `Lane`, and gives them blocks and states from the `SequenceMemory`.

A sequence that `is_whole` is computed in one step, alone if it is longer than the token budget. It needs no blocks, and
leaves with the launch. If layers keep a state, it covers all computed tokens and can't be rolled back: there are no
drafts, and chunks of prompts end where a state is to be copied. No chunk ends inside an image whose tokens see each
other, so a step may exceed its budget by less than one image.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import takewhile

from oaiserve.engine.scheduling.lane import Lane
from oaiserve.engine.scheduling.limits import Limits
from oaiserve.engine.scheduling.memory import SequenceMemory
from oaiserve.engine.scheduling.order import NOBODY, SHORTER_STEPS, Order, Others, PromptsOfStep
from oaiserve.engine.scheduling.pacing import UNIT, StepTime
from oaiserve.engine.scheduling.policy import Policy, fcfs
from oaiserve.engine.scheduling.progress import advance, commit, planned_draw, settle
from oaiserve.engine.sequences.blocks import BlockPool, StatePool
from oaiserve.engine.sequences.sequence import Place, Sequence
from oaiserve.engine.sequences.step import Chunk, Draw, Step
from oaiserve.engine.tiers.lower_tier import BlocksArrived, LowerTier
from oaiserve.facts.record import WaitReason

_RUNNING = Place.RUNNING  # Enum members are slow to read in Python 3.11.


class Scheduler:
    """Chooses the chunks of steps. Each sequence is in one state of one lane: waiting, parked, running or gone.

    The foreground is scheduled as if there were no background work, and takes slots and blocks from it. Then background
    work gets the rest of the step. If the foreground has no work, that is the whole step. Otherwise background work may
    extend the step by a few per cent, according to the learnt cost, and gets nothing while the cost is unknown. No
    background work starts while a sequence of the foreground waits. A background sequence that still waits after its
    `background_wait_ns` joins the foreground.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        *,
        policy: Policy = fcfs,
        prefix_cache: bool = True,
        states: StatePool | None = None,
        tier: LowerTier | None = None,
        step_time: StepTime | None = None,
    ) -> None:
        """Begin without sequences. `step_time` bounds the time of steps, where their cost is known."""
        if states is not None and states.num_states < limits.max_running:
            raise ValueError(f"{states.num_states} states are too few for {limits.max_running} running sequences")
        self.pool = pool
        self.states = states
        self.limits = limits
        self.tier = tier
        self.step_time = step_time
        self.memory = SequenceMemory(pool, states, tier, prefix_cache=prefix_cache)
        self._by_adapter: dict[int, tuple[int, int]] = {}
        make_lane = partial(Lane, self.memory, limits, by_adapter=self._by_adapter, by_client=policy.by_client)
        self.background = make_lane(None if step_time is None else step_time.without_itl_target())
        self.foreground = make_lane(step_time)
        self.order = Order(policy, limits, self.foreground, self.background)
        self.running = self.foreground.running  # sorted by key
        self._now_ns = 0
        # When each background sequence joins the foreground, in the order of arrival.
        self._joining: dict[Sequence, int] = {}

    @property
    def has_work(self) -> bool:
        """Return whether any sequence runs or waits, including background work."""
        return self.foreground.has_work or self.background.has_work

    @property
    def foremost(self) -> Lane:
        """Return the background lane if only that has work, else the foreground."""
        if self.foreground.has_work:
            return self.foreground
        return self.background

    @property
    def _owners(self) -> list[Sequence]:
        return self.foreground.owners + self.background.owners

    def of(self, sequence: Sequence) -> Lane:
        if sequence.is_background:
            return self.background
        return self.foreground

    def by_adapter(self) -> dict[int, tuple[int, int]]:
        """Return the numbers of running sequences, and of waiting or parked ones, by adapter."""
        return self._by_adapter.copy()

    def limit_step(self, num_tokens: int) -> None:
        """Limit the next steps to this many tokens, at least 1. The number is lower than usual while the device is
        short of memory."""
        self.foreground.max_step_tokens = num_tokens

    def add(
        self, sequence: Sequence, leader: Sequence | None = None, *, after: Sequence | None = None, since_ns: int = 0
    ) -> None:
        """Add a sequence that has been ready since `since_ns`.

        A `leader` has the same prompt and was added before: it computes the prompt for both. Whatever the policy, the
        sequence comes after the sequence `after`. Raises ValueError if the sequence can never fit in the KV cache.
        """
        lane = self.of(sequence)
        num_blocks = self.memory.blocks_for(sequence, sequence.max_len)
        if num_blocks + 1 > self.pool.num_blocks and leader is not None:
            leader = None  # There is no room to copy the block in which the two diverge.
        if num_blocks > self.pool.num_blocks:
            raise ValueError(f"a sequence of {sequence.max_len} tokens can never fit in the KV cache")
        num_new = 1
        if leader is None:
            num_new = sequence.num_tokens - len(self.memory.look_up(sequence)[0]) * self.pool.block_size
        key = self.order.key_of(sequence, lane.num_arrived)
        sequence.key = key if after is None or key > after.key else (*after.key[:-1], key[-1])  # the arrival is last
        lane.arrive(sequence, num_new, leader, since_ns)
        if leader is None and self.order.is_short(lane, max(UNIT, num_new)):
            lane.short_tokens = max(UNIT, num_new)
            lane.shorter_until = lane.num_steps + SHORTER_STEPS
        if sequence.is_background and sequence.background_wait_ns is not None:
            self._joining[sequence] = since_ns + sequence.background_wait_ns

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished, failed or aborted sequence. This does nothing if it has been removed."""
        self.of(sequence).remove(sequence)
        if sequence.is_background:
            self._joining.pop(sequence, None)

    def take_arrived(self, arrived: BlocksArrived) -> None:
        """Put blocks from the tier below into the prefix cache. Sequences that waited for the last of them look up
        their prefix again."""
        if (awaited := arrived.take()) is not None:
            self.foreground.unpark(awaited)
            self.background.unpark(awaited)

    def lose_states(self) -> list[Sequence]:
        """Forget all cached states and pending copies, because a failed step may have changed states.

        Return the sequences that own a state, which cannot continue.
        """
        self.memory.forget_states()
        return self._owners

    # -- the life of a step -------------------------------------------------------------------------------------------

    def schedule(self, now_ns: int = 0) -> Step | None:
        """Return the next step, or None if there is nothing to compute. `now_ns` is only used to account for waits."""
        self.pool.at(now_ns)
        self._now_ns = now_ns
        self.background.step = Step()
        step = Step()
        self.foreground.step = step
        self._fill(self.foreground)
        if self.background.has_work:
            self._add_background(step)
        if self.tier is not None:
            self.tier.flush()
        if not step.chunks:
            return None
        step.state_copies = self.memory.state_copies.copy()
        return step

    def advance(self, step: Step) -> None:
        """Count the tokens of a launched step as computed, and reserve places for its draws."""
        self.memory.state_copies.clear()
        advance(step, self.of, self.memory)

    def settle(self, step: Step) -> None:
        """Decide which draws of a launched step count, after the previous step has been committed: see `Draw`."""
        settle(step)

    def charge_masks(self, chunks: Iterable[Chunk]) -> None:
        """Charge the clients of these chunks for the masks that were just filled."""
        for chunk in chunks:
            if chunk.sequence.constraint is not None:
                self.of(chunk.sequence).charge_masks(chunk.sequence, chunk.sequence.constraint.mask_ns)

    def commit(self, chunk: Chunk, token_ids: list[int]) -> bool:
        """Append the tokens that a chunk has drawn to its sequence, and those that a grammar forces after them.

        Return True if the sequence was removed because it was expected to reach its maximum length, but is shorter and
        waits again.
        """
        lane = self.background if chunk.sequence.is_background else self.foreground  # `of`, inlined
        return commit(lane, chunk, token_ids)

    def commit_next(self, sequence: Sequence, start: int, token_id: int) -> None:
        """Do what `commit` does for a chunk of one token, at `start`, with one draw."""
        sequence.token_ids.append(token_id)
        if (start + 1) % self.pool.block_size == 0 and sequence.place is _RUNNING:
            self.of(sequence).publish(sequence, start, start + 1)

    # -- the parts of a step ------------------------------------------------------------------------------------------

    def _fill(self, lane: Lane) -> None:
        """Add the decodes and prompts of a lane to its empty step."""
        lane.waits.begin_step(self._now_ns)
        if lane.step_time is not None and lane.beside is not None:
            lane.step_time.begin(lane.step, lane.beside)  # This bounds decodes, too.
        budget = max(0, lane.max_step_tokens - self._continue_decodes(lane))
        if lane.step_time is not None and lane.beside is None:
            lane.step_time.begin(lane.step)
        self._compute_prompts(lane, budget)
        lane.num_steps += 1
        lane.waiting.charge_draws(lane.step)

    def _add_background(self, step: Step) -> None:
        """Add background work to a step that already contains all of the foreground's work."""
        lane = self.background
        others_work = self.foreground.has_work
        if others_work and self._joining:
            self._join_foreground()
        if self.foreground.waiting:
            lane.max_running = len(lane.running)
        else:
            lane.max_running = self.limits.max_running - len(self.running)
        lane.max_step_tokens = max(0, self.foreground.max_step_tokens - step.num_tokens)
        lane.beside = step if others_work else None
        if not others_work or (step.chunks and lane.step_time is not None and lane.step_time.is_known):
            self._fill(lane)
        else:
            lane.waits.begin_step(self._now_ns)
        if others_work:
            lane.waits.reason = WaitReason.FOREGROUND
        step.add(lane.step)

    def _join_foreground(self) -> None:
        """Move background sequences to the foreground once they have waited long enough. They count there from the next
        step on."""
        due = [*takewhile(lambda sequence: self._joining[sequence] <= self._now_ns, self._joining)]
        for sequence in due:
            is_running = sequence.place is Place.RUNNING
            if sequence.place is Place.NOWHERE or (sequence.num_pending and not is_running):
                continue  # It has left or was preempted in this step; the last step's commit decides.
            del self._joining[sequence]
            self.background.hand_over(sequence, self._now_ns)
            sequence.is_background = False
            if is_running:
                sequence.key = self.order.key_of(sequence, self.foreground.num_arrived)
                self.foreground.take_over(sequence)
            else:
                self.add(sequence, since_ns=self._now_ns)

    def _continue_decodes(self, lane: Lane) -> int:
        """Add the decoding sequences, and return how many tokens they have in the step, including drafts."""
        chunks = lane.step.chunks
        size = self.pool.block_size
        is_writable = self.pool.is_writable
        drafting: list[Sequence] = []
        if lane.mask_debts:
            lane.pay_masks(self.order.paid_for_masks(lane))
        decodes, sitting_out = self.order.turns(lane)
        for sequence in decodes:
            lane.num_turns += 1
            sequence.last_turn = lane.num_turns
        for sequence in lane.running.copy():  # the only loop of every step that grows with the running sequences
            start = sequence.num_computed
            blocks = sequence.blocks
            if sequence.num_tokens - start != 1 or sequence.place is not _RUNNING:
                self._make_room_for_several(lane, sequence)
                continue
            if sequence in sitting_out:
                continue
            index = start // size
            if (index < len(blocks) and is_writable(blocks[index])) or self._make_room(lane, sequence, index):
                if sequence.draft:
                    drafting.append(sequence)
                elif sequence.needs_ids:
                    chunks.append(Chunk(sequence, start, 1, 1, (), planned_draw(sequence, start + 1)))
                else:
                    chunks.append(Chunk(sequence, start, 1))
        # Drafts get what is left once all others have their tokens and blocks. A drafting sequence may have been
        # preempted.
        drafting = [sequence for sequence in drafting if sequence.place is Place.RUNNING]
        num_tokens = len(chunks) + len(drafting)
        for sequence in drafting:
            draft = self._fitting_draft(lane, sequence, lane.max_step_tokens - num_tokens)
            start = sequence.num_computed
            draw = planned_draw(sequence, start + 1)
            chunk = Chunk(sequence, start, 1 + len(draft), 1 + len(draft), draft, draw)
            chunks.insert(len(chunks) if draft else 0, chunk)
            num_tokens += len(draft)
        return num_tokens

    def _compute_prompts(self, lane: Lane, budget: int) -> None:
        """Add chunks of prompts in progress and of waiting ones, in the order of the policy.

        Prompts in progress come first, except those that a waiting prompt passes. A limited number of waiting sequences
        may overtake one that doesn't fit.
        """
        order = self.order
        prompts = order.prompts_of_step(lane, budget)
        reason: WaitReason | None = None
        while reason is None:
            head = lane.waiting.head()
            self._go_on(lane, prompts, head)
            reason = order.obstacle(lane, head, prompts)
            if head is None or reason is not None:
                continue
            if order.is_held_back(lane, head):
                lane.waiting.hold(head.client)
                prompts.has_held = True
                continue
            reason = self._begin(lane, prompts, head)
        for sequence in prompts.passed:
            lane.waits.lack_blocks(sequence)
            lane.waiting.put_back(sequence)
        while prompts.under_way:  # prompts in progress that waiting sequences could have passed
            sequence = prompts.under_way.pop()
            if prompts.budget > 0 and sequence.place is Place.RUNNING and order.has_room(lane, prompts, sequence):
                self._add_chunk(lane, prompts, sequence)
        lane.waiting.release()
        lane.waits.reason = reason

    def _go_on(self, lane: Lane, prompts: PromptsOfStep, head: Sequence | None) -> None:
        """Add chunks of those prompts in progress that go before the next waiting one."""
        order = self.order
        under_way = prompts.under_way
        next_waiting = None if order.is_full(lane, head) else head
        while under_way and prompts.budget > 0 and not order.passes(next_waiting, under_way[-1]):
            sequence = under_way.pop()
            if sequence.place is Place.RUNNING and order.has_room(lane, prompts, sequence):  # not preempted meanwhile
                others = order.others_of(lane, prompts, sequence, next_waiting)
                self._add_chunk(lane, prompts, sequence, others)

    def _begin(self, lane: Lane, prompts: PromptsOfStep, head: Sequence) -> WaitReason | None:
        """Start the next waiting sequence with its first chunk, if there is room. Return why no further one may start,
        or None."""
        if not self.order.may_overtake(prompts.passed):
            return WaitReason.BEHIND_OTHERS
        lane.waiting.take(head)
        has_others = bool(lane.step.chunks or lane.beside)
        if (
            head.is_whole
            and has_others
            and self.order.num_tokens_in(lane, prompts, head, prompts.budget) < head.num_tokens
        ):
            lane.waiting.put_back(head)  # It will be computed alone in a step, which is as long as necessary.
            return WaitReason.TOKEN_BUDGET
        shared, awaited = self.memory.look_up(head)
        if awaited is not None:
            lane.park(head, awaited)
            return None
        if self._admit(lane, head, shared) or self._make_way(lane, head, shared):
            for other in prompts.passed:
                other.num_overtaken += 1
            prompts.num_prompts += head.num_uncomputed > 1
            others = self.order.others_of(lane, prompts, head, lane.waiting.head())
            self._add_chunk(lane, prompts, head, others)
            return None
        if not lane.running and lane.forked:
            lane.preempt(next(reversed(lane.forked)))  # otherwise nothing would ever run again
            lane.waiting.put_back(head)
            return None
        if len(lane.running) >= lane.max_running:
            lane.waiting.put_back(head)
            return WaitReason.BATCH_FULL
        prompts.passed.append(head)
        return None

    def _add_chunk(self, lane: Lane, prompts: PromptsOfStep, sequence: Sequence, others: Others = NOBODY) -> None:
        """Add a chunk of a prompt, as large as budget and time allow after leaving room for what `others` could use."""
        cost = self.order.cost_of_token(lane, sequence)
        budget = prompts.budget
        num_tokens = sequence.num_uncomputed
        if not sequence.is_whole:
            if lane.step_time is not None and self.order.shortens(lane, sequence):
                lane.step_time.shorten(sequence.num_computed, min(num_tokens, budget))
            num_tokens = self.order.num_tokens_in(lane, prompts, sequence, max(1, budget // cost), others)
        num_tokens = self.memory.up_to_copy(sequence, num_tokens)
        if num_tokens < 1:  # The foreground's step has no room for background work.
            return
        if sequence.media is not None:  # Extend the chunk to include all tokens that see each other.
            start = sequence.num_computed
            num_tokens = sequence.media.whole_end(start, start + num_tokens) - start
        draft: tuple[int, ...] = ()
        draw = Draw.AT_LAUNCH
        max_draws = 0
        begins_and_ends = False
        if num_tokens >= sequence.num_uncomputed:
            begins_and_ends = sequence.num_computed <= sequence.num_cached
            draft = self._fitting_draft(lane, sequence, budget - num_tokens)
            draw = planned_draw(sequence, sequence.num_tokens)
            max_draws = 1 + len(draft)
        num_tokens += len(draft)
        chunk = Chunk(sequence, sequence.num_computed, num_tokens, max_draws, draft, draw)
        lane.waiting.charge_prompt(chunk)
        if lane.step_time is not None:
            lane.step_time.add(chunk.start, chunk.num_tokens)
            if begins_and_ends and max(UNIT, num_tokens) <= prompts.shortest:
                prompts.shortest = max(UNIT, num_tokens)
                lane.step_time.begin_short()
        chunks = lane.step.chunks
        chunks.insert(0 if num_tokens == 1 else len(chunks), chunk)  # decodes come first (see Step)
        prompts.budget -= cost * num_tokens
        self.order.sort_again(prompts)

    # -- room for a sequence ------------------------------------------------------------------------------------------

    def _admit(self, lane: Lane, sequence: Sequence, shared: list[int]) -> bool:
        """Give a waiting sequence its blocks, `shared` ones first, and let it run. Return False if there is no room."""
        if len(lane.running) >= lane.max_running:
            return False
        blocks = self._allocate(lane, sequence, self.memory.num_missing(sequence, shared), shared)
        if blocks is None:
            return False
        while self.order.needs_place(lane):
            self._take_from_background(lane)
        lane.take_blocks(sequence, shared, blocks)
        while not self.memory.take_state(sequence):
            if not self._take_from_background(lane):
                lane.preempt(next(reversed(lane.forked)))
        lane.run(sequence)
        return True

    def _make_way(self, lane: Lane, sequence: Sequence, shared: list[int]) -> bool:
        """Admit a sequence in place of others, if any give way to it. Return False if it can't be admitted.

        This happens at most once per step.
        """
        while not lane.step.admitted and (victim := self.order.gives_way(lane, sequence)) is not None:
            is_own = victim.client is sequence.client
            num_blocks = self.memory.blocks_for(sequence, sequence.num_tokens) - len(shared)
            if is_own and not self._has_free(lane, num_blocks - len(victim.blocks)):
                break
            lane.preempt(victim)
            if self._admit(lane, sequence, shared) or is_own:
                break
        return sequence.place is Place.RUNNING

    def _take_from_background(self, lane: Lane) -> bool:
        """Preempt one background sequence for the foreground. Return False if there is none."""
        victim = self.order.preempted_in_background() if lane is self.foreground else None
        if victim is not None:
            self.background.preempt(victim)
        return victim is not None

    def _allocate(self, lane: Lane, sequence: Sequence, num_blocks: int, shared: list[int]) -> list[int] | None:
        while True:
            blocks = self.pool.allocate(num_blocks, shared, taker=sequence.request_id)
            if blocks is not None or not self._take_from_background(lane):
                return blocks

    def _has_free(self, lane: Lane, num_blocks: int) -> bool:
        """Return whether this many blocks are free, after taking blocks from background work if necessary."""
        while self.pool.num_blocks - self.pool.num_used < num_blocks:
            if not self._take_from_background(lane):
                return False
        return True

    def _fitting_draft(self, lane: Lane, sequence: Sequence, most_tokens: int) -> tuple[int, ...]:
        """Shorten a sequence's draft so that it fits, without using blocks that running sequences need for their next
        tokens."""
        if not sequence.draft or sequence.num_pending:
            return ()  # The token before the draft must be known.
        end = sequence.num_tokens
        blocks = sequence.blocks
        length = max(0, min(len(sequence.draft), most_tokens, sequence.max_len - end - 1))
        while self.pool.blocks_for(end + length) > len(blocks):
            if (
                not self._has_free(lane, len(lane.running) + 1)
                or (new := self.pool.allocate(1, taker=sequence.request_id)) is None
            ):
                length = len(blocks) * self.pool.block_size - end
                break
            blocks += new
        return tuple(sequence.draft[: max(0, length)])

    def _make_room_for_several(self, lane: Lane, sequence: Sequence) -> None:
        """Give a sequence with several draws in one step the blocks to compute them.

        `_compute_prompts` adds its tokens to the step. The blocks are allocated earlier, because a sequence can only be
        preempted while it has no chunk in the step. Prompts get their blocks at admission.
        """
        if sequence.place is not Place.RUNNING or sequence.is_held:
            return
        for index in self.memory.places_to_own(sequence):
            if not self._make_room(lane, sequence, index):
                return

    def _make_room(self, lane: Lane, sequence: Sequence, index: int) -> bool:
        """Give a sequence a block of its own, by preemption if necessary. Return False if the sequence itself was
        preempted."""
        is_new = index == len(sequence.blocks)
        while (block := self._allocate(lane, sequence, 1, [])) is None:
            victim = self.order.preempted_first(lane)
            lane.preempt(victim)
            if victim is sequence:
                return False
            if not is_new and self.pool.is_writable(sequence.blocks[index]):
                return True  # The other sequence that shared the block was preempted.
        if is_new:
            sequence.blocks += block
        else:
            lane.copy_on_write(sequence, index, block[0])
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks and states of sequences contradict each other."""
        running = self.running + self.background.running
        if self.background.running and len(running) > self.limits.max_running:
            raise AssertionError("background work has a place too many")
        self.memory.check_integrity(self._owners, running)
        self.foreground.check_integrity()
        self.background.check_integrity()
