"""Replays a load through the real scheduler, block pool and prefix cache. Only the time of a step is an estimate.

It is the engine's loop without a model: what has arrived is added between two steps, and a step takes as long as the
learnt cost says, and the host's time between steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from oaiserve.engine.blocks import BlockPool
from oaiserve.engine.pacing import PrefillBudget
from oaiserve.engine.policy import POLICIES
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.scheduler import Limits, Scheduler
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Step
from oaiserve.engine.step_causes import load_of
from oaiserve.engine.step_cost import StepCost
from oaiserve.plan.recorded import Arrival, Server


@dataclass(slots=True)
class Served:
    """What became of a prompt. Times are in seconds; the gaps are those between the tokens of its first choice."""

    arrived: float
    num_answer_tokens: int
    ttft: float | None = None
    gaps: list[float] = field(default_factory=list)
    _last: float = 0.0

    @property
    def latency(self) -> float | None:
        """From its arrival to its last token; None if it was not answered in time."""
        if self.ttft is None or len(self.gaps) + 1 < self.num_answer_tokens:
            return None
        return self.ttft + sum(self.gaps)

    def token(self, at: float) -> None:
        if self.ttft is None:
            self.ttft = at - self.arrived
        else:
            self.gaps.append(at - self._last)
        self._last = at


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of a load."""

    served: list[Served]
    busy_share: float  # of the time, with steps
    hit_share: float  # of the prompt tokens, found in the prefix cache
    num_preemptions: int
    num_refused: int  # prompts that do not fit into the KV cache at all


class Replay:
    """A simulated engine with the settings of a server. Use it once."""

    def __init__(
        self, server: Server, cost: StepCost, *, host_seconds: float = 0.0, before_queue_seconds: float = 0.0
    ) -> None:
        self._cost, self._host_seconds, self._before = cost, host_seconds, before_queue_seconds
        limits = Limits(
            server.max_running,
            max(server.max_step_tokens, server.max_running),
            server.prefill_max_requests,
            server.prefill_max_tokens,
            server.lookahead,
        )
        self._scheduler = Scheduler(
            BlockPool(server.kv_blocks, server.block_size),
            limits,
            policy=POLICIES[server.policy],
            prefix_cache=server.prefix_cache,
        )
        self._pacing = None
        if server.itl_target_seconds is not None:
            self._pacing = PrefillBudget(server.itl_target_seconds, limits.max_step_tokens)
        self._open: dict[Sequence, Served] = {}
        self._now = self._busy = 0.0
        self._num_refused = 0

    def run(self, arrivals: Iterable[tuple[float, int, Arrival]], give_up_seconds: float = float("inf")) -> Replayed:
        """Serve the arrivals (when, which copy of the load, and what), until all are answered or the time is over."""
        coming = [(at + self._before, index, copy, arrival) for index, (at, copy, arrival) in enumerate(arrivals)]
        heapq.heapify(coming)
        served: list[Served] = []
        scheduler = self._scheduler
        while (coming or self._open) and self._now < give_up_seconds:
            while coming and coming[0][0] <= self._now:
                ready, _, copy, arrival = heapq.heappop(coming)
                served.append(Served(ready - self._before, arrival.answer_tokens))
                self._add(arrival, copy, served[-1])
            step = scheduler.schedule()
            if step is None:
                if not coming:
                    break
                self._now = coming[0][0]
                continue
            seconds = self._cost.expected_ns(load_of(step)) / 1e9
            self._now += seconds
            self._busy += seconds + self._host_seconds
            self._commit(step, int(seconds * 1e9))
            self._now += self._host_seconds
        served += [Served(ready - self._before, arrival.answer_tokens) for ready, _, _, arrival in coming]
        hits, queries = scheduler.num_prefix_hits, scheduler.num_prefix_queries
        busy_share, hit_share = self._busy / max(self._now, 1e-9), hits / max(1, queries)
        return Replayed(served, busy_share, hit_share, scheduler.num_preemptions, self._num_refused)

    def _add(self, arrival: Arrival, copy: int, served: Served) -> None:
        leader: Sequence | None = None
        for choice in range(arrival.num_choices):
            sequence = Sequence(
                "",
                choice,
                arrival.prompt,
                SamplingParams(),
                max_len=len(arrival.prompt) + arrival.answer_tokens,
                cache_salt=str(copy),
                client_name=arrival.client,
            )
            try:
                self._scheduler.add(sequence, leader)
            except ValueError:
                self._num_refused += 1
                return
            self._open[sequence] = served
            leader = leader or sequence

    def _commit(self, step: Step, step_ns: int) -> None:
        scheduler, num_decodes = self._scheduler, 0
        scheduler.advance(step)
        for chunk in step.chunks:
            sequence = chunk.sequence
            num_decodes += chunk.num_known == 1
            if not chunk.max_draws:
                scheduler.commit(chunk, [])
                continue
            scheduler.commit(chunk, [-1 - sequence.num_generated])
            if sequence.index == 0:
                self._open[sequence].token(self._now)
            if len(sequence.token_ids) >= sequence.max_len:
                del self._open[sequence]
        if self._pacing is not None:
            self._pacing.observe(num_decodes, step.num_tokens - num_decodes, step_ns)
            scheduler.prefill_budget = self._pacing.tokens
