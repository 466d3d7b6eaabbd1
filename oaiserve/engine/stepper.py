"""A step, from the loop to its events. `Stepper.turn` takes each step through these stages. No torch.

    schedule   `Scheduler.schedule` chooses the chunks, after drafts were proposed for the running sequences
    launch     `Runner.launch` begins to compute them; `Scheduler.advance` counts them as computed
    settle     `Scheduler.settle` decides which draws count, once the previous step is committed
    draw       `Runner.draw` makes the late draws, with the masks of grammars
    collect    `Runner.collect` waits for the results
    take       `Results.take` turns them into tokens, commits and events
    hand over  the loop publishes its numbers and delivers the events

With overlap, a step is launched before the results of the previous one are on the host, so that the device computes
while these are handed over. At most one step is in flight when the next is scheduled. Draws that need the ids of the
step in flight wait until these are committed; the forward pass and all other draws of the step do not. The masks of
grammars are filled after the forward pass is launched, while the device computes it. Drafts follow known ids, so no
step is in flight when a step with drafts or the one after it is scheduled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oaiserve.engine.accounts.host_time import HostTime
from oaiserve.engine.accounts.step_account import StepAccount
from oaiserve.engine.drafting.drafts import Drafts
from oaiserve.engine.oversized_steps import Shortage, compute_in_parts, copy_in_parts
from oaiserve.engine.requests.open_request import OpenRequest
from oaiserve.engine.requests.open_requests import OpenRequests
from oaiserve.engine.requests.results import Results
from oaiserve.engine.scheduling.scheduler import Scheduler
from oaiserve.engine.sequences.masks import fill_masks
from oaiserve.engine.sequences.sequence import Place, Sequence
from oaiserve.engine.sequences.step import Chunk, ChunkResult, Draw, Masks, OutOfMemory, Step, StepResult
from oaiserve.engine.served_model import ServedModel
from oaiserve.errors import Unavailable
from oaiserve.facts.step_record import HostPart

log = logging.getLogger(__name__)

WARN_INTERVAL_NS = 60_000_000_000  # minimum time between two identical warnings
_LATE = Draw.LATE  # Enum members are slow to read in Python 3.11.


@dataclass(slots=True)
class _Launched:
    step: Step
    handle: Any  # returned by the runner
    at_ns: int
    newcomers: list[OpenRequest]  # requests for which this is the first step


class Stepper:
    """Takes steps from scheduling to their events. It calls `hand_over` when the events of a step are complete, and
    `publish` before the first step after an idle time."""

    def __init__(
        self,
        model: ServedModel,
        scheduler: Scheduler,
        requests: OpenRequests,
        account: StepAccount,
        host: HostTime,
        hand_over: Callable[[], None],
        publish: Callable[[], None],
        *,
        overlap: bool,
        drafts: Drafts | None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = model.runner
        self._vocab_size = model.vocab_size
        self._requests = requests
        self._results = Results(requests, scheduler, account.numbers, model.vocab_size)
        self._account = account
        self._host = host
        self._hand_over = hand_over
        self._publish = publish
        self._overlap = overlap
        self._drafts = drafts
        self._in_flight: _Launched | None = None
        self._warned_ns: dict[str, int] = {}  # when each warning was last logged
        self._shortage = Shortage(scheduler.limits.max_step_tokens)

    @property
    def has_step(self) -> bool:
        return self._in_flight is not None

    @property
    def num_out_of_memory(self) -> int:
        return self._shortage.num_steps

    def turn(self) -> bool:
        """Launch the next step and end the previous one; without overlap, end both. Return whether a step has ended."""
        has_ended = self._in_flight is not None  # whether this turn ends a step
        self._prepare_drafts()
        launched = self._launch()
        in_flight = self._in_flight
        self._in_flight = launched
        if in_flight is not None:
            self._complete(in_flight)
        if launched is None:
            return has_ended
        if in_flight is not None:
            self._scheduler.settle(launched.step)
        self._draw(launched.step, launched.handle)
        if self._overlap:
            return has_ended
        self._in_flight = None
        self._complete(launched)
        return True

    def _prepare_drafts(self) -> None:
        """Propose drafts for the next step, if they don't depend on the step in flight or are worth waiting for its
        results."""
        drafts = self._drafts
        if drafts is None or (drafts.only_if_exact and not self._runner.is_exact):
            return
        self._host.enter(HostPart.SCHEDULE)
        in_flight = self._in_flight
        foremost = self._scheduler.foremost
        if in_flight is not None:
            if not drafts.need_results(foremost.running, others_wait=foremost.num_waiting > 0):
                return
            self._in_flight = None
            self._complete(in_flight)
            self._host.enter(HostPart.SCHEDULE)
            foremost = self._scheduler.foremost
        drafts.propose(foremost.running, others_wait=foremost.num_waiting > 0)

    def _launch(self) -> _Launched | None:
        now_ns = self._host.enter(HostPart.SCHEDULE)
        if self._shortage.is_on:
            self._shortage.recover(now_ns)
            self._scheduler.limit_step(self._shortage.step_tokens)
        step = self._scheduler.schedule(now_ns)
        if step is None:
            return None
        if not all(one.is_background for one in step.preempted):
            self._warn(
                now_ns,
                "The KV cache is full (preemptions so far: %d). What they lose is computed again; more "
                "--kv-cache-memory or a lower --max-running avoids that.",
                self._scheduler.foreground.num_preemptions,
            )
        newcomers = self._requests.scheduled(step, now_ns)
        if any(opened.progress_ns is not None for opened in newcomers):
            self._hand_over()  # Hand over now, because this step may take a long time.
        elif self._account.is_first_step:
            self._publish()  # If this step hangs, the numbers of an idle engine would hide it.
        at_ns = self._host.enter(HostPart.LAUNCH, step)
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
                self._scheduler.advance(step)
                return _Launched(step, handle, at_ns, newcomers)
        self._compute_in_parts(step, at_ns, newcomers)
        return None

    def _copy_blocks(self, step: Step, now_ns: int) -> bool:
        """Copy the blocks of a step. Return False if memory is too short to copy even one of them: then the step has
        failed."""
        try:
            self._runner.copy_blocks(step.copies)
        except OutOfMemory as error:
            self._report_shortage(step, error, now_ns)
            if not copy_in_parts(self._runner.copy_blocks, step.copies):
                # A sequence may have got a copied block but no chunk. Without its keys and values, it cannot continue
                # either.
                targets = {target for _, target in step.copies}
                concerned = [chunk.sequence for chunk in step.chunks]
                running = self._scheduler.running + self._scheduler.background.running
                concerned += [one for one in running if not targets.isdisjoint(one.blocks)]
                self._fail_for_memory(concerned)
                return False
        return True

    def _compute_in_parts(self, step: Step, at_ns: int, newcomers: list[OpenRequest]) -> None:
        """Compute a step that is too large for the device's memory. Afterwards, no step is in flight."""
        in_flight = self._in_flight
        self._in_flight = None
        if in_flight is not None:
            self._complete(in_flight)  # The parts need the ids that this step draws, which only the device has.
            self._scheduler.settle(step)
        # The blocks of sequences that ended here are free, but no other sequence has reused them yet.
        chunks = [
            chunk._replace(max_draws=0) if chunk.draw is Draw.SUPERSEDED else chunk
            for chunk in step.chunks
            if chunk.sequence.place is Place.RUNNING and chunk.draw is not Draw.VOID
        ]
        if not chunks:
            return
        # Without drafts, the chunks are smaller. Chunks of one token come first.
        chunks = sorted((chunk.without_draft() for chunk in chunks), key=lambda chunk: chunk.num_tokens > 1)
        results = compute_in_parts(self._compute, Step(chunks), self._shortage.step_tokens)
        self._fail_for_memory([chunk.sequence for chunk, result in zip(chunks, results, strict=True) if result is None])
        # Do this before the others advance, so that the prefix cache gets nothing that a failed sequence hasn't
        # computed.
        computed = [
            (chunk, result)
            for chunk, result in zip(chunks, results, strict=True)
            if result is not None and chunk.sequence.place is Place.RUNNING
        ]
        if computed:
            step = Step([chunk for chunk, _ in computed])
            self._scheduler.advance(step)
            launched = _Launched(step, None, at_ns, newcomers)
            self._end(launched, StepResult([result for _, result in computed]))

    def _compute(self, part: Step) -> list[ChunkResult]:
        self._host.enter(HostPart.LAUNCH, part)
        handle = self._runner.launch(part)
        self._draw(part, handle)
        self._host.enter(HostPart.WAIT, part)
        return self._runner.collect(handle).chunks

    def _draw(self, step: Step, handle: Any) -> None:
        """Make the late draws of a settled step, with the masks of grammars."""
        late = [chunk for chunk in step.chunks if chunk.draw is _LATE]
        masks = self._fill_masks(step, late) if late else None
        if late and self._host.part is not HostPart.LAUNCH:
            self._host.enter(HostPart.LAUNCH, step)
        self._runner.draw(handle, masks)

    def _fill_masks(self, step: Step, late: list[Chunk]) -> Masks | None:
        """Return the masks for the draws of a step. Requests whose grammar fails are failed."""
        constrained = [c for c in late if c.sequence.constraint is not None and self._requests.of_choice(c.sequence)]
        if not constrained:
            return None
        self._host.enter(HostPart.MASKS, step)
        masks, failed = fill_masks(constrained, self._vocab_size)
        if masks is not None:
            self._account.numbers.num_masked_draws += len(masks.words)
            self._scheduler.charge_masks(chunk for chunk in constrained if chunk.sequence in masks.rows)
            self._requests.masked(chunk for chunk in constrained if chunk.sequence in masks.rows)
        for sequence, error in failed:
            self._requests.grammar_failed(sequence, error)
        return masks

    def _fail_for_memory(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            message = "The device has no memory left to go on with this request; try again later."
            self._requests.fail(sequence.request_id, Unavailable(message))

    def _complete(self, launched: _Launched) -> None:
        self._host.enter(HostPart.WAIT, launched.step)
        self._end(launched, self._runner.collect(launched.handle))

    def _end(self, launched: _Launched, result: StepResult) -> None:
        step = launched.step
        ended_ns = self._host.enter(HostPart.PROCESS, step)
        self._scheduler.pool.at(ended_ns)
        for left in step.left:
            if self._requests.of_choice(left.sequence):
                self._scheduler.of(left.sequence).memory.charge_last_step(left)
        for opened in launched.newcomers:
            opened.notes.first_step_ended(self._account.numbers)
        step_ns = self._account.step_ended(step, result, launched.at_ns, ended_ns)
        if self._drafts is not None:
            self._drafts.verified(step, step_ns)
        self._results.take(step, result.chunks, ended_ns)
        self._hand_over()

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
