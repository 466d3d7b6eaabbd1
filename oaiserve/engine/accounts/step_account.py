"""The accounts of steps, and of the requests in them. Engine thread only, no torch, no clock, no influence on the
loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import process_time_ns

from oaiserve.engine.accounts.host_time import HostTime, kind_of
from oaiserve.engine.accounts.machine_users import MachineUsers
from oaiserve.engine.accounts.shares import Shares
from oaiserve.engine.accounts.step_causes import StepCauses
from oaiserve.engine.scheduling.scheduler import Scheduler
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Step, StepResult
from oaiserve.engine.sequences.step_load import load_of
from oaiserve.explain.causes import RequestCauses
from oaiserve.explain.client_work import ClientWork, Work, WorkBefore, beside, while_waiting
from oaiserve.facts.engine_numbers import EngineNumbers, LoadTotals
from oaiserve.facts.record import OF_NEIGHBOURS, Cause, EngineAccount, EventKind, OthersTime
from oaiserve.facts.step_record import HostPart, StepKind, StepRecord
from oaiserve.facts.times import RequestTimes

_ENCODE = HostPart.ENCODE
_MASKS = HostPart.MASKS
# If time lost to the machine, or unexplained time, exceeds this share of the time since a request's first step, its
# account lists the users of the machine.
MACHINE_SHARE = 0.1
MOST_STEPS_KEPT = 2**16  # how many steps are kept until they are taken: minutes' worth even on a fast GPU


@dataclass(slots=True, eq=False)
class RequestNotes:
    """Writes one request's account and stamps, from what happens to its sequences in steps."""

    request_id: str
    _times: RequestTimes
    _account: EngineAccount
    _steps: StepCauses | None  # the causes of all steps; None if their time is not divided into causes
    _causes: RequestCauses | None  # those of this request
    _first_token_step: int | None = None  # number of the step that drew its first token
    _before: EngineNumbers | None = None  # the engine's numbers when its first step began
    _encoded_ns: int = 0  # time to encode others' images and sounds between the last step and its first one
    _preempted_ns: dict[Sequence, int] = field(default_factory=dict)  # when each sequence was preempted
    # The work for each client, and the request's own tokens, rows and encoding time, when its current phase began
    _work_before: WorkBefore | None = None
    _computed_tokens: int = 0  # computed tokens of its prompts, so far
    _own_before: tuple[int, int, int] = (0, 0, 0)

    def media_encoded(self, now_ns: int) -> None:
        self._times.media_encoded = now_ns
        media = self._account.media
        details = {"encode_ns": media.encode_ns, "cached": media.num_cached, "tokens": media.num_tokens}
        self._account.note(EventKind.MEDIA_ENCODED, now_ns, None, **details)

    def arrived(self, since_ns: int) -> None:
        """Note the beginning of the phase `queue` at `since_ns`, perhaps within the step that has just ended."""
        steps = self._steps
        if steps is not None and self._causes is not None:
            in_last_step = since_ns < steps.ended_ns
            self._work_before = steps.clients.before(self._causes.client, in_last_step=in_last_step)
            self._own_before = self._own_now()
            self._account.client_requests = max(1, self._work_before.num_open)

    def _phase_ended(self, phase: str, waited_ns: int = 0) -> None:
        """Note how much of a phase each client's requests took, by `waited_ns` or by the phase's causes. The next phase
        begins."""
        steps = self._steps
        before = self._work_before
        if steps is None or self._causes is None or before is None:
            return
        account = self._account
        causes_ns = account.prefill_causes_ns if phase == "prefill" else account.decode_causes_ns
        others_ns = self._others(steps, before, self._causes.client, None if phase == "queue" else causes_ns, waited_ns)
        self._own_before = self._own_now()
        self._work_before = steps.clients.before(self._causes.client)
        if others_ns:
            account.others_ns[phase] = others_ns

    def others_so_far(self, causes_ns: Mapping[Cause, int], now_ns: int) -> list[OthersTime]:
        """Return how much of the request's current phase so far is due to each client's requests. In the queue, that is
        the time it waited for them; in a later phase, the time that neighbours caused according to `causes_ns`. Any
        thread may call this, so the times may be one step old."""
        steps = self._steps
        before = self._work_before
        if steps is None or self._causes is None or before is None:
            return []
        queued_ns = self._times.media_encoded or self._times.tokenized
        is_waiting = self._times.scheduled is None and queued_ns is not None
        waited_ns = now_ns - queued_ns if queued_ns is not None else 0
        return self._others(steps, before, self._causes.client, None if is_waiting else causes_ns, waited_ns)

    def _own_now(self) -> tuple[int, int, int]:
        """Return the tokens of its prompts, the rows of its decodes, and the time of its media so far."""
        account = self._account
        rows = len(account.inter_token_ns) - account.num_accepted_tokens + account.num_draft_tokens
        return self._computed_tokens, rows, account.media.encode_ns

    def _others(
        self,
        steps: StepCauses,
        before: WorkBefore,
        client: ClientWork,
        causes_ns: Mapping[Cause, int] | None,
        waited_ns: int,
    ) -> list[OthersTime]:
        """Divide the time since `before` among clients: by these causes, or, for the queue, `waited_ns` if there are
        none."""
        if causes_ns is not None and Cause.NOT_KNOWN_YET in causes_ns and Cause.ALONE not in causes_ns:
            waited_ns = causes_ns[Cause.NOT_KNOWN_YET]
        elif causes_ns is not None:
            added_ns = [causes_ns.get(cause, 0) for cause in OF_NEIGHBOURS]
            return beside(self._work_since(steps, before, client), client, *added_ns) if any(added_ns) else []
        return while_waiting(self._work_since(steps, before, client), client, waited_ns)

    def _work_since(self, steps: StepCauses, before: WorkBefore, client: ClientWork) -> dict[ClientWork, Work]:
        """Return the work for each client since `before`, without the request's own."""
        own = (now - past for now, past in zip(self._own_now(), self._own_before, strict=True))
        return steps.clients.since(before, client, *own)

    def preempted(self, sequence: Sequence, now_ns: int) -> None:
        self._preempted_ns[sequence] = now_ns
        self._account.num_preemptions += 1
        self._account.note(EventKind.PREEMPTED, now_ns, sequence.index, tokens=sequence.num_tokens)
        if self._causes is not None and self._steps is not None:
            self._steps.decodes.settle(self._causes)
            self._causes.preempted(self._steps.number, self._steps.totals)

    def admitted(self, sequence: Sequence, now_ns: int) -> bool:
        """Note that a sequence has joined a step, before its launch. Return True for the first step of its request."""
        account = self._account
        if sequence in self._preempted_ns:
            stalled_ns = now_ns - self._preempted_ns.pop(sequence)
            account.stalled_ns += stalled_ns
            cached = sequence.num_computed
            account.note(EventKind.RESUMED, now_ns, sequence.index, cached_tokens=cached, stalled_ns=stalled_ns)
            if self._causes is not None:
                self._causes.resumed()
        else:
            self._note_prefix(sequence, now_ns)
        if self._times.scheduled is not None:
            return False
        self._times.scheduled = now_ns
        if self._steps is not None:
            self._encoded_ns = self._steps.encoded_ns
        # A copy, because a preempted sequence waits again, and that wait is not part of the phase `queue`.
        account.waits_ns = sequence.waits_ns.copy()
        self._phase_ended("queue", sum(account.waits_ns.values()))
        return True

    def _note_prefix(self, sequence: Sequence, now_ns: int) -> None:
        if sequence.num_cached:
            self._account.note(EventKind.PREFIX_CACHE_HIT, now_ns, sequence.index, tokens=sequence.num_cached)
            self._account.num_restored_tokens += sequence.num_restored
        if (lost := sequence.lost) is not None:
            details: dict[str, int | str] = {"tokens": lost.num_tokens}
            if lost.eviction is not None:
                evicted_ns = now_ns - lost.eviction.at_ns
                details |= {"evicted_ns": evicted_ns, "evicted_for": lost.eviction.request_id}
            self._account.note(EventKind.PREFIX_CACHE_LOST, now_ns, sequence.index, **details)

    def first_step_ended(self, before: EngineNumbers) -> None:
        self._before = before.copy()
        steps = self._steps
        scheduled_ns = self._times.scheduled
        if steps is not None and self._causes is not None and scheduled_ns is not None:
            self._causes.begin(
                steps.totals,
                steps.ended_ns,
                scheduled_ns,
                behind_prompts=steps.had_prompts,
                encoded_ns=self._encoded_ns,
            )

    def computed(self, chunk: Chunk, now_ns: int, batch: int) -> None:
        index = chunk.sequence.index
        start = chunk.start
        tokens = chunk.num_known
        self._computed_tokens += chunk.num_tokens
        self._account.note(EventKind.PREFILL_CHUNK, now_ns, index, start=start, tokens=tokens, batch=batch)

    def drew(self, sequence: Sequence, now_ns: int, batch: int) -> None:
        """Note a token of a choice on the host. If a step yields two, the second one comes 0 ns after the first."""
        if sequence.last_token_ns is None:
            self._account.note(EventKind.FIRST_TOKEN, now_ns, sequence.index, batch=batch)
            if self._times.first_token is None:
                self._times.first_token = now_ns
                # The phase `prefill` ends with the last step.
                if self._steps is not None and self._causes is not None and self._causes.has_begun:
                    self._steps.decodes.settle(self._causes)
                    self._account.prefill_causes_ns = self._causes.phase_ended(self._steps.totals)
                    self._phase_ended("prefill")
                    self._first_token_step = self._steps.number
            sequence.last_token_ns = now_ns
        else:
            self.drew_next(sequence, now_ns)

    def drew_next(self, sequence: Sequence, now_ns: int) -> None:
        """Do the same as `drew` for each token of a choice except its first."""
        assert sequence.last_token_ns is not None
        self._account.inter_token_ns.append(now_ns - sequence.last_token_ns)
        sequence.last_token_ns = now_ns

    def finished(self, sequence: Sequence, reason: str, now_ns: int, batch: int) -> None:
        if sequence in self._preempted_ns:  # Its last token was drawn by the step that was under way.
            self._account.stalled_ns += now_ns - self._preempted_ns.pop(sequence)
            if self._causes is not None:
                self._causes.resumed()
        self._account.note(EventKind.FINISHED, now_ns, sequence.index, reason=reason, batch=batch)

    def close(self, numbers: EngineNumbers, now_ns: int) -> None:
        account = self._account
        before = self._before
        account.stalled_ns += sum(now_ns - since_ns for since_ns in self._preempted_ns.values())
        if self._steps is not None and self._causes is not None:
            self._steps.clients.closed(self._causes.client)
        queued_ns = self._times.media_encoded or self._times.tokenized
        if self._times.scheduled is None and queued_ns is not None:
            self._phase_ended("queue", now_ns - queued_ns)
        if before is None:
            return
        account.first_step = before.num_steps
        for name in ("num_steps", "model_ns", "num_step_sequences", "num_step_tokens"):
            setattr(account, name, getattr(numbers, name) - getattr(before, name))
        if self._steps is not None and self._causes is not None:
            self._steps.decodes.settle(self._causes)
            causes_ns = self._causes.phase_ended(self._steps.totals)
            first_token_step = self._first_token_step
            if first_token_step is None:
                account.prefill_causes_ns = causes_ns
                first_token_step = numbers.num_steps
                self._phase_ended("prefill")
            else:
                account.decode_causes_ns = causes_ns
                self._phase_ended("decode")
            account.num_prefill_steps = first_token_step - before.num_steps
            self._note_machine_users(self._steps.users, now_ns)

    def _note_machine_users(self, users: MachineUsers | None, now_ns: int) -> None:
        account = self._account
        since_ns = self._times.scheduled
        if users is None or since_ns is None:
            return
        causes = (account.prefill_causes_ns, account.decode_causes_ns)
        least_ns = MACHINE_SHARE * (now_ns - since_ns)
        if any(sum(each.get(cause, 0) for each in causes) > least_ns for cause in (Cause.MACHINE, Cause.UNEXPLAINED)):
            account.machine_users_ns = users.between(since_ns, now_ns)


class StepAccount:
    """Records steps, each with the device's idle time before it and the parts of the engine thread's time."""

    def __init__(
        self, host: HostTime, causes: StepCauses | None = None, cores_ns: Callable[[], int] = process_time_ns
    ) -> None:
        """`cores_ns` returns the CPU time of the process so far."""
        self._host = host
        self._causes = causes
        self._cores_ns = cores_ns
        self._divided_ns = host.since_ns  # the time up to which everything is divided
        self._carried_ns = 0  # part of it that belongs to the next step
        self._host_before_ns = host.spent_ns.copy()  # `spent_ns` when the last step ended
        self.numbers = EngineNumbers(load=LoadTotals(host.since_ns))
        self.steps: deque[StepRecord] = deque(maxlen=MOST_STEPS_KEPT)  # Engine.take_steps takes them out
        self._num_masked_before = 0  # `num_masked_draws` when the last step ended
        self.work_since_ns = 0  # the end of the last time without work
        self._last_ended_ns = 0
        self._num_begun_tokens = 0  # uncomputed tokens of the prompts that the last step computed in part

    @property
    def is_first_step(self) -> bool:
        """Whether no step has ended since the engine last had no work."""
        return self.work_since_ns > self._last_ended_ns

    def work_began(self, now_ns: int) -> None:
        """Record the end of a time without work, which belongs to no request."""
        self.work_since_ns = now_ns
        if self._causes is not None:
            shares = self._causes.shares
            shares.cores.step_ended(self._cores_ns() - shares.cores.total, 0)
            shares.time.step_ended(max(0, now_ns - self._divided_ns), 0)
            self._divided_ns = max(now_ns, self._divided_ns)
            shares.show(self.numbers)

    @contextmanager
    def encoding(self, account: EngineAccount, own: RequestCauses | None) -> Iterator[None]:
        """Account for one piece of encoding a request's image or sound, between two steps. `own` is None for a request
        that has ended."""
        began_ns = self._host.enter(HostPart.ENCODE)
        began_cores_ns = self._cores_ns()
        try:
            yield
        finally:
            core_ns = self._cores_ns() - began_cores_ns
            ended_ns = self._host.enter(HostPart.COMMANDS)
            encode_ns = ended_ns - began_ns
            account.media.encode_ns += encode_ns
            account.media.core_ns += core_ns
            self.numbers.media_encode_ns += encode_ns
            if self._causes is not None:
                if own is not None:
                    self._causes.clients.encoded(own.client, encode_ns)
                    own.media_ns += encode_ns if own.has_begun else 0
                self._causes.encoded_ns += encode_ns
                self._carried_ns += began_ns - self._divided_ns
                self._divided_ns = ended_ns
                self._causes.shares.encoded(own, core_ns, encode_ns)

    def step_ended(self, step: Step, result: StepResult, launched_ns: int, ended_ns: int) -> int:
        """Record a step whose results are on the host. Return the sum of its duration and the idle time before it.

        Steps run one after the other, so a step begins with its launch, or with the end of the step before. The host
        notices that end when it takes the results, which may be late. If the device has a clock of its own, its times
        are used instead.
        """
        last_ns = self._last_ended_ns
        since_ns = self.work_since_ns
        began_ns = launched_ns if launched_ns > last_ns else last_ns
        duration_ns = ended_ns - began_ns
        busy_since_ns = since_ns if since_ns > last_ns else last_ns
        work_ns = ended_ns - busy_since_ns
        idle_ns = began_ns - busy_since_ns
        if idle_ns < 0:  # The step was launched before the previous one had ended.
            idle_ns = 0
        if result.device_ns is not None:
            duration_ns = result.device_ns
        if result.device_gap_ns is not None:
            idle_ns = min(result.device_gap_ns, launched_ns - self.work_since_ns)
        self._last_ended_ns = ended_ns
        before_ns = self._host_before_ns
        self._host_before_ns = self._host.spent_ns.copy()
        idle_ns = max(0, idle_ns - (self._host_before_ns[_ENCODE] - before_ns[_ENCODE]))
        load = load_of(step)
        num_sequences = len(step.chunks)
        num_tokens = load.num_tokens
        kind = kind_of(step, load)
        self._num_begun_tokens = 0
        if kind is not StepKind.DECODE:
            self._num_begun_tokens = sum(c.sequence.num_uncomputed for c in step.chunks if not c.max_draws)
        numbers = self.numbers
        num_masked_before = self._num_masked_before
        self._num_masked_before = numbers.num_masked_draws
        cost_error = None
        if self._causes is not None:
            self._divide(self._causes.shares, ended_ns)
            masks_ns = 0
            if numbers.num_masked_draws > num_masked_before:
                masks_ns = self._host_before_ns[_MASKS] - before_ns[_MASKS]
            cost_error = self._causes.step_ended(
                step, load, ended_ns, duration_ns, idle_ns, masks_ns, work_ns, result.device_ns is not None
            )
        self.steps.append(
            StepRecord(
                kind,
                began_ns,
                duration_ns,
                idle_ns,
                num_sequences,
                num_tokens,
                host_ns={part: spent_ns - before_ns[part] for part, spent_ns in self._host_before_ns.items()},
                cost_error=cost_error,
            )
        )
        numbers.idle_with_work_ns += idle_ns
        numbers.num_steps += 1
        numbers.model_ns += duration_ns
        numbers.num_step_sequences += num_sequences
        numbers.num_step_tokens += num_tokens
        return idle_ns + duration_ns

    def _divide(self, shares: Shares, ended_ns: int) -> None:
        """Read the meters at the end of a step."""
        shares.cores.step_ended(0, self._cores_ns() - shares.cores.total)
        shares.time.step_ended(0, self._carried_ns + ended_ns - self._divided_ns)
        self._carried_ns = 0
        self._divided_ns = ended_ns

    def published(self, scheduler: Scheduler, now_ns: int, num_open: int) -> EngineNumbers:
        """Update the numbers of this moment, with `num_open` requests, and return a copy of all numbers."""
        numbers = self.numbers
        pool = scheduler.pool
        numbers.num_running = num_running = len(scheduler.running)
        numbers.num_deferred = scheduler.foreground.num_parked
        numbers.num_waiting = scheduler.foreground.num_waiting + numbers.num_deferred
        numbers.by_adapter = scheduler.by_adapter()
        numbers.blocks_used = pool.num_used
        numbers.blocks_total = pool.num_blocks
        numbers.blocks_cached = pool.num_cached
        numbers.blocks_reusable = pool.num_reusable
        numbers.num_evicted_blocks = pool.num_evicted
        numbers.evicted_unused_ns = float(pool.evicted_unused_ns)
        numbers.num_preemptions = scheduler.foreground.num_preemptions
        numbers.num_prefix_queries = scheduler.memory.num_prefix_queries
        numbers.num_prefix_hits = scheduler.memory.num_prefix_hits
        numbers.num_background_running = len(scheduler.background.running)
        numbers.num_background_waiting = scheduler.background.num_waiting + scheduler.background.num_parked
        if scheduler.tier is not None:
            scheduler.tier.show(numbers)
        num_begun_tokens = self._num_begun_tokens if num_running else 0
        numbers.load = numbers.load.after(now_ns, num_open, numbers.num_waiting_tokens + num_begun_tokens)
        return self.copy(idle_since_ns=None)

    def copy(self, idle_since_ns: int | None) -> EngineNumbers:
        """Return a copy of the numbers. The engine thread has been idle since then, or works if that is None."""
        self.numbers.host_ns = self._host.spent_ns.copy()
        self.numbers.idle_since_ns = idle_since_ns
        return self.numbers.copy()
