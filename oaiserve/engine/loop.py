"""The engine thread takes commands, schedules and launches steps, and hands over their results. No torch: the runner is
passed in.

The thread owns scheduler, runner and open requests. Commands come in through one inbox, events leave by one call per
step and consumer, and numbers leave as an immutable snapshot. So there are no locks.

With overlap, a step is launched before the results of the step before are on the host, so that the device computes
while these are handed over. At most one step is in flight when the next is scheduled. Draws that need the ids of the
step in flight wait until these are committed; the forward and all other draws of the step do not. The masks of grammars
are filled behind the launch of the forward, while the device computes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

from oaiserve.engine.accounts.host_time import HostTime
from oaiserve.engine.accounts.step_account import StepAccount
from oaiserve.engine.accounts.step_causes import Machine, StepCauses
from oaiserve.engine.drafting.drafts import Drafts
from oaiserve.engine.grammars.masks import fill_masks
from oaiserve.engine.open_requests import Bounds, OpenRequest, OpenRequests
from oaiserve.engine.pacing import PrefillBudget
from oaiserve.engine.profiling import EndProfile, Profiling, StartProfile
from oaiserve.engine.request import Deliver, Failed, Request, Usage
from oaiserve.engine.scheduler import Scheduler
from oaiserve.engine.sequence import Place, Sequence
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.shared_limit import SharedLimit
from oaiserve.engine.shortage import Shortage, compute_in_parts, copy_in_parts
from oaiserve.engine.step import Chunk, ChunkResult, Draw, Masks, OutOfMemory, Step, StepResult
from oaiserve.engine.tokenize import GrammarCompiled, Tokenized, TokenizeFailed, TokenizeStarted
from oaiserve.errors import AdapterUnloaded, APIError, InternalError, Unavailable
from oaiserve.explain.step_cost_fit import FitThread, Run, StepCostFit
from oaiserve.facts.record import EngineAccount, HostPart
from oaiserve.facts.times import RequestTimes

log = logging.getLogger(__name__)

WARN_INTERVAL_NS = 60_000_000_000  # between two equal warnings


@dataclass(frozen=True, slots=True)
class Submitted:
    """The command to open a request."""

    request: Request
    deliver: Deliver
    at_ns: int


@dataclass(frozen=True, slots=True)
class Abort:
    """The command to abort a request, which may have ended."""

    request_id: str


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """The command to drop an adapter, by its number, when the last request that has it has ended."""

    number: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The command to end the thread: with `drain` when all open requests have ended, else at once, failing them."""

    drain: bool


@dataclass(frozen=True, slots=True)
class Broken:
    """The command to fail, because a process that the runner needs has ended."""

    error: Exception


FromTokenizer = TokenizeStarted | GrammarCompiled | Tokenized | TokenizeFailed
Command = Submitted | FromTokenizer | Abort | DropAdapter | Stop | Broken | StartProfile | EndProfile


@dataclass(slots=True)
class _Launched:
    """A step that has been launched, and has not ended."""

    step: Step
    handle: Any  # what the runner has returned
    at_ns: int
    draft_ns: int  # that the draft model took for it, from then on
    newcomers: list[OpenRequest]  # the requests whose first step it is


class EngineLoop:
    def __init__(
        self,
        model: ServedModel,
        scheduler: Scheduler,
        bounds: Bounds,
        *,
        waiting: SharedLimit,
        clock_ns: Callable[[], int],
        stop_tokenizing: Callable[[str], None],
        give_back_later: Callable[[], None],
        overlap: bool,
        drafts: Drafts | None,
        itl_target_seconds: float | None,
        machine: Machine | None,
        learn: Run | None,
    ) -> None:
        """Make the loop. With the `machine`, the time of requests in steps is divided into its causes. `learn` runs the
        fits of what steps cost; by default, a thread of their own does. `give_back_later` is called when much memory
        has been freed."""
        self._scheduler = scheduler
        self._runner = model.runner
        self._adapters = model.adapters
        self._give_back_later = give_back_later
        self._vocab_size = model.vocab_size
        self._clock_ns = clock_ns
        self._overlap = overlap
        self._drafts = drafts
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._warm_up = model.warm_up
        self._is_warm = Event()
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        # owned by the engine thread
        self._draining = False
        self._dropping: list[int] = []  # adapters that are dropped when no request has them any more
        self._in_flight: _Launched | None = None
        self._host = HostTime(clock_ns, model.ranges)
        self._profiling = Profiling(model.profiler, self._host)
        self._fits = FitThread()
        self.causes = None if machine is None else StepCauses(machine, StepCostFit(learn or self._fits.run))
        self._account = StepAccount(self._host, self.causes)
        self._warned_ns: dict[str, int] = {}  # when each warning was logged last
        self._shortage = Shortage(scheduler.limits.max_step_tokens)
        self._pacing: PrefillBudget | None = None
        if itl_target_seconds is not None:
            self._pacing = PrefillBudget(itl_target_seconds, scheduler.limits.max_step_tokens)
        # written by the engine thread, read by any thread
        self.requests = OpenRequests(
            model,
            scheduler,
            self._account.numbers,
            bounds,
            waiting=waiting,
            clock_ns=clock_ns,
            stop_tokenizing=stop_tokenizing,
            causes=self.causes,
        )
        self.failure: BaseException | None = None
        self.is_stopped = False
        self._account.numbers.blocks_total = scheduler.pool.num_blocks
        self.snapshot = self._account.numbers.copy()
        self.steps = self._account.steps

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self.is_stopped

    def start(self) -> None:
        """Start the thread, and wait until it has warmed up what the runner needs of its own on each thread."""
        self._thread.start()
        self._is_warm.wait()

    def post(self, command: Command) -> None:
        """Put a command into the inbox, from any thread. After the end of the loop, the poster refuses it itself."""
        self._inbox.put(command)
        if self.is_stopped:
            for left in self._commands_left():
                self._refuse(left)

    def join(self, timeout_seconds: float | None = None) -> bool:
        """Wait for the thread to end, and return whether it has."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._warm_up()
            if self.causes is not None:
                self.causes.begin()
            self._is_warm.set()
            while self._take_commands():
                self._turn()
        except BaseException as error:  # a panic in Rust code is no Exception
            log.exception("The engine has stopped")
            self.failure = error
        finally:
            self._close()
            self._is_warm.set()

    def _turn(self) -> None:
        self._end_overdue()
        if self.requests.has_events:
            self._hand_over()  # of requests that have ended between two steps
        launched = self._launch()
        in_flight, self._in_flight = self._in_flight, launched
        if in_flight is not None:
            self._complete(in_flight)
            if launched is not None:
                self._scheduler.settle(launched.step)
        if launched is not None:
            self._draw(launched.step, launched.handle)
        if launched is not None and not self._overlap:
            self._in_flight = None
            self._complete(launched)
        elif in_flight is None:
            self._publish()
        if self._profiling.is_complete:
            self._profiling.finish(self._clock_ns())

    def _launch(self) -> _Launched | None:
        now_ns = self._host.enter(HostPart.SCHEDULE)
        if self._shortage.is_on:
            self._shortage.recover(now_ns)
            self._scheduler.max_step_tokens = self._shortage.step_tokens
        if self._drafts is not None and (self._runner.is_exact or not self._drafts.only_if_exact):
            self._drafts.propose(self._scheduler.running, others_wait=self._scheduler.num_waiting > 0)
        step = self._scheduler.schedule(now_ns)
        if step is None:
            return None
        if step.preempted:
            self._warn_of_preemptions(now_ns)
        newcomers = self.requests.scheduled(step, now_ns)
        began_ns = self._write_drafts(step)
        launched_ns = self._host.enter(HostPart.LAUNCH, step)
        at_ns = launched_ns if began_ns is None else began_ns
        draft_ns = launched_ns - at_ns
        if step.copies and not self._copy_blocks(step, now_ns):
            return None
        if self._shortage.allows(step) or self._scheduler.states is not None:
            try:
                handle = self._runner.launch(step)
            except OutOfMemory as error:
                self._report_shortage(step, error, now_ns)
                if self._scheduler.states is not None:
                    # Some layers have changed their states, and others have not: the step cannot be computed again.
                    self._fail_for_memory(self._scheduler.lose_states())
                    return None
            else:
                self._profiling.launched()
                self._scheduler.advance(step)
                return _Launched(step, handle, at_ns, draft_ns, newcomers)
        self._compute_in_parts(step, at_ns, draft_ns, newcomers)
        return None

    def _write_drafts(self, step: Step) -> int | None:
        """Have the draft model write the drafts that are its own. Return when it began, or None if there are none."""
        model = None if self._drafts is None else self._drafts.model
        if model is None or not model.is_asked:
            return None
        began_ns = self._host.enter(HostPart.DRAFT, step)
        model.write(step)
        return began_ns

    def _copy_blocks(self, step: Step, now_ns: int) -> bool:
        """Copy the blocks of a step. Return False if there is no memory for one of them: then the step has failed."""
        try:
            self._runner.copy_blocks(step.copies)
        except OutOfMemory as error:
            self._report_shortage(step, error, now_ns)
            if not copy_in_parts(self._runner.copy_blocks, step.copies):
                # A sequence may have got a copy and no chunk. It must not go on without its keys and values either.
                targets = {target for _, target in step.copies}
                concerned = [chunk.sequence for chunk in step.chunks]
                concerned += [one for one in self._scheduler.running if not targets.isdisjoint(one.blocks)]
                self._fail_for_memory(concerned)
                return False
        return True

    def _compute_in_parts(self, step: Step, at_ns: int, draft_ns: int, newcomers: list[OpenRequest]) -> None:
        """Compute a step that the device has no memory for. Afterwards it has ended, and none is in flight."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            self._complete(in_flight)  # parts need the ids that it draws, which only the device has
            self._scheduler.settle(step)
        # The blocks of sequences that this has ended are free, but no other sequence has got them yet.
        chunks = [
            chunk._replace(max_draws=0) if chunk.draw is Draw.SUPERSEDED else chunk
            for chunk in step.chunks
            if chunk.sequence.place is Place.RUNNING and chunk.draw is not Draw.VOID
        ]
        if not chunks:
            return
        # Without their drafts they are smaller. Chunks of one token come first.
        chunks = sorted((chunk.without_draft() for chunk in chunks), key=lambda chunk: chunk.num_tokens > 1)
        results = compute_in_parts(self._compute, Step(chunks), self._shortage.step_tokens)
        self._profiling.launched()
        self._fail_for_memory([chunk.sequence for chunk, result in zip(chunks, results, strict=True) if result is None])
        # Before the others advance: what a failed sequence has not computed must not get into the prefix cache.
        computed = [
            (chunk, result)
            for chunk, result in zip(chunks, results, strict=True)
            if result is not None and chunk.sequence.place is Place.RUNNING
        ]
        if computed:
            step = Step([chunk for chunk, _ in computed])
            self._scheduler.advance(step)
            launched = _Launched(step, None, at_ns, draft_ns, newcomers)
            self._end_step(launched, StepResult([result for _, result in computed]))

    def _compute(self, part: Step) -> list[ChunkResult]:
        self._host.enter(HostPart.LAUNCH, part)
        handle = self._runner.launch(part)
        self._draw(part, handle)
        self._host.enter(HostPart.WAIT, part)
        return self._runner.collect(handle).chunks

    def _draw(self, step: Step, handle: Any) -> None:
        """Have the late draws of a settled step made, with the masks of grammars."""
        late = [chunk for chunk in step.chunks if chunk.draw is Draw.LATE]
        masks = self._fill_masks(step, late) if late else None
        if late and self._host.part is not HostPart.LAUNCH:
            self._host.enter(HostPart.LAUNCH, step)
        self._runner.draw(handle, masks)

    def _fill_masks(self, step: Step, late: list[Chunk]) -> Masks | None:
        """Return the masks for the draws of a step. A request whose grammar fails has failed."""
        constrained = [c for c in late if c.sequence.constraint is not None and self.requests.has_open(c.sequence)]
        if not constrained:
            return None
        self._host.enter(HostPart.MASKS, step)
        masks, failed = fill_masks(constrained, self._vocab_size)
        if masks is not None:
            self._account.masks_filled(len(masks.words))
            self.requests.masked(chunk for chunk in constrained if chunk.sequence in masks.rows)
        for sequence, error in failed:
            self.requests.grammar_failed(sequence, error)
        return masks

    def _fail_for_memory(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            message = "The device has no memory left to go on with this request; try again later."
            self.requests.fail(sequence.request_id, Unavailable(message))

    def _complete(self, launched: _Launched) -> None:
        self._host.enter(HostPart.WAIT, launched.step)
        self._end_step(launched, self._runner.collect(launched.handle))

    def _end_step(self, launched: _Launched, result: StepResult) -> None:
        step = launched.step
        ended_ns = self._host.enter(HostPart.PROCESS, step)
        for opened in launched.newcomers:
            opened.notes.first_step_ended(self._account.numbers)
        step_ns = self._account.step_ended(step, result, launched.at_ns, ended_ns)
        if self._drafts is not None:
            self._drafts.verified(step, result.chunks, step_ns - launched.draft_ns, launched.draft_ns)
        self.requests.computed(step, result.chunks, ended_ns)
        self._pace(step, step_ns)
        self._hand_over()

    def _take_commands(self) -> bool:
        """Take all commands from the inbox, and wait for one if there is nothing to compute.

        Return False if the thread is to end.
        """
        self._host.enter(HostPart.COMMANDS)
        if self._dropping:
            self._drop_adapters()
        while self.requests or not self._draining:
            try:
                is_idle = self._in_flight is None and not self._scheduler.has_work and not self.requests.has_events
                command = self._wait_for_command() if is_idle else self._inbox.get_nowait()
            except Empty:
                return True
            match command:
                case Submitted():
                    self._submitted(command)
                case TokenizeStarted():
                    self.requests.tokenize_started(command.request, command.at_ns)
                case GrammarCompiled():
                    self.requests.grammar_compiled(command.request, command.grammar, command.at_ns)
                case Tokenized():
                    self.requests.tokenized(command, self._runner.kv_version)
                case TokenizeFailed():
                    self.requests.tokenize_failed(command.request, command.error)
                case Abort():
                    self.requests.abort(command.request_id)
                case DropAdapter():
                    self._dropping.append(command.number)
                    self._drop_adapters()
                case StartProfile():
                    self._profiling.start(command, self._clock_ns())
                case EndProfile():
                    self._profiling.end(command, self._clock_ns())
                case Broken():
                    raise command.error
                case Stop(drain=True):
                    self._draining = True
                case Stop():
                    return False
        return False

    def _submitted(self, command: Submitted) -> None:
        request = command.request
        self.requests.submitted(request, command.deliver, command.at_ns)
        if request.adapter and not self._adapters.holds(request.adapter):
            message = "The adapter that 'model' names has just been unloaded."
            self.requests.fail(request.request_id, AdapterUnloaded(message, param="model"))

    def _drop_adapters(self) -> None:
        unused = [number for number in self._dropping if not self.requests.has_adapter(number)]
        for number in unused:
            self._dropping.remove(number)
            self._adapters.drop(number)
            self._give_back_later()

    def _wait_for_command(self) -> Command:
        """Wait for a command, and return it. Raises Empty if a deadline passes before."""
        since_ns = self._host.enter(HostPart.IDLE)
        self.snapshot = self._account.copy(since_ns)
        try:
            return self._inbox.get(timeout=self._seconds_to_deadline())
        finally:
            self._account.work_arrived(self._host.enter(HostPart.COMMANDS))
            self.snapshot = self._account.copy(idle_since_ns=None)

    def _seconds_to_deadline(self) -> float | None:
        deadlines_ns = self.requests.deadlines_ns
        if self._profiling.deadline_ns is not None:
            deadlines_ns.append(self._profiling.deadline_ns)
        return max(0.0, (min(deadlines_ns) - self._clock_ns()) / 1e9) if deadlines_ns else None

    def _end_overdue(self) -> None:
        now_ns = self._clock_ns()
        if self._profiling.deadline_ns is not None and self._profiling.deadline_ns <= now_ns:
            self._profiling.finish(now_ns)
        self.requests.end_overdue(now_ns)

    def _warn_of_preemptions(self, now_ns: int) -> None:
        self._warn(
            now_ns,
            "The KV cache is full: %d preemptions so far. What they lose is computed again; more --kv-cache-memory "
            "or a lower --max-running avoids that.",
            self._scheduler.num_preemptions,
        )

    def _report_shortage(self, step: Step, error: OutOfMemory, now_ns: int) -> None:
        self._shortage.shrink(step.num_tokens, now_ns)
        self._warn(
            now_ns,
            "The device had no memory for a step of %d tokens of %d sequences; %d such steps so far. They are "
            "computed in parts, and for a while steps have at most %d tokens. Something else takes the device's "
            "memory, or the KV cache leaves too little of it: lower --gpu-memory-utilization. %s",
            step.num_tokens,
            len(step.chunks),
            self._shortage.num_steps,
            self._shortage.step_tokens,
            error,
        )

    def _warn(self, now_ns: int, message: str, *arguments: object) -> None:
        """Log a warning, unless the same one was logged within WARN_INTERVAL_NS."""
        warned_ns = self._warned_ns.get(message)
        if warned_ns is None or now_ns - warned_ns > WARN_INTERVAL_NS:
            self._warned_ns[message] = now_ns
            log.warning(message, *arguments)

    def _pace(self, step: Step, step_ns: int) -> None:
        if self._pacing is not None:
            num_decodes = sum(chunk.num_known == 1 for chunk in step.chunks)
            num_prefill_tokens = step.num_tokens - step.num_draft_tokens - num_decodes
            self._pacing.observe(num_decodes, num_prefill_tokens, step_ns)
            self._scheduler.prefill_budget = self._pacing.tokens

    def _hand_over(self) -> None:
        self._host.enter(HostPart.HAND_OVER)
        self._publish()  # before the events: once a request has ended, the numbers are without it
        self.requests.hand_over()

    def _publish(self) -> None:
        self.requests.observe_drain()
        numbers = self._account.numbers
        numbers.num_waiting_tokens = self.requests.num_waiting_tokens
        numbers.drain_rate = self.requests.drain_rate.per_second
        numbers.num_out_of_memory = self._shortage.num_steps
        self.snapshot = self._account.published(self._scheduler, self._host.since_ns, len(self.requests))

    def _close(self) -> None:
        """End all requests that have not ended, whatever has ended the loop."""
        self.is_stopped = True
        self._profiling.finish(self._clock_ns(), self._reason())
        for command in self._commands_left():
            match command:
                case Submitted():
                    self.requests.submitted(command.request, command.deliver, command.at_ns)
                case TokenizeStarted():
                    self.requests.tokenize_started(command.request, command.at_ns)
                case StartProfile():
                    self._refuse(command)
        self.requests.fail_all(self._reason())
        self._hand_over()
        self._fits.stop()

    def _reason(self) -> APIError:
        if self.failure is not None:
            return InternalError("The engine has stopped after an internal error; the server must be restarted.")
        return Unavailable("The server is shutting down.", retry_after_seconds=5)

    def _commands_left(self) -> Iterator[Command]:
        while True:
            try:
                yield self._inbox.get_nowait()
            except Empty:
                return

    def _refuse(self, command: Command) -> None:
        if isinstance(command, Submitted):
            times = RequestTimes(received=command.request.received_ns or command.at_ns, submitted=command.at_ns)
            failed = Failed(command.request.request_id, self._reason(), Usage(0, 0, 0), times, EngineAccount())
            command.deliver([failed])
        if isinstance(command, StartProfile) and command.future.set_running_or_notify_cancel():
            command.future.set_exception(self._reason())
