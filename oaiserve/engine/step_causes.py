"""Divides the time of each step into its causes, and learns what steps cost. Engine thread only, no torch.

What is measured comes first: the time between steps, masks, and what the machine took. The rest of a step is what its
decodes and its prompts were expected to take, by the cost of the steps before, and what is unexplained. Then each
request in the step is told what its own tokens would have taken alone, and what its neighbours added to that.
"""

from __future__ import annotations

from typing import Protocol

from oaiserve.engine.causes import NOTHING, Parts, Share
from oaiserve.engine.step import Chunk, Step
from oaiserve.engine.step_cost import Load, StepCost
from oaiserve.engine.step_cost_fit import StepCostFit

WARM_UP = 2  # first steps, which are slow for reasons of their own
# A step is slow if it takes longer than expected by both of these, so that it pays to ask what held it up.
SLOW_SHARE, SLOW_NS = 0.1, 1_000_000
LEAST_WEIGHT = 0.01
# The machine is asked about a step that took so much longer than expected, or began so late; and in any case so often.
ASK_NS, ASK_EVERY_NS = 200_000, 100_000_000


class Machine(Protocol):
    """What says for how long the machine did not run the engine. MachineTime asks Linux."""

    num_threads: int  # that share the work of a step, so that each one's delay holds it up by a part

    def delay_ns(self) -> int:
        """Return how long the calling thread was ready to run, and did not run, since the last call."""

    def more_ns(self, most_ns: int) -> int:
        """Return how much of `most_ns`, by which a step was too slow, the machine held up other threads."""


class StepCauses:
    """The causes of all steps so far, and the cost of a step as far as it is learnt."""

    def __init__(self, machine: Machine, fit: StepCostFit | None = None) -> None:
        self._machine = machine
        self._fit = fit or StepCostFit()
        self.number = 0  # of steps so far
        self.totals = NOTHING
        self.ended_ns = 0  # when the last step ended
        self.had_prompts = False  # the last step
        self._asked_ns = 0  # the machine, when

    @property
    def cost(self) -> StepCost | None:
        """The cost of a step, or None while it is not known."""
        return self._fit.cost

    def step_ended(
        self, step: Step, *, ended_ns: int, model_ns: int, gap_ns: int, masks_ns: int, has_clock: bool
    ) -> float | None:
        """Divide the time since the last step, and return the error of what was expected, as a share of the time.

        In this time, the model took `model_ns`; there was work for `gap_ns` before; masks were filled for `masks_ns`.
        With a clock of the device, `model_ns` is by that: the engine thread may have filled masks, or have waited for
        a core, meanwhile.
        """
        whole_ns, self.ended_ns = ended_ns - self.ended_ns, ended_ns
        took_ns, model_ns = model_ns, min(model_ns, whole_ns)  # a device may have begun before the last results came
        load, cost = load_of(step), self._fit.cost
        expected_ns = decodes_ns = 0
        if cost is not None:
            expected_ns = decodes_ns = cost.expected_ns(load)
            if load.prompt_tokens:
                decodes_ns = min(expected_ns, cost.expected_ns(load.without_prompts()))
        excess_ns = max(0, model_ns - expected_ns)
        constraint_ns = min(masks_ns, excess_ns if has_clock else model_ns)
        excess_ns = max(0, model_ns - (0 if has_clock else constraint_ns) - expected_ns)
        delay_ns = self._delay_ns(excess_ns, gap_ns, ended_ns)
        lost_ns = 0
        if not has_clock:
            lost_ns = min(delay_ns // self._machine.num_threads, excess_ns)
            left_ns = excess_ns - lost_ns
            if cost is not None and left_ns > SLOW_NS and left_ns > SLOW_SHARE * expected_ns:
                lost_ns += self._machine.more_ns(left_ns)
        late_ns = min(max(0, delay_ns - lost_ns), gap_ns, whole_ns - model_ns)
        before = self.totals
        decodes, prompts, constraint, host, machine, unexplained = before
        after = self.totals = Parts(
            decodes + decodes_ns,
            prompts + expected_ns - decodes_ns,
            constraint + constraint_ns,
            host + whole_ns - model_ns - late_ns,
            machine + lost_ns + late_ns,
            unexplained + model_ns - expected_ns - constraint_ns - lost_ns,
        )
        self._tell(step, load, before, after, Share(0, decodes_ns, expected_ns - decodes_ns))
        self.number += 1
        self.had_prompts = load.prompt_tokens > 0
        if self.number <= WARM_UP:
            return None
        took_ns = max(1, took_ns - constraint_ns)
        # A step that lacked a core counts next to nothing beside others. It is learnt as it was: without the time that
        # is thought to be lost, it would confirm whatever is expected.
        missed_ns = 0 if has_clock else min(took_ns, max(lost_ns, delay_ns))
        self._fit.observe(load, took_ns, max(LEAST_WEIGHT, (1 - missed_ns / took_ns) ** 8))
        return None if cost is None else abs(expected_ns - took_ns + lost_ns) / max(1, took_ns - lost_ns)

    def _delay_ns(self, excess_ns: int, gap_ns: int, now_ns: int) -> int:
        """Return for how long the machine did not run this thread, if the step or the gap before it was long.

        To ask is a system call, for which the thread gives up Python's lock. Where an event loop is busy, it gets that
        back late, so most steps do not ask. What they lost is asked for, and dropped, after a while.
        """
        is_long = excess_ns > ASK_NS or gap_ns > ASK_NS
        if not is_long and now_ns - self._asked_ns < ASK_EVERY_NS:
            return 0
        self._asked_ns = now_ns
        delay_ns = self._machine.delay_ns()
        return delay_ns if is_long else 0

    def _tell(self, step: Step, load: Load, before: Parts, after: Parts, whole: Share) -> None:
        """Tell the requests in a step what it was for them."""
        number, cost = self.number, self._fit.cost
        decodes_ns = whole.decodes
        one_ns = context_ns = cached_ns = 0.0
        if cost is not None:
            one_ns = cost.expected_ns(Load(decodes=1, draws=1))
            context_ns, cached_ns = cost.decode_context_ns, cost.cached_context_ns - cost.decode_context_ns
        for chunk in step.chunks:  # a microsecond for each
            sequence = chunk.sequence
            own = sequence.causes
            if own is None:
                continue
            if chunk.num_tokens == 1 and not own.has_several and not sequence.needs_ids:
                alone_ns = int(one_ns + context_ns * chunk.start + cached_ns * sequence.num_cached)
                own.decoded(number, before, after, alone_ns if alone_ns < decodes_ns else decodes_ns)
                continue
            part, counted = chunk_load(chunk), whole
            if own.has_several and own.in_step is not None and own.in_step[0] == number:
                part = Load(*map(sum, zip(own.in_step[1], part, strict=True)))
                counted = own.in_step[2]
            share = _share(cost, part, load, whole)
            own.in_step = (number, part, share)
            change = Share(
                share.alone - counted.alone, share.decodes - counted.decodes, share.prompts - counted.prompts
            )
            again = sequence.num_preemptions > 0 and chunk.num_known > 1
            own.took_part(number, before, after, change, again=again)


def _share(cost: StepCost | None, part: Load, load: Load, whole: Share) -> Share:
    """Return a step's expected time as the request sees it that has this part of its load."""
    if cost is None:
        return Share(0, 0, 0)
    expected_ns = whole.decodes + whole.prompts
    alone_ns = min(cost.expected_ns(part), expected_ns)
    if not part.prompt_tokens:
        alone_ns = min(alone_ns, whole.decodes)
        return Share(alone_ns, whole.decodes - alone_ns, whole.prompts)
    with_decodes_ns = expected_ns
    if part.prompt_tokens < load.prompt_tokens:
        decodes, own = load.without_prompts(), part.without_prompts()
        draws, edits = decodes.draws + part.draws - own.draws, decodes.edits + part.edits - own.edits
        both = decodes._replace(
            prompt_tokens=part.prompt_tokens, prompt_context=part.prompt_context, draws=draws, edits=edits
        )
        with_decodes_ns = min(max(alone_ns, cost.expected_ns(both)), expected_ns)
    return Share(alone_ns, with_decodes_ns - alone_ns, expected_ns - with_decodes_ns)


def load_of(step: Step) -> Load:
    """Return what is in a step."""
    decodes = decode_context = cached_context = draws = 0
    others = []
    for chunk in step.chunks:
        sequence = chunk.sequence
        if chunk.num_tokens == 1 and not sequence.needs_ids:
            decodes += 1
            decode_context += chunk.start - sequence.num_cached
            cached_context += sequence.num_cached
            draws += chunk.max_draws
        else:
            others.append(chunk_load(chunk))
    plain = Load(decodes, decode_context, cached_context, draws=draws)
    return Load(*map(sum, zip(plain, *others, strict=True))) if others else plain


def chunk_load(chunk: Chunk) -> Load:
    """Return what a chunk adds to a step. Its tokens attend to those before the chunk, and on average to half of it."""
    num_tokens, draws = chunk.num_tokens, min(chunk.max_draws, len(chunk.draft) + 1)
    context = num_tokens * (2 * chunk.start + num_tokens - 1) // 2
    edits = draws if chunk.sequence.needs_ids else 0
    if chunk.num_known == 1:
        cached = num_tokens * chunk.sequence.num_cached
        return Load(num_tokens, context - cached, cached, 0, 0, draws, edits, len(chunk.draft))
    return Load(0, 0, 0, num_tokens, context, draws, edits, len(chunk.draft))
