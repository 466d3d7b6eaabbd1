"""Divides the time of each step into its causes, by the learnt cost of steps. Engine thread only, no torch.

Measured times come first: between steps, for media, for masks, and delays by the machine. The rest of a step is divided
into the expected time of its decodes and prompts, by the cost of earlier steps, and an unexplained remainder. If no
such step was seen before, the causes of the rest are not known yet. Then each request in the step gets the expected
time of its own tokens alone, and the time added by its neighbours.

The cost is that of steps that nothing delayed. A step whose threads waited for cores counts with the time that it would
have taken otherwise, estimated from its CPU time. So a machine that other programs keep busy isn't mistaken for a slow
one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

from oaiserve.engine.accounts.machine_time import MachineTime
from oaiserve.engine.accounts.machine_users import MachineUsers
from oaiserve.engine.accounts.plain_decodes import PlainDecodes
from oaiserve.engine.accounts.shares import Shares
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.engine.sequences.step_load import load_of_chunks
from oaiserve.explain.causes import NOTHING, Parts, RequestCauses, settled
from oaiserve.explain.client_work import ClientWork, Work, WorkByClient
from oaiserve.explain.step_cost import BY_ROWS, Load, StepCost
from oaiserve.explain.step_cost_fit import StepCostFit
from oaiserve.facts.record import Cause
from oaiserve.standstill import STILL_NS, log_standstill

log = logging.getLogger(__name__)

WARM_UP = 2  # first steps, which are slow for reasons of their own
# A step is slow if it takes longer than expected by both of these. Only then is it worth asking what delayed it.
SLOW_SHARE = 0.1
SLOW_NS = 1_000_000
# A step was delayed if its threads waited for this share of its time. Its CPU time, divided by the number of threads
# that share the work, then shows within about a fifth how long it would have taken. Other steps show that exactly, so a
# delayed step has less weight.
HELD_UP = 0.05
HELD_UP_WEIGHT = 0.5
# Threads that run at the same time wait for each other's memory accesses, which counts as CPU time. The more a step was
# delayed, the more its threads ran in turns, which costs less of that. On two cores, one thread used 0.63 s of CPU time
# for a request, two threads 0.83 s, and two threads next to two to eight busy processes 0.72 s.
TOGETHER = 0.4
SLOWDOWN_STEPS = 50  # time constant of the slowdown of the last steps
# The machine's accounts are read after a step that was this much longer than expected, or began this late, and at least
# every ASK_EVERY_NS.
ASK_NS = 200_000
ASK_EVERY_NS = 200_000_000


class Delays(NamedTuple):
    """The delays of a step in nanoseconds: by masks; by the machine, in the step and in the gap before it; and by a
    standstill of the process, again in the step and before it. Without these, the step would have taken `quiet_ns`.
    `weight` is the weight of the step as a sample of the cost."""

    constraint: int = 0
    lost: int = 0
    late: int = 0
    still: int = 0
    still_before: int = 0
    quiet_ns: int = 0
    weight: float = 1.0


NO_DELAYS = Delays()


class StepCauses:
    """The sums of the causes over all steps so far. Each step is also a sample for the learnt cost of steps."""

    def __init__(
        self,
        machine: MachineTime,
        fit: StepCostFit,
        shares: Shares,
        num_looks: Callable[[], int] = lambda: 0,
        users: MachineUsers | None = None,
    ) -> None:
        """`num_looks` returns how often the watchdog has checked, once a second. `users` finds out what used the
        machine."""
        self.users = users
        self._machine = machine
        self._num_looks = num_looks
        self._num_looked = 0  # number of the watchdog's checks when the machine was last queried
        self._is_watched = True  # whether the watchdog checked often enough in the time before that query
        self._fit = fit
        self.shares = shares
        self.decodes = PlainDecodes()
        self.clients = WorkByClient()
        self.number = 0  # steps so far
        self.ended_ns = 0  # when the last step ended
        self.had_prompts = False  # whether the last step had prompts
        # Sums over all steps. What remains of the steps' time is unexplained, and all other time was between steps.
        self._model_ns = self._decodes_ns = self._prompts_ns = self._constraint_ns = self._lost_ns = 0
        self._unknown_ns = 0  # the remaining time of steps whose cost was unknown
        self._media_ns = 0  # time of images and sounds, between steps
        self.encoded_ns = 0  # part of it since the last step
        self._late_ns = 0  # time that steps began late because of the machine
        self._still_ns = self._still_before_ns = 0  # time in steps, and before steps, in which the process stood still
        self._asked_ns = 0  # when the machine was last queried
        self._cost: StepCost | None = None  # the cost by which the last step was divided
        self._knows_few = False  # whether the cost covers a step of one decode, so that steps of several can be divided
        self._slowdown = 1.0  # recent step times relative to those on a quiet machine
        self._slowed: tuple[StepCost, StepCost] | None = None  # a cost, and the same one times the slowdown
        # By this cost: time of a token drawn alone, per token of context, and the extra per cached token of context.
        self._plain_ns = (0.0, 0.0, 0.0)

    @property
    def totals(self) -> Parts:
        """Return the parts of all steps so far. They add up to the time at which the last one ended."""
        decodes_ns = self._decodes_ns
        prompts_ns = self._prompts_ns
        constraint_ns = self._constraint_ns
        model_ns = self._model_ns
        lost_ns = self._lost_ns
        late_ns = self._late_ns
        still_ns = self._still_ns
        still_before_ns = self._still_before_ns
        unknown_ns = self._unknown_ns
        return Parts(
            decodes_ns,
            prompts_ns,
            self._media_ns,
            constraint_ns,
            host=self.ended_ns - model_ns - self._media_ns - late_ns - still_before_ns,
            machine=lost_ns + late_ns,
            still=still_ns + still_before_ns,
            unknown=unknown_ns,
            unexplained=model_ns - decodes_ns - prompts_ns - constraint_ns - lost_ns - still_ns - unknown_ns,
        )

    @property
    def machine_ns(self) -> int:
        """Return the time so far in which the machine did something else. Any thread may call this."""
        return self._lost_ns + self._late_ns

    @property
    def cost(self) -> StepCost | None:
        """Return the cost of a step that nothing delays, or None while it is not known."""
        return self._fit.cost

    @property
    def slowed_cost(self) -> StepCost | None:
        """Return the cost of a step at the current slowdown by other programs, or None while it is not known."""
        cost = self._fit.cost
        if cost is None:
            return None
        slowed = self._slowed
        if slowed is None or slowed[0] is not cost:
            self._slowed = slowed = cost, cost.times(self._slowdown)
        return slowed[1]

    def so_far(self, own: RequestCauses) -> dict[Cause, int]:
        """Return the causes of an open request's current phase, the largest first. Any thread may call this, so they
        may be a step old; and while a step ends, they may be unknown for a moment."""
        if not own.has_begun:
            return {}
        parts = own.so_far(self.totals, self.decodes.unsettled_ns(own))
        if sum(parts.values()) < 0:
            return {}
        return dict(sorted(settled(parts).items(), key=lambda cause: -cause[1]))

    def begin(self) -> None:
        """Query the machine once, on the engine thread, so that the next answer covers only steps."""
        self._machine.delay_ns()

    def step_ended(
        self,
        step: Step,
        load: Load,
        ended_ns: int,
        model_ns: int,
        gap_ns: int,
        masks_ns: int,
        work_ns: int,
        has_clock: bool,
        /,
    ) -> float | None:
        """Divide the time since the last step, and return the error of the expected time as a share of the real one.

        The model took `model_ns` for the `load`, after `gap_ns` with work but without a step; filling masks took
        `masks_ns`, and there was work for the last `work_ns`. If the device has a clock, `model_ns` was measured by it:
        the engine thread may have filled masks or waited for a core meanwhile.
        """
        whole_ns = ended_ns - self.ended_ns
        took_ns = model_ns
        if model_ns > whole_ns:  # A device may have begun before the previous results arrived.
            model_ns = whole_ns
        media_ns = min(self.encoded_ns, whole_ns - model_ns)
        self.encoded_ns = 0
        cost = self._fit.cost
        if cost is not self._cost:
            self._cost = cost
            if cost is not None:
                self._knows_few = cost.covers(Load(decodes=1, draws=1))
                token_ns = float(cost.expected_ns(Load(decodes=1, draws=1)))
                self._plain_ns = token_ns, cost.decode_context_ns, cost.cached_context_ns - cost.decode_context_ns
        expected_ns = decodes_ns = 0
        self.had_prompts = has_prompts = load.prompt_tokens > 0
        chunks = step.chunks
        known = cost if cost is not None and cost.covers(load) and (self._knows_few or len(chunks) == 1) else None
        if known is not None:
            expected_ns = decodes_ns = known.expected_ns(load)
            if has_prompts:
                decodes_ns = min(expected_ns, known.expected_ns(load.without_prompts()))
        core_ns = self.shares.cores.of_step
        machine_ns = self.shares.time.of_step
        weigh = cost if cost is not None and (expected_ns or cost.expected_ns(load)) else BY_ROWS
        unit = 1 / weigh.share_ns(load, load)
        others: list[Chunk] = []
        before: Parts | None = None  # the totals, if a request may have missed steps
        if len(chunks) == 1 and not has_prompts:
            lone = chunks[0].sequence.causes
        else:
            lone = None
        if lone is not None and not lone.may_have_missed:
            if self.decodes:
                self.decodes.settle_all()
            lone.alone_ns += expected_ns
            lone.core_ns += core_ns
            lone.machine_ns += machine_ns
            lone.weight_reads += 1
        else:
            others = self.decodes.begin_step(chunks, load)
            if self.decodes:
                rows = load.decodes + load.prompt_tokens
                # A row costs less in a step with others than in a step of its own.
                beside = unit * (weigh.together_ns(rows) / rows + weigh.draw_ns - self._plain_ns[0])
                self.decodes.step_ended(
                    self._plain_ns, unit, beside, core_ns, machine_ns, 1 / rows, is_known=known is not None
                )
            if any(chunk.sequence.causes is not None and chunk.sequence.causes.may_have_missed for chunk in others):
                before = self.totals
        delays = NO_DELAYS
        quiet_ns = took_ns
        # A usual step is not slow, so only the others are looked into.
        if masks_ns or model_ns - expected_ns > ASK_NS or gap_ns > ASK_NS or ended_ns - self._asked_ns > ASK_EVERY_NS:
            between_ns = whole_ns - model_ns - media_ns
            delays = self._delays(
                ended_ns,
                took_ns,
                model_ns,
                expected_ns,
                core_ns,
                min(gap_ns, between_ns),
                masks_ns,
                has_clock,
            )
            if work_ns > STILL_NS and not self._is_watched:
                delays = _with_standstill(delays, model_ns - expected_ns, core_ns, between_ns, work_ns)
            quiet_ns = delays.quiet_ns
            self._constraint_ns += delays.constraint
            self._lost_ns += delays.lost
            self._late_ns += delays.late
            self._still_ns += delays.still
            self._still_before_ns += delays.still_before
        self.ended_ns = ended_ns
        self._model_ns += model_ns
        self._media_ns += media_ns
        self._decodes_ns += decodes_ns
        if has_prompts:
            self._prompts_ns += expected_ns - decodes_ns
        if known is None:
            self._unknown_ns += max(0, model_ns - delays.constraint - delays.lost - delays.still)
        if others:
            self._charge(others, step, load, before, known, expected_ns, decodes_ns, weigh, unit)
        if has_prompts and expected_ns:
            prompts_ns = model_ns * (1 - decodes_ns / expected_ns)
        else:
            prompts_ns = model_ns * load.prompt_tokens / (load.prompt_tokens + load.decodes)
        self._divide_among_clients(chunks, load, prompts_ns, model_ns - prompts_ns)
        self.shares.step_ended()
        self.number += 1
        if self.number <= WARM_UP:
            return None
        if quiet_ns > 0:
            held_ns = delays.constraint + delays.still
            self._slowdown += ((took_ns - held_ns) / quiet_ns - self._slowdown) / SLOWDOWN_STEPS
        if known is None or quiet_ns <= 0:
            self.shares.cores_fit.observe(load, core_ns, error=None)
            self._fit.observe(load, quiet_ns, delays.weight, None)
            return None
        self.shares.cores_fit.observe(load, core_ns)
        error = expected_ns / quiet_ns - 1
        self._fit.observe(load, quiet_ns, delays.weight, error)
        if error >= 0:
            return error
        return -error

    def _divide_among_clients(self, chunks: list[Chunk], load: Load, prompts_ns: float, decodes_ns: float) -> None:
        """Add a step to its clients' work. The usual steps have fast paths: those of one client, and those with a row
        per chunk."""
        if (client := self.clients.lone) is not None:
            self.clients.step_of_one(client, Work(load.prompt_tokens, load.decodes, prompts_ns, decodes_ns))
        elif load.decodes == len(chunks) and not load.prompt_tokens:
            clients = [None if (own := chunk[0].causes) is None else own.client for chunk in chunks]
            self.clients.decodes_ended(clients, decodes_ns)
        else:
            self.clients.step_ended(_by_client(chunks), prompts_ns, decodes_ns)

    def _delays(
        self,
        ended_ns: int,
        took_ns: int,
        model_ns: int,
        expected_ns: int,
        core_ns: int,
        gap_ns: int,
        masks_ns: int,
        has_clock: bool,
    ) -> Delays:
        """Return the delays by masks and by the machine. For a step whose cost is not known, the expected time is 0."""
        machine = self._machine
        excess_ns = model_ns - expected_ns
        constraint_ns = lost_ns = late_ns = 0
        if masks_ns:
            constraint_ns = min(masks_ns, max(0, excess_ns) if has_clock else model_ns)
            took_ns -= constraint_ns
            excess_ns -= constraint_ns
        weight = 1.0
        is_long = excess_ns > ASK_NS or gap_ns > ASK_NS
        if is_long or ended_ns - self._asked_ns > ASK_EVERY_NS:
            # Querying the machine is a system call, which releases the GIL. Next to a busy event loop, the thread gets
            # the GIL back late, so most steps make no query. Their delays are read and dropped later.
            delay_ns = machine.delay_ns()
            num_looks = self._num_looks()
            self._is_watched = num_looks - self._num_looked > (ended_ns - self._asked_ns) / 2e9
            self._num_looked = num_looks
            self._asked_ns = ended_ns
            if is_long:
                if not has_clock:  # part of the excess may be the machine's
                    by_cores_ns = _quiet_ns(took_ns, core_ns, machine.parallelism)
                    excess_ns = max(0, excess_ns if expected_ns else took_ns - by_cores_ns)
                    lost_ns = min(delay_ns // machine.num_threads, excess_ns)
                    left_ns = excess_ns - lost_ns
                    if left_ns > SLOW_NS and left_ns > SLOW_SHARE * (expected_ns or by_cores_ns):
                        lost_ns += machine.more_ns(left_ns)
                    if max(lost_ns, min(delay_ns, excess_ns)) > HELD_UP * took_ns:
                        lost_ns = max(lost_ns, min(excess_ns, took_ns - by_cores_ns))
                        took_ns = by_cores_ns
                        weight = HELD_UP_WEIGHT
                late_ns = min(max(0, delay_ns - lost_ns), gap_ns)
        return Delays(constraint_ns, lost_ns, late_ns, quiet_ns=took_ns, weight=weight)

    def _charge(
        self,
        chunks: list[Chunk],
        step: Step,
        load: Load,
        before: Parts | None,
        known: StepCost | None,
        expected_ns: int,
        decodes_ns: int,
        weigh: StepCost,
        unit: float,
    ) -> None:
        """Charge the step to the requests of these chunks, which have more than a token, or several chunks.

        `before` are the totals before the step, if a request may have missed steps. `known` is the cost that the
        expected time is based on, or None. `unit` scales the costs by `weigh` so that all shares add up to 1.
        """
        by_request: dict[RequestCauses, list[Chunk]] = {}
        again: list[RequestCauses] = []  # requests that compute lost tokens again
        for chunk in chunks:
            sequence = chunk.sequence
            own = sequence.causes
            if own is None:
                continue
            by_request.setdefault(own, []).append(chunk)
            if sequence.num_preemptions and chunk.num_known > 1:
                again.append(own)
        after = NOTHING if before is None else self.totals
        for own, own_chunks in by_request.items():
            part = load if len(own_chunks) == len(step.chunks) else load_of_chunks(own_chunks)
            if before is not None:
                own.took_part(self.number, before, after)
            share = weigh.share_ns(part, load) * unit
            own.core_ns += self.shares.cores.of_step * share
            own.machine_ns += self.shares.time.of_step * share
            own.weight_reads += part.num_tokens / load.num_tokens
            if known is not None:
                own.computed(*_costs_ns(known, part, load, expected_ns, decodes_ns, is_again=own in again))


def _by_client(chunks: list[Chunk]) -> Iterator[tuple[ClientWork | None, int, int]]:
    """Yield the client of each chunk, with the number of prompt tokens and the number of decode rows."""
    for sequence, _, num_tokens, _, draft, _ in chunks:
        own = sequence.causes
        client = None if own is None else own.client
        if num_tokens - len(draft) == 1:
            yield client, 0, num_tokens
        else:
            yield client, num_tokens, 0


def _with_standstill(delays: Delays, excess_ns: int, core_ns: int, between_ns: int, work_ns: int) -> Delays:
    """Return these delays, and those of a standstill of the whole process in the last `work_ns`, if there was one.

    A standstill is a time of at least STILL_NS, in the step or before it, in which the process used no core and waited
    for none, and in which the watchdog, which checks once a second, did not run either.
    """
    idle_ns = work_ns - core_ns - delays.lost - delays.late
    if idle_ns < STILL_NS:
        return delays
    still_ns = max(0, min(idle_ns, excess_ns - delays.constraint - delays.lost))
    before_ns = max(0, min(idle_ns - still_ns, between_ns - delays.late))
    log_standstill(log, "server", still_ns + before_ns)
    quiet_ns = max(0, delays.quiet_ns - still_ns)
    return delays._replace(still=still_ns, still_before=before_ns, quiet_ns=quiet_ns)


def _quiet_ns(took_ns: int, core_ns: int, parallelism: float) -> int:
    """Return how long a step that took `took_ns` would have taken on a quiet machine, estimated from its CPU time."""
    by_cores_ns = core_ns / parallelism
    if by_cores_ns >= took_ns:
        return took_ns
    waited = 1 - by_cores_ns / took_ns
    return int(by_cores_ns * (1 + TOGETHER * (1 - 1 / parallelism) * waited))


def _costs_ns(
    cost: StepCost, part: Load, load: Load, expected_ns: int, decodes_ns: int, *, is_again: bool
) -> tuple[int, int, int]:
    """Return three expected times of a request's tokens in a step: all of them alone, its prompts together with the
    step's decodes, and its prompts alone if they are computed again."""
    if part == load:
        alone_ns = expected_ns
    else:
        alone_ns = min(cost.expected_ns(part), expected_ns)
    if not part.prompt_tokens:
        return min(alone_ns, decodes_ns), 0, 0
    own = part.without_prompts()
    again_ns = max(0, alone_ns - cost.expected_ns(own)) if is_again else 0
    if part.prompt_tokens == load.prompt_tokens:
        return alone_ns, expected_ns - decodes_ns, again_ns
    others = load.without_prompts()
    both = Load(
        others.decodes,
        others.decode_context,
        others.cached_context,
        part.prompt_tokens,
        part.prompt_context,
        others.draws + part.draws - own.draws,
        others.edits + part.edits - own.edits,
        others.drafted,
    )
    beside_ns = min(max(alone_ns, cost.expected_ns(both)), expected_ns)
    return alone_ns, beside_ns - decodes_ns, again_ns
