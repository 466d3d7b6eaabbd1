"""Replays a load through the real scheduler, block pool, prefix cache and drafts. Only the time of steps is an
estimate.

It is the engine's loop without a model: arrivals are added between two steps, a step takes its learnt cost, and between
steps is the host's time. Some steps are disturbed by other programs on the machine: the longer they take, the more
often.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from oaiserve.engine.accounts.step_causes import load_of
from oaiserve.engine.backpressure import Deadlines, Limit
from oaiserve.engine.drafting.drafts import Drafts
from oaiserve.engine.drafting.lookup import SIZES, Lookup
from oaiserve.engine.forecast.forecaster import Asked, Ended, Forecaster
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.scheduling.blocks import BlockPool
from oaiserve.engine.scheduling.limits import Limits
from oaiserve.engine.scheduling.pacing import StepTime
from oaiserve.engine.scheduling.policy import POLICIES
from oaiserve.engine.scheduling.scheduler import Scheduler
from oaiserve.engine.scheduling.slack import alone_ns, refusal, turn_ns
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Chunk, Step
from oaiserve.explain.step_cost import StepCost
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.forecast import NO_FORECAST, Forecast
from oaiserve.facts.times import RequestTimes
from tools.replay.recorded import Arrival, Cost, RecordedServer

DISTURBANCE_SECONDS = 0.02  # the mean of one disturbance, which holds up one step
UseOfDeadlines = Literal["kept", "ended", "ignored"]
WRONG = 0  # the id of a drafted token that does not come true; ids of a replay's answers are below 0


@dataclass(slots=True)
class Served:
    """A prompt of a replay and its times, in seconds; the gaps are those between steps that bring tokens of its answer.

    Of several choices, the first one counts.
    """

    arrived: float
    arrival: Arrival
    forecast: Forecast = NO_FORECAST
    ttft: float | None = None
    gaps: list[float] = field(default_factory=list)
    num_tokens: int = 0
    _last: float = 0.0

    @property
    def latency(self) -> float | None:
        """Return the seconds from its arrival to its last token, or None if it was not answered in time."""
        if self.ttft is None or self.num_tokens < self.arrival.answer_tokens:
            return None
        return self.ttft + sum(self.gaps)

    @property
    def deadline_ns(self) -> int | None:
        seconds = self.arrival.deadline_seconds
        return None if seconds is None else int((self.arrived + seconds) * 1e9)

    @property
    def is_in_time(self) -> bool:
        """Return whether it was answered within its deadline, if it has one."""
        latency = self.latency
        most = self.arrival.deadline_seconds
        return latency is not None and (most is None or latency <= most)

    @property
    def tpot(self) -> float | None:
        """Return the mean seconds for each token after the first one, or None if there is none."""
        return sum(self.gaps) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    def tokens(self, number: int, at: float) -> None:
        """Note the time of some tokens."""
        if self.ttft is None:
            self.ttft = at - self.arrived
        else:
            self.gaps.append(at - self._last)
        self.num_tokens += number
        self._last = at


@dataclass(frozen=True, slots=True)
class ReplayedLoad:
    """A replayed load: its prompts in the order of arrival, and how the server fared."""

    served: list[Served]
    busy_share: float  # share of the time with steps
    hit_share: float  # share of the prompt tokens that were in the prefix cache
    num_preemptions: int
    num_refused: int  # prompts that do not fit into the KV cache at all
    num_late: int = 0  # requests that were ended at their deadline
    num_refused_late: int = 0  # requests refused because they would very probably be late


class LoadReplay:
    """A simulated engine with the settings of a server. Use it once."""

    def __init__(
        self, server: RecordedServer, cost: Cost, deadlines: UseOfDeadlines = "kept", *, forecasts_all: bool = False
    ) -> None:
        """Begin without prompts, and with one of three uses of deadlines. If they are `kept`, prompts are refused and
        ended as by the server; if `ended`, none is refused, and if `ignored`, all are computed to their ends.

        Prompts with deadlines are forecast, or all of them.
        """
        self._cost = cost
        self._use = deadlines
        self._forecasts_all = forecasts_all
        self._deadlines = Deadlines(lambda _: True)
        self._num_late = self._num_refused_late = 0
        self._numbers = EngineNumbers()
        self._rng = random.Random(0)
        limits = Limits(server.max_running, max(server.max_step_tokens, server.max_running))
        step_time = StepTime(self.known_cost, limits.max_step_tokens, server.itl_target_seconds)
        self._scheduler = Scheduler(
            BlockPool(server.kv_blocks, server.block_size),
            limits,
            policy=POLICIES[server.policy],
            prefix_cache=server.prefix_cache,
            step_time=step_time,
        )
        self._slack = self._scheduler.order.slack
        self._drafts = Drafts() if server.drafts else None
        known = (self.known_cost, self._numbers.copy, lambda: self._under_way)
        self._forecaster = Forecaster(self._scheduler, step_time.copy(), *known)
        self._under_way: tuple[Step | None, int] = (None, 0)
        self._coming: list[tuple[float, int, int, Arrival]] = []
        self._served: list[Served] = []
        self._open: dict[Sequence, Served] = {}
        self._now = self._busy = 0.0
        self._num_refused = self._num_come = 0

    def run(
        self, arrivals: Iterable[tuple[float, int, Arrival]], give_up_seconds: float = float("inf")
    ) -> ReplayedLoad:
        """Serve the arrivals (time, copy of the load, arrival), until all are answered or the time is over."""
        host_seconds = self._cost.host_seconds
        scheduler = self._scheduler
        for at, copy, arrival in arrivals:
            self._come(at, copy, arrival)
        while (self._coming or self._open) and self._now < give_up_seconds:
            self._add(self._arrived())
            self._end_late()
            if self._drafts is not None:
                self._drafts.propose(scheduler.running, others_wait=scheduler.foreground.num_waiting > 0)
            step = scheduler.schedule(int(self._now * 1e9))
            if step is None:
                if not self._coming:
                    break
                self._now = self._coming[0][0]
                continue
            self._under_way = step, int(self._now * 1e9)
            seconds = self._seconds(step)
            self._now += seconds
            self._busy += seconds + host_seconds
            arrived = self._arrived()  # their forecasts are made during the step
            self._under_way = None, 0
            self._numbers.num_steps += 1
            self._numbers.num_step_sequences += len(step.chunks)
            self._numbers.model_ns += int(seconds * 1e9)
            self._numbers.idle_with_work_ns += int(host_seconds * 1e9)
            self._commit(step, int(seconds * 1e9))
            self._add(arrived)
            self._now += host_seconds
        for ready, _, _, arrival in self._coming:
            self._served.append(Served(ready - self._cost.before_queue_seconds, arrival))
        hit_share = scheduler.memory.num_prefix_hits / max(1, scheduler.memory.num_prefix_queries)
        busy_share = self._busy / max(self._now, 1e-9)
        counts = (scheduler.foreground.num_preemptions, self._num_refused, self._num_late, self._num_refused_late)
        return ReplayedLoad(self._served, busy_share, hit_share, *counts)

    def _come(self, at: float, copy: int, arrival: Arrival) -> None:
        self._num_come += 1
        heapq.heappush(self._coming, (at + self._cost.before_queue_seconds, self._num_come, copy, arrival))

    def known_cost(self) -> StepCost | None:
        """Return the cost of steps as far as the scheduler and forecasts know it."""
        return self._cost.step

    def _end_late(self) -> None:
        """End the prompts whose deadline has passed."""
        for name, _ in self._deadlines.take_expired(int(self._now * 1e9)):
            late = [sequence for sequence in self._open if sequence.request_id == name]
            self._num_late += bool(late)
            for sequence in late:
                self._scheduler.remove(sequence)
                self._tell_end(sequence, self._open.pop(sequence))

    def _seconds(self, step: Step) -> float:
        """Return the seconds of a step, with its disturbances. These come at random, and take exponential times."""
        undisturbed = self._cost.step.expected_ns(load_of(step)) / 1e9
        return undisturbed + self._disturbance(undisturbed)

    def _disturbance(self, seconds: float) -> float:
        """Return the seconds by which other programs hold up a step of this length."""
        left = seconds * self._cost.disturbance_share / DISTURBANCE_SECONDS
        lost = 0.0
        rng = self._rng
        while left > 0 and (left := left - rng.expovariate(1)) > 0:
            lost += rng.expovariate(1 / DISTURBANCE_SECONDS)
        return lost

    def _arrived(self) -> list[tuple[Served, list[Sequence]]]:
        """Take the prompts that have come by now, and return those that are not refused, with their sequences."""
        arrived: list[tuple[Served, list[Sequence]]] = []
        while self._coming and self._coming[0][0] <= self._now:
            ready, number, copy, arrival = heapq.heappop(self._coming)
            served = Served(ready - self._cost.before_queue_seconds, arrival)
            self._served.append(served)
            ready_ns = int(ready * 1e9)
            end_ns = served.deadline_ns
            name = str(number)
            length = len(arrival.prompt)
            most_tokens = max(arrival.most_tokens, arrival.answer_tokens)
            prompt_ns = alone_ns(self.known_cost(), length)
            start_ns = self._slack.latest_start_ns(None, end_ns, prompt_ns, most_tokens)
            own_turn_ns = turn_ns(ready_ns, start_ns, self._slack.turn_share(prompt_ns))
            is_kept = self._use == "kept" and end_ns is not None
            if is_kept or self._forecasts_all:
                served.forecast = self._forecast(name, copy, served, own_turn_ns, ready_ns)
            if end_ns is not None and self._use != "ignored":
                if is_kept and refusal(served.forecast, None, end_ns - int(served.arrived * 1e9)) is not None:
                    self._num_refused_late += 1
                    continue
                self._deadlines.add(end_ns, name, Limit.END)
            arrived.append((served, []))
            for choice in range(arrival.num_choices):
                sequence = Sequence(
                    name,
                    choice,
                    arrival.prompt,
                    SamplingParams(),
                    max_len=length + most_tokens,
                    turn_ns=own_turn_ns,
                    deadline_ns=end_ns,
                    latest_start_ns=None if start_ns is None or start_ns < ready_ns else start_ns,
                    cache_salt=str(copy),
                    client_name=arrival.client,
                )
                sequence.lookup = RecordedDrafts(length, arrival.drafts)
                arrived[-1][1].append(sequence)
        return arrived

    def _add(self, arrived: list[tuple[Served, list[Sequence]]]) -> None:
        for served, sequences in arrived:
            try:
                for sequence in sequences:
                    self._scheduler.add(sequence, sequences[0] if sequence.index else None)
                    self._open[sequence] = served
            except ValueError:
                self._num_refused += 1

    def _commit(self, step: Step, step_ns: int) -> None:
        scheduler = self._scheduler
        answers = self._open
        at = self._now + self._cost.delivery_seconds
        scheduler.advance(step)
        drawn = [_drawn(chunk) for chunk in step.chunks]
        if self._drafts is not None:
            self._drafts.verified(step, step_ns)
        for chunk, token_ids in zip(step.chunks, drawn, strict=True):
            sequence = chunk.sequence
            served = answers[sequence]
            token_ids = token_ids[: served.arrival.answer_tokens - sequence.num_generated]
            scheduler.commit(chunk, token_ids)
            if not token_ids:
                continue
            if sequence.index == 0:
                served.tokens(len(token_ids), at)
            if sequence.num_generated >= served.arrival.answer_tokens:
                scheduler.remove(sequence)
                del answers[sequence]
                self._tell_end(sequence, served)

    def _forecast(self, name: str, copy: int, served: Served, turn_ns: int, ready_ns: int) -> Forecast:
        """Return the forecast that the server would make of a prompt."""
        arrival = served.arrival
        question = Asked(
            name,
            arrival.client,
            operation=arrival.operation,
            grammar_kind=arrival.grammar_kind,
            prompts=[arrival.prompt],
            limit=max(arrival.most_tokens, arrival.answer_tokens),
            is_limited=arrival.is_limited,
            ends_early=arrival.most_tokens > 0,
            num_choices=arrival.num_choices,
            cache_salt=str(copy),
            received_ns=int(served.arrived * 1e9),
            turn_ns=turn_ns,
        )
        return self._forecaster.forecast(question, ready_ns)

    def _tell_end(self, sequence: Sequence, served: Served) -> None:
        """Let the forecaster and the policy learn from an answer, or from how long one has taken that is ended."""
        if sequence.index:
            return
        first = served.ttft
        now_ns = int(self._now * 1e9)
        latency = served.latency
        times = RequestTimes(received=int(served.arrived * 1e9))
        times.first_token = None if first is None else int((served.arrived + first) * 1e9)
        times.last_token = None if latency is None else int((served.arrived + latency) * 1e9)
        if times.first_token is not None:
            prompt_ns = alone_ns(self.known_cost(), sequence.prompt_len)
            self._slack.note(
                prompt_ns,
                prompt_ns,
                (times.last_token or now_ns) - times.first_token,
                served.num_tokens,
                is_whole=latency is not None,
            )
        late_ns = now_ns if latency is None else None
        self._forecaster.ended.append(
            Ended(sequence.request_id, times, served.num_tokens, latency is not None, late_ns)
        )


def _drawn(chunk: Chunk) -> list[int]:
    """Return the drawn tokens of a chunk: those of the answer up to the first one that is not in its draft."""
    if not chunk.max_draws:
        return []
    first = chunk.sequence.num_generated
    if not chunk.draft:
        return [answer_id(first)]
    right = [answer_id(first + k) for k in range(len(chunk.draft) + 1)]
    return right[: chunk.num_accepted(right) + 1]


def answer_id(index: int) -> int:
    """Return the id of the token of an answer at this index, the same in all answers."""
    return -1 - index


class RecordedDrafts(Lookup):
    """The drafts of one answer.

    Where the recorded answer had several tokens in a step, there is a draft, and it comes true up to the end of that
    run of tokens. Elsewhere there is none. The engine learns the rate of right drafts, as always.
    """

    __slots__ = ("_ends", "_prompt_len")

    def __init__(self, prompt_len: int, runs: list[int]) -> None:
        super().__init__()
        self._prompt_len = prompt_len
        self._ends: list[int] = []  # for each token of the answer: where the run of right drafts that it is in ends
        for index, length in enumerate(runs):
            begin = len(self._ends)
            self._ends += [begin + length if index % 2 else 0] * length

    def _find(self, token_ids: list[int], most: int) -> tuple[int, list[int]]:
        place = len(token_ids) - self._prompt_len
        end = self._ends[place] if place < len(self._ends) else 0
        if end <= place:
            return 0, []
        right = [answer_id(index) for index in range(place, min(end, place + most))]
        return SIZES[0], right + [WRONG] * (most - len(right))
