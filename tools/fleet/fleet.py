"""A fleet of simulated replicas, traffic and a policy: what happens in which order, faults included."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from oaiserve.facts.report import ReplicaReport
from tools.fleet.coarse import CoarseReplica, Size
from tools.fleet.figures import Figures, Histogram
from tools.fleet.policies import Ours, Policy
from tools.fleet.traffic import Traffic
from tools.simulate import Costs

TICK_SECONDS = 0.01  # so long after it finished is a request still counted as open
DRAIN_SECONDS = 3.0  # from the moment a replica takes no more to that at which its successor is up


@dataclass(frozen=True)
class Plan:
    """The plan says what is simulated, and what happens in it."""

    seconds: float
    warm_up: float
    report_seconds: float = 1.0
    fails: tuple[float, float, range] | None = None  # from, to, replicas
    rolls: tuple[float, float, int] | None = None  # from, to: so many replicas are replaced, one after the other


class Fleet:
    def __init__(
        self,
        name: str,
        policy: Policy,
        number: int,
        size: Size,
        costs: Costs,
    ) -> None:
        self._policy = policy
        self._replicas = [CoarseReplica(size, costs, reports=policy.wants_reports) for _ in range(number)]
        self._num_open = np.zeros(number, np.int64)
        self._open_ticks, self._waiting_ticks = [0] * number, [0] * number  # sums since the last report
        self._up = [True] * number
        self._incarnations = [0] * number
        self._back: list[tuple[float, int]] = []  # when replicas that were started again are up
        self._num_rolled = 0
        self.figures = Figures(name)

    def run(self, traffic: Traffic, plan: Plan) -> Figures:
        """Simulate, and return the figures."""
        began = time.process_time()
        figures, before = self.figures, None
        period = max(1, round(plan.report_seconds / TICK_SECONDS))
        for tick in range(round(plan.seconds / TICK_SECONDS)):
            now = tick * TICK_SECONDS
            if before is None and now >= plan.warm_up:
                before = self._work_seconds()
                for replica in self._replicas:
                    replica.itl = Histogram()
            self._let_fail(plan, now)
            self._restart(plan, now)
            self._place(traffic, now)
            for index, replica in enumerate(self._replicas):
                replica.advance(now + TICK_SECONDS)
                if self._policy.wants_reports:
                    self._open_ticks[index] += self._num_open[index]
                    self._waiting_ticks[index] += replica.waiting_tokens
                if replica.finished:
                    self._num_open[index] -= len(replica.finished)
                    for call in replica.finished:
                        if call.arrival >= plan.warm_up:
                            figures.count(call)
                    replica.finished.clear()
            if isinstance(self._policy, Ours):
                for index in range(tick % period, len(self._replicas), period):
                    if self._up[index]:
                        self._policy.learn(self._report(index, tick, period), now + TICK_SECONDS)
        assert before is not None
        figures.seconds = plan.seconds - plan.warm_up
        figures.work_seconds = (self._work_seconds() - before).tolist()
        for replica in self._replicas:
            figures.itl.counts += replica.itl.counts
            for call in replica.open_calls():
                if call.arrival >= plan.warm_up:
                    if call.ttft < 0:
                        figures.count_waiting(call, plan.seconds)
                    else:
                        figures.count(call)
        figures.cpu_seconds = time.process_time() - began
        return figures

    def _work_seconds(self) -> npt.NDArray[np.float64]:
        return np.array([one.work_seconds for one in self._replicas])

    def _place(self, traffic: Traffic, now: float) -> None:
        for call in traffic.until(now, now + TICK_SECONDS):
            index = self._policy.choose(call, self._num_open, now)
            self._replicas[index].push(call)
            self._num_open[index] += 1

    def _report(self, index: int, tick: int, period: int) -> ReplicaReport:
        replica = self._replicas[index]
        num_open, waiting_tokens = self._open_ticks[index] / period, self._waiting_ticks[index] / period
        self._open_ticks[index] = self._waiting_ticks[index] = 0
        keys = replica.held.keys(replica.is_cached)  # type: ignore[arg-type]
        return ReplicaReport(str(index), str(self._incarnations[index]), tick, num_open, waiting_tokens, keys)

    def _let_fail(self, plan: Plan, now: float) -> None:
        """Let a zone fail, and come back with empty caches. Requests that it has are lost."""
        if plan.fails is None:
            return
        start, end, indices = plan.fails
        if start <= now < start + TICK_SECONDS:
            for index in indices:
                self._empty(index)
                self._up[index] = False
            self._policy.set_up(self._up, now)
        elif end <= now < end + TICK_SECONDS:
            for index in indices:
                self._up[index] = True
            self._policy.set_up(self._up, now)

    def _restart(self, plan: Plan, now: float) -> None:
        """Drain replicas one after the other, and replace each one by one with an empty cache."""
        changed = False
        while self._back and self._back[0][0] <= now:
            _, index = self._back.pop(0)
            self._empty(index)
            self._up[index] = changed = True
        if plan.rolls is not None and plan.rolls[0] <= now < plan.rolls[1]:
            start, end, number = plan.rolls
            due = (now - start) / (end - start) * number
            while self._num_rolled < due:
                self._up[self._num_rolled] = False
                self._back.append((now + DRAIN_SECONDS, self._num_rolled))
                self._num_rolled += 1
                changed = True
        if changed:
            self._policy.set_up(self._up, now)

    def _empty(self, index: int) -> None:
        replica = self._replicas[index]
        self.figures.num_lost += len(replica.drop_all())
        self._num_open[index] = 0
        self._incarnations[index] += 1
