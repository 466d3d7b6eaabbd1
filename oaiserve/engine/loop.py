"""The engine thread: takes commands between two steps, and hands over the events of each step. No torch.

The thread owns scheduler, runner and open requests. Commands arrive in one inbox, events leave by one call per step and
consumer, and numbers are published as an immutable snapshot. So there are no locks. `Stepper` computes the steps;
the runtime owns the thread, whose turns take all commands and compute at most one step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from oaiserve.engine.accounts.host_time import HostTime
from oaiserve.engine.accounts.shares import Shares
from oaiserve.engine.accounts.step_account import RequestNotes, StepAccount
from oaiserve.engine.accounts.step_causes import StepCauses
from oaiserve.engine.encoder import Encoder
from oaiserve.engine.engine_parts import EngineParts
from oaiserve.engine.request import Failed, Request, Usage
from oaiserve.engine.requests.commands import Abort, Command, DropAdapter, Stop, Submitted
from oaiserve.engine.requests.open_requests import OpenRequests
from oaiserve.engine.scheduling.scheduler import Scheduler
from oaiserve.engine.sequences.step import OutOfMemory
from oaiserve.engine.stepper import Stepper
from oaiserve.engine.tiers.lower_tier import BlocksArrived
from oaiserve.engine.tokenize import GrammarCompiled, Tokenized, TokenizeFailed, TokenizeStarted
from oaiserve.engine.watchdog import Watchdog
from oaiserve.errors import AdapterUnloaded, APIError, InternalError, Unavailable
from oaiserve.explain.step_cost_fit import FitWorker, StepCostFit
from oaiserve.facts.record import EngineAccount
from oaiserve.facts.step_record import HostPart
from oaiserve.facts.times import RequestTimes
from oaiserve.http.shared_limit import SharedLimit
from oaiserve.runtime import AT_ONCE, ENDED, Empty, When, Worker

if TYPE_CHECKING:
    from oaiserve.engine.profiler_ranges import PhaseRanges

log = logging.getLogger(__name__)


class EngineLoop:
    def __init__(
        self,
        parts: EngineParts,
        scheduler: Scheduler,
        *,
        waiting: SharedLimit,
        stop_tokenizing: Callable[[str], None],
        give_back_later: Callable[[], None],
    ) -> None:
        """Make the loop. `waiting` and `stop_tokenizing` are passed on to `OpenRequests`. `give_back_later` is called
        after much memory has been freed."""
        model = parts.model
        options = parts.options
        clock_ns = parts.runtime.clock_ns
        self._model = model
        self._scheduler = scheduler
        self._give_back_later = give_back_later
        self._clock_ns = clock_ns
        self._worker: Worker[Command] = parts.runtime.worker("engine", self.turn, self._begin)
        # owned by the engine thread
        self._draining = False
        self._is_resting = True  # also before the first turn
        self._dropping: list[int] = []  # adapters to drop when their last request ends
        self._host = HostTime(clock_ns)
        self.phases: PhaseRanges | None = None
        new_notes: Callable[..., RequestNotes] = RequestNotes
        if model.ranges is not None:
            from oaiserve.engine.accounts.ranged import RangedHostTime, RangedNotes
            from oaiserve.engine.profiler_ranges import PhaseRanges

            self._host = RangedHostTime(clock_ns, model.ranges)
            self.phases = PhaseRanges(model.ranges)
            new_notes = partial(RangedNotes, self.phases)
        self._fits = FitWorker(parts.runtime)
        self.causes = None
        if parts.machine is not None:
            time_fit, cores_fit = (StepCostFit(parts.learn or self._fits.run) for _ in range(2))
            shares = Shares(parts.cores_ns(), cores_fit)
            self.causes = StepCauses(parts.machine, time_fit, shares, lambda: self.watchdog.num_looks, parts.users)
        causes = self.causes
        cost = (lambda: None) if causes is None else (lambda: causes.slowed_cost)
        self.watchdog = Watchdog(
            self._host,
            cost,
            options.watchdog_seconds,
            exits=options.exit_on_hang,
            each_second=self._look_at_users,
            runtime=parts.runtime,
        )
        self._account = StepAccount(self._host, self.causes, parts.cores_ns)
        self.arriving: dict[str, Submitted] = {}  # requests in the inbox; written and read by any thread
        # written by the engine thread, read by any thread
        self.requests = OpenRequests(
            model,
            scheduler,
            self._account.numbers,
            parts.bounds,
            waiting=waiting,
            clock_ns=clock_ns,
            stop_tokenizing=stop_tokenizing,
            rates=parts.rates,
            causes=self.causes,
            note_end=self.phases.leave if self.phases is not None else lambda request_id: None,
            new_notes=new_notes,
        )
        self._stepper = Stepper(
            model,
            scheduler,
            self.requests,
            self._account,
            self._host,
            self._hand_over,
            self._publish,
            overlap=parts.overlap,
            drafts=parts.drafts,
        )
        self._encoder: Encoder | None = None
        if model.media is not None:
            self._encoder = Encoder(
                model.media.tower,
                model.media.vectors,
                clock_ns,
                self._account.numbers,
                self._accounted,
                by_client=scheduler.order.by_client,
            )
        self.failure: BaseException | None = None
        self.is_stopped = False
        self._account.numbers.blocks_total = scheduler.pool.num_blocks
        self.snapshot = self._account.numbers.copy()
        self.steps = self._account.steps

    def _look_at_users(self) -> None:
        if self.causes is not None and self.causes.users is not None:
            self.causes.users.look(self.causes.machine_ns, self.causes.totals.unexplained)

    @property
    def is_alive(self) -> bool:
        return self._worker.is_alive and not self.is_stopped

    def start(self) -> None:
        """Start the thread, and wait until it has warmed up what the runner needs for each thread."""
        self._worker.start()
        self.watchdog.start()

    def post(self, command: Command) -> None:
        """Put a command into the inbox, from any thread. If the loop has ended, the command is refused on the calling
        thread."""
        if isinstance(command, Submitted):
            self.arriving[command.request.request_id] = command
        self._worker.post(command)
        if self.is_stopped:
            for left in self._commands_left():
                self._refuse(left)

    def join(self, timeout_seconds: float | None = None) -> bool:
        return self._worker.join(timeout_seconds)

    def _begin(self) -> None:
        try:
            self._model.warm_up()
            if self.causes is not None:
                self.causes.begin()
        except BaseException as error:
            self._fail(error)

    def turn(self) -> When:
        """Take all commands, then advance everything that can advance. Return when the next turn is due."""
        if self.is_stopped:
            return ENDED
        try:
            now_ns = self._host.enter(HostPart.COMMANDS)
            if self._is_resting:
                self._is_resting = False
                self._account.work_began(now_ns)
                self.snapshot = self._account.copy(idle_since_ns=None)
            if not self._take_commands():
                self._close()
                return ENDED
            if self._is_idle:
                next_ns = self.requests.limits.deadlines.next_ns
                if next_ns is None or next_ns > self._clock_ns():
                    self._rest()
                    return next_ns
            self._go_on()
        except BaseException as error:  # A panic in Rust code is not an Exception.
            self._fail(error)
            return ENDED
        return AT_ONCE

    @property
    def _is_idle(self) -> bool:
        if self._encoder is not None and self._encoder.has_work:
            return False
        return not (self._stepper.has_step or self._scheduler.has_work or self.requests.has_events)

    def _rest(self) -> None:
        """Publish the numbers of an idle engine, which remain valid until the next turn."""
        self._is_resting = True
        self.snapshot = self._account.copy(self._host.enter(HostPart.IDLE))

    def _go_on(self) -> None:
        now_ns = self._clock_ns()
        self.requests.end_overdue(now_ns)
        self.requests.take_up()
        if self._encoder is not None and self._encoder.has_work:
            self._encode(self._encoder)
        if self.requests.has_events:
            self._hand_over()  # Some requests may have ended between two steps.
        if not self._stepper.turn():
            self._publish()

    def _encode(self, encoder: Encoder) -> None:
        """Run the encoder for one time slice, and start the prompts whose media are ready."""
        is_alone = not self._stepper.has_step and not self._scheduler.has_work
        for ready in encoder.turn(is_alone=is_alone):
            if ready.error is None:
                self.requests.encoded(ready.encoding)
                continue
            request = ready.encoding.tokenized.request
            if self.requests.find(request) is None:
                continue
            request_id = request.request_id
            if isinstance(ready.error, OutOfMemory):
                message = "The device has no memory left for this request's images; try again later."
                self.requests.fail(request_id, Unavailable(message))
            elif isinstance(ready.error, APIError):
                self.requests.fail(request_id, ready.error)
            else:
                log.error("The images of request %s could not be encoded", request_id, exc_info=ready.error)
                self.requests.fail(request_id, InternalError("The server failed on an image of this request."))

    def _accounted(self, request: Request) -> AbstractContextManager[None] | None:
        """Return the context that accounts for encoding media of a request, or None if the request has ended."""
        opened = self.requests.find(request)
        if opened is None:
            return None
        return self._account.encoding(opened.account, opened.causes)

    def _take_commands(self) -> bool:
        """Take all commands. Return False if the thread is to end."""
        if self._dropping:
            self._drop_adapters()
        while self.requests or not self._draining:
            try:
                command = self._worker.take()
            except Empty:
                return True
            match command:
                case Submitted(request=request):
                    self._submitted(command)
                    if request.adapter and not self._model.adapters.holds(request.adapter):
                        message = "The adapter that 'model' names has just been unloaded."
                        self.requests.fail(request.request_id, AdapterUnloaded(message, param="model"))
                case TokenizeStarted():
                    self.requests.tokenize_started(command.request, command.at_ns)
                case GrammarCompiled():
                    self.requests.grammar_compiled(command.request, command.grammar, command.at_ns)
                case Tokenized() if self._encoder is not None and command.media:
                    if (opened := self.requests.admitted(command)) is not None:
                        opened.account.media.num_cached = self._encoder.add(command)
                case Tokenized():
                    self.requests.tokenized(command)
                case TokenizeFailed():
                    self.requests.tokenize_failed(command.request, command.error)
                case BlocksArrived():
                    self._scheduler.take_arrived(command)
                case Abort():
                    self.requests.abort(command.request_id)
                case DropAdapter():
                    self._dropping.append(command.number)
                    self._drop_adapters()
                case Stop(drain=True):
                    self._draining = True
                case Stop():
                    return False
        return False

    def _submitted(self, command: Submitted) -> None:
        """Open a request. Until then it counts as arriving, so one of the two lists contains it at any moment."""
        self.requests.submitted(command.request, command.deliver, command.at_ns)
        self.arriving.pop(command.request.request_id, None)

    def _drop_adapters(self) -> None:
        unused = [number for number in self._dropping if not self.requests.has_adapter(number)]
        for number in unused:
            self._dropping.remove(number)
            self._model.adapters.drop(number)
            self._give_back_later()

    def _hand_over(self) -> None:
        self._host.enter(HostPart.HAND_OVER)
        self._publish()  # Before the events: once a request has ended, the numbers no longer include it.
        self.requests.hand_over()

    def _publish(self) -> None:
        requests = self.requests
        requests.drain_rate.observe(requests.num_left_waiting, self._scheduler.foreground.num_waiting, self._clock_ns())
        numbers = self._account.numbers
        numbers.num_waiting_tokens = requests.num_waiting_tokens
        numbers.drain_rate = requests.drain_rate.per_second
        numbers.kv_byte_ns = float(self._scheduler.pool.used_ns * self._model.block_bytes)
        if self.causes is not None:
            self.causes.shares.show(numbers)
        numbers.num_out_of_memory = self._stepper.num_out_of_memory
        # Background requests don't count as load when a server is chosen.
        num_open = len(requests) - requests.num_background
        self.snapshot = self._account.published(self._scheduler, self._host.since_ns, num_open)

    def _fail(self, error: BaseException) -> None:
        log.error("The engine has stopped", exc_info=error)
        self.failure = error
        try:
            self._model.failed(error)
        finally:
            self._close()

    def _close(self) -> None:
        """End all open requests, however the loop has ended."""
        try:
            self._end_all()
        finally:
            self._host.enter(HostPart.IDLE)

    def _end_all(self) -> None:
        self.is_stopped = True
        self.watchdog.stop()
        for command in self._commands_left():
            match command:
                case Submitted():
                    self._submitted(command)
                case TokenizeStarted():
                    self.requests.tokenize_started(command.request, command.at_ns)
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
                yield self._worker.take()
            except Empty:
                return

    def _refuse(self, command: Command) -> None:
        if isinstance(command, Submitted):
            self.arriving.pop(command.request.request_id, None)
            times = RequestTimes(received=command.request.received_ns or command.at_ns, submitted=command.at_ns)
            failed = Failed(command.request.request_id, self._reason(), Usage(0, 0, 0), times, EngineAccount())
            command.deliver([failed])
