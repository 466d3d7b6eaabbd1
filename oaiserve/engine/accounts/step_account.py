"""The accounts of steps, and of requests in steps, for telemetry. Engine thread only, no torch.

The engine loop reports what has happened and when; nothing in this module reads a clock, or changes what the loop does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from oaiserve.engine.accounts.host_time import HostTime, kind_of
from oaiserve.engine.accounts.step_causes import StepCauses, load_of
from oaiserve.engine.load_totals import LoadTotals
from oaiserve.engine.scheduler import Scheduler
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Chunk, Step, StepResult
from oaiserve.explain.causes import RequestCauses
from oaiserve.facts.record import EngineAccount, EventKind, HostPart, StepKind, StepRecord
from oaiserve.facts.times import RequestTimes

_MASKS = HostPart.MASKS
MOST_STEPS_KEPT = 2**16  # until they are taken: minutes even on a fast GPU


class EngineSnapshot(NamedTuple):
    """The engine's numbers after a step. Sequences are choices: a request has `prompts * n` of them."""

    num_running: int = 0
    num_waiting: int = 0  # tokenized, not yet in a step, or preempted
    num_tokenizing: int = 0  # requests that no tokenize worker has taken yet; filled in by Engine.snapshot
    by_adapter: Mapping[int, tuple[int, int]] = MappingProxyType({})  # sequences that run and wait, if any has one
    # The same of each adapter that is loaded, by its name; filled in by Engine.snapshot.
    adapters: Mapping[str, tuple[int, int]] = MappingProxyType({})
    blocks_used: int = 0
    blocks_cached: int = 0  # of all blocks, those that the prefix cache can find
    blocks_reusable: int = 0  # of the free ones, those that the prefix cache can find
    blocks_total: int = 0
    num_preemptions: int = 0
    num_out_of_memory: int = 0  # steps that the device had no memory for as a whole
    num_masked_draws: int = 0  # draws of a token among those that a grammar lets come next
    num_forced_tokens: int = 0  # tokens that grammars forced, so that none was drawn
    num_drafts: int = 0  # drafts that were verified
    num_draft_tokens: int = 0  # tokens of these
    num_accepted_tokens: int = 0  # of these, those that came true
    num_model_draft_tokens: int = 0  # of num_draft_tokens, those of the draft model
    num_accepted_model_tokens: int = 0  # of num_accepted_tokens, those of the draft model
    num_prefix_queries: int = 0  # prompt tokens that were looked up in the prefix cache
    num_prefix_hits: int = 0  # prompt tokens that were found there
    num_waiting_tokens: int = 0  # of the prompts of requests that have not entered a step
    drain_rate: float = 0.0  # requests a second that leave the queue, while any wait
    num_steps: int = 0
    model_ns: int = 0  # of all steps
    idle_with_work_ns: int = 0  # between steps, while there was something to compute
    host_ns: Mapping[HostPart, int] = MappingProxyType(dict.fromkeys(HostPart, 0))  # of the engine thread, so far
    idle_since_ns: int | None = None  # it is in this part since then, which is not in `host_ns` yet
    load: LoadTotals = LoadTotals()


@dataclass(slots=True)
class StepTotals:
    """Sums over all steps so far. The difference of two of them is what a request took part in between."""

    num_steps: int = 0
    model_ns: int = 0
    num_sequences: int = 0
    num_tokens: int = 0


class RequestNotes:
    """Writes what happens to one request in steps into its account and its stamps."""

    __slots__ = ("_account", "_causes", "_first_token_step", "_preempted_ns", "_steps", "_times", "_totals_before")

    def __init__(
        self,
        times: RequestTimes,
        account: EngineAccount,
        steps: StepCauses | None = None,
        causes: RequestCauses | None = None,
    ) -> None:
        """Begin with what has not been in a step. With the causes of all steps, write its own into its account."""
        self._account = account
        self._steps = steps
        self._causes = causes
        self._first_token_step: int | None = None  # the number of steps so far
        self._times = times
        self._totals_before: StepTotals | None = None  # when its first step began
        self._preempted_ns: dict[Sequence, int] = {}  # the time since which each of these is stalled

    def preempted(self, sequence: Sequence, now_ns: int) -> None:
        self._preempted_ns[sequence] = now_ns
        self._account.num_preemptions += 1
        self._account.note(EventKind.PREEMPTED, now_ns, sequence.index, tokens=sequence.num_tokens)
        if self._causes is not None and self._steps is not None:
            self._causes.preempted(self._steps.number, self._steps.totals)

    def admitted(self, sequence: Sequence, now_ns: int) -> bool:
        """Note that a step with the sequence is about to be launched. Return True for the first one of its request."""
        account = self._account
        if sequence in self._preempted_ns:
            stalled_ns = now_ns - self._preempted_ns.pop(sequence)
            account.stalled_ns += stalled_ns
            cached = sequence.num_computed
            account.note(EventKind.RESUMED, now_ns, sequence.index, cached_tokens=cached, stalled_ns=stalled_ns)
            if self._causes is not None:
                self._causes.resumed()
        elif sequence.num_cached:
            account.note(EventKind.PREFIX_CACHE_HIT, now_ns, sequence.index, tokens=sequence.num_cached)
        if self._times.scheduled is not None:
            return False
        self._times.scheduled = now_ns
        # A copy, because a preempted sequence waits again, which is not part of the phase `queue`.
        account.waits_ns = sequence.waits_ns.copy()
        return True

    def first_step_ended(self, before: StepTotals) -> None:
        self._totals_before = replace(before)
        steps, scheduled_ns = self._steps, self._times.scheduled
        if steps is not None and self._causes is not None and scheduled_ns is not None:
            self._causes.begin(steps.totals, steps.ended_ns, scheduled_ns, behind_prompts=steps.had_prompts)

    def computed(self, chunk: Chunk, now_ns: int, batch: int) -> None:
        """Note that a chunk of several tokens has been computed, in a step with `batch` chunks."""
        index, start, tokens = chunk.sequence.index, chunk.start, chunk.num_known
        self._account.note(EventKind.PREFILL_CHUNK, now_ns, index, start=start, tokens=tokens, batch=batch)

    def drew(self, sequence: Sequence, now_ns: int, batch: int) -> None:
        """Note that a token of a choice is on the host. The second one of a step comes 0 ns after the first."""
        if sequence.last_token_ns is None:
            self._account.note(EventKind.FIRST_TOKEN, now_ns, sequence.index, batch=batch)
            if self._times.first_token is None:
                self._times.first_token = now_ns
                self._end_prefill()
        else:
            self._account.inter_token_ns.append(now_ns - sequence.last_token_ns)
        sequence.last_token_ns = now_ns

    def finished(self, sequence: Sequence, reason: str, now_ns: int, batch: int) -> None:
        self._account.note(EventKind.FINISHED, now_ns, sequence.index, reason=reason, batch=batch)

    def _end_prefill(self) -> None:
        """Note the causes of the phase `prefill`, which ends with the last step."""
        if self._steps is not None and self._causes is not None and self._causes.has_begun:
            self._account.prefill_causes_ns = self._causes.phase_ended(self._steps.totals)
            self._first_token_step = self._steps.number

    def _close_causes(self, steps: StepCauses, causes: RequestCauses, totals: StepTotals, before: StepTotals) -> None:
        if self._first_token_step is None:
            self._account.prefill_causes_ns = causes.phase_ended(steps.totals)
            self._account.num_prefill_steps = totals.num_steps - before.num_steps
        else:
            self._account.decode_causes_ns = causes.phase_ended(steps.totals)
            self._account.num_prefill_steps = self._first_token_step - before.num_steps

    def close(self, totals: StepTotals, now_ns: int) -> None:
        account, before = self._account, self._totals_before
        account.stalled_ns += sum(now_ns - since_ns for since_ns in self._preempted_ns.values())
        if before is not None:
            account.first_step = before.num_steps
            account.num_steps = totals.num_steps - before.num_steps
            account.model_ns = totals.model_ns - before.model_ns
            account.num_step_sequences = totals.num_sequences - before.num_sequences
            account.num_step_tokens = totals.num_tokens - before.num_tokens
            if self._steps is not None and self._causes is not None:
                self._close_causes(self._steps, self._causes, totals, before)


class StepAccount:
    """Records each step: how long it took, how long the device waited before it, and what the engine thread did."""

    def __init__(self, host: HostTime, causes: StepCauses | None = None) -> None:
        self._host = host
        self._causes = causes
        self._host_before_ns = host.spent_ns.copy()  # when the last step ended
        self.totals = StepTotals()
        self.steps: deque[StepRecord] = deque(maxlen=MOST_STEPS_KEPT)  # Engine.take_steps takes them out
        self._num_masked = 0
        self._num_masked_before = 0  # when the last step ended
        self._idle_ns = 0
        self._work_since_ns = 0
        self._last_ended_ns = 0
        self.load = LoadTotals(host.since_ns)
        self._num_begun_tokens = 0  # uncomputed ones of prompts that the last step has computed a part of

    def work_arrived(self, now_ns: int) -> None:
        """Note that there is something to compute again."""
        self._work_since_ns = now_ns

    def masks_filled(self, number: int) -> None:
        """Note that so many draws of the step under way get a mask."""
        self._num_masked += number

    def step_ended(self, step: Step, result: StepResult, launched_ns: int, ended_ns: int) -> int:
        """Record a step whose results are on the host. Return how long it took.

        Steps run one after the other, so a step begins when it is launched, or when the step before has ended. The host
        sees that end when it takes the results, which may be late. If the device has a clock of its own, its times are
        used instead. A step for which the draft model computes begins with that, which counts as its launch.
        """
        last_ns, since_ns = self._last_ended_ns, self._work_since_ns
        began_ns = launched_ns if launched_ns > last_ns else last_ns
        duration_ns = ended_ns - began_ns
        idle_ns = began_ns - (since_ns if since_ns > last_ns else last_ns)
        if idle_ns < 0:  # it was launched before the step before had ended
            idle_ns = 0
        if result.device_ns is not None:
            duration_ns = result.device_ns
        if result.device_gap_ns is not None:
            idle_ns = min(result.device_gap_ns, launched_ns - self._work_since_ns)
        self._last_ended_ns = ended_ns
        load = load_of(step)
        num_sequences, num_tokens = len(step.chunks), load.num_tokens
        kind = kind_of(step, load)
        self._num_begun_tokens = 0
        if kind is not StepKind.DECODE:
            self._num_begun_tokens = sum(c.sequence.num_uncomputed for c in step.chunks if not c.max_draws)
        before_ns, self._host_before_ns = self._host_before_ns, self._host.spent_ns.copy()
        num_masked_before, self._num_masked_before = self._num_masked_before, self._num_masked
        cost_error = None
        if self._causes is not None:
            masks_ns = 0
            if self._num_masked > num_masked_before:
                masks_ns = self._host_before_ns[_MASKS] - before_ns[_MASKS]
            cost_error = self._causes.step_ended(
                step, load, ended_ns, duration_ns, idle_ns, masks_ns, result.device_ns is not None
            )
        self.steps.append(
            StepRecord(
                kind,
                began_ns,
                duration_ns,
                idle_ns,
                num_sequences,
                num_tokens,
                number=self.totals.num_steps,
                host_ns={part: spent_ns - before_ns[part] for part, spent_ns in self._host_before_ns.items()},
                device_ns=result.device_ns,
                device_gap_ns=result.device_gap_ns,
                num_masked_draws=self._num_masked - num_masked_before,
                cost_error=cost_error,
            )
        )
        self._idle_ns += idle_ns
        self.totals.num_steps += 1
        self.totals.model_ns += duration_ns
        self.totals.num_sequences += num_sequences
        self.totals.num_tokens += num_tokens
        return duration_ns

    def snapshot(
        self,
        scheduler: Scheduler,
        *,
        now_ns: int,
        num_open: int,
        num_waiting_tokens: int,
        drain_rate: float,
        num_out_of_memory: int,
        num_forced_tokens: int,
        num_drafts: int,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_model_draft_tokens: int,
        num_accepted_model_tokens: int,
    ) -> EngineSnapshot:
        pool, num_running = scheduler.pool, len(scheduler.running)
        num_begun_tokens = self._num_begun_tokens if num_running else 0
        self.load = self.load.after(now_ns, num_open, num_waiting_tokens + num_begun_tokens)
        return EngineSnapshot(
            num_running=num_running,
            num_waiting=scheduler.num_waiting + scheduler.num_parked,
            by_adapter=scheduler.by_adapter(),
            blocks_used=pool.num_used,
            blocks_cached=pool.num_cached,
            blocks_reusable=pool.num_reusable,
            blocks_total=pool.num_blocks,
            num_preemptions=scheduler.num_preemptions,
            num_out_of_memory=num_out_of_memory,
            num_masked_draws=self._num_masked,
            num_forced_tokens=num_forced_tokens,
            num_drafts=num_drafts,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            num_model_draft_tokens=num_model_draft_tokens,
            num_accepted_model_tokens=num_accepted_model_tokens,
            num_prefix_queries=scheduler.num_prefix_queries,
            num_prefix_hits=scheduler.num_prefix_hits,
            num_waiting_tokens=num_waiting_tokens,
            drain_rate=drain_rate,
            num_steps=self.totals.num_steps,
            model_ns=self.totals.model_ns,
            idle_with_work_ns=self._idle_ns,
            host_ns=self._host.spent_ns.copy(),
            load=self.load,
        )
