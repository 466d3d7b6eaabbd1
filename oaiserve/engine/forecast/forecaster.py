"""`Forecaster` makes the forecast of each request once its prompt is tokenized, and learns from the actual times.

It runs on the threads that tokenized the prompts. It reads numbers of the engine thread without a lock: one that is a
step old only makes a forecast a little worse. The engine thread puts the ends of requests into a queue, and does
nothing else for it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from threading import Lock
from typing import NamedTuple
from zlib import crc32

from oaiserve.engine.accounts.step_causes import load_of
from oaiserve.engine.forecast.ahead import Ahead, Decoding, Expected, Prompt, Rules, follow
from oaiserve.engine.forecast.calibration import Calibration, Three
from oaiserve.engine.forecast.encode_times import EncodeTimes
from oaiserve.engine.forecast.lengths import LengthCurve, Lengths
from oaiserve.engine.scheduling.blocks import BlockHash, hash_block
from oaiserve.engine.scheduling.pacing import StepTime
from oaiserve.engine.scheduling.scheduler import Scheduler
from oaiserve.engine.scheduling.slack import alone_ns
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Step
from oaiserve.explain.step_cost import StepCost
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.forecast import LEVELS, NO_FORECAST, Forecast
from oaiserve.facts.open_row import OpenForecast
from oaiserve.facts.times import RequestTimes

WINDOW_NS = 5_000_000_000  # The mean time of a step is over this window.
# Numbers of recent requests. The one whose mean gap fits best determines when the next requests are expected.
PACES = (4, 16, 64, 256)
# Requests with a forecast that have not ended. With more of them, a request gets none, because a forecast computes the
# turns of all others, next to the engine thread.
MOST_OPEN = 64

_due = attrgetter("due")
_fit = attrgetter("fit")
log = logging.getLogger(__name__)


class Asked(NamedTuple):
    """The facts of a request that its forecast is based on, once its prompts are tokenized."""

    request_id: str
    client: str
    operation: str
    grammar_kind: str | None
    prompts: list[list[int]]
    limit: int  # most tokens of each answer
    is_limited: bool  # whether the client set the limit, not the context
    ends_early: bool  # whether it may end before its limit
    num_choices: int
    cache_salt: str  # the same as in its sequences
    received_ns: int
    turn_ns: int = 0  # when its turn comes, under policies that order by it
    media_rows: int = 0  # tokens of images and sounds to encode before the prompt

    @property
    def classes(self) -> tuple[Hashable, ...]:
        """Return the classes of similar requests, from the widest to its own."""
        kind = (self.operation, self.grammar_kind, self.limit if self.is_limited else None)
        size = sum(map(len, self.prompts)).bit_length()
        return ((), kind, (*kind, self.client), (*kind, self.client, size))


class Ended(NamedTuple):
    """The end of a request, from which forecasts learn: its stamps, its answer's length, and whether it was cut off."""

    request_id: str
    times: RequestTimes
    num_tokens: int = 0  # length of its longest choice
    is_whole: bool = False  # whether it ended by itself; otherwise it was cut off
    late_ns: int | None = None  # the time at which its deadline cut it off


class _Turn(NamedTuple):
    """A prompt that runs or waits, and its place in the order of its client's prompts."""

    due: float
    prompt: Prompt
    request_id: str


@dataclass(slots=True)
class _Open:
    asked: Asked  # without its prompts
    classes: tuple[Hashable, ...]
    curve: LengthCurve | None  # None: its answers end at their limit
    turn: _Turn
    # These are of the first token, and of the end if the answer's length is known.
    kinds: tuple[Calibration, ...]
    raw: tuple[Three, ...]
    told: tuple[Three, ...]

    @property
    def forecast(self) -> Forecast:
        if not self.kinds[0].is_enough:
            return NO_FORECAST
        promised = self.told if self.kinds[-1].is_enough else self.told[:1]
        return Forecast(True, *(max(1, round(ns)) for three in promised for ns in three))

    @property
    def usual(self) -> list[float]:
        """Return the factor by which calibration moves each median."""
        return [told[1] / raw[1] for told, raw in zip(self.told, self.raw, strict=True)]

    def learn(self, came_ns: Iterable[float | None]) -> None:
        """Learn the actual times of the first token and the end, as far as there were any."""
        for kind, raw, told, ns in zip(self.kinds, self.raw, self.told, came_ns, strict=False):
            if ns is not None:
                kind.learn(raw, told, ns)


@dataclass(slots=True)
class _Pace:
    """The mean gap between about `most` recent requests, and how well it predicts the next gap."""

    most: int
    gap_ns: float = 0.0
    fit: float = 0.0  # the mean log-likelihood of gaps, if requests come independently of each other
    _number: int = 0

    def learn(self, gap_ns: float) -> None:
        if self.gap_ns:
            self.fit += (-math.log(self.gap_ns) - gap_ns / self.gap_ns - self.fit) / PACES[-1]
        self._number = min(self._number + 1, self.most)
        self.gap_ns += (gap_ns - self.gap_ns) / self._number


class Forecaster:
    """The forecasts of an engine's requests. `forecast` may be called on any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        step_time: StepTime,
        cost: Callable[[], StepCost | None],
        numbers: Callable[[], EngineNumbers],
        under_way: Callable[[], tuple[Step | None, int]],
    ) -> None:
        """`step_time` is not shared, because it is changed. `under_way` returns the current step, if any, and its
        begin."""
        self._scheduler = scheduler
        self._step_time = step_time
        self._cost = cost
        self._numbers = numbers
        self._under_way = under_way
        self._lock = Lock()
        self._lengths = Lengths()
        self._encode_times = EncodeTimes()
        self._calibrations: dict[Hashable, Calibration] = {}
        self._open: dict[str, _Open] = {}
        self._mean_tokens = 100.0  # mean length of an answer
        self._mean_prompt = 100.0  # mean number of uncached prompt tokens
        self._paces = [_Pace(number) for number in PACES]
        self._clients: deque[str] = deque(maxlen=PACES[2])  # clients of the last requests
        self._came_ns = 0
        self._before: deque[tuple[int, EngineNumbers]] = deque()
        self.ended: deque[Ended] = deque(maxlen=MOST_OPEN)  # filled by the engine thread

    def forecast(self, asked: Asked, now_ns: int) -> Forecast:
        """Return the forecast of a request that goes to the engine thread now, or none after an error."""
        with self._lock:
            try:
                while self.ended:
                    self._learn(self.ended.popleft())
                if (cost := self._cost()) is None or len(self._open) >= MOST_OPEN:
                    return NO_FORECAST
                opened = self._open[asked.request_id] = self._made(asked, cost, now_ns)
                return opened.forecast
            except Exception:  # A request doesn't need its forecast.
                log.exception("A request got no forecast")
                return NO_FORECAST

    def open_now(self, now_ns: int, request_ids: Collection[str]) -> dict[str, OpenForecast]:
        """Return the forecasts of these open requests, for those that have one, and the current estimates of their
        times."""
        with self._lock:
            while self.ended:
                self._learn(self.ended.popleft())
            shown = {request_id: self._open[request_id] for request_id in request_ids if request_id in self._open}
            mean_ns, host_ns, tokens = self._steps(now_ns)
        if not shown or (cost := self._cost()) is None:
            return {}
        decodes, turns, residual_ns = self._present(cost, host_ns, now_ns)
        turns.sort(key=_due)
        places = {turn.request_id: place for place, turn in reversed([*enumerate(turns)])}
        so_far = {one.request_id: one.num_tokens - one.prompt_len for one in self._scheduler.running.copy()}
        found = {}
        for request_id, opened in shown.items():
            first_ns = 0.0  # time from now to the first token
            if (place := places.get(request_id)) is not None:
                ahead = self._first_token(cost, self._step_time.copy(), decodes, turns, place, host_ns)
                first_ns = residual_ns + ahead.first_token_ns
            usual = opened.usual
            elapsed_ns = now_ns - opened.asked.received_ns
            first_ns = first_ns * usual[0]
            first_token_now_ns = elapsed_ns + round(first_ns)
            end_now_ns: int | None = None
            if len(usual) > 1:  # The rest is added to the first token's time, so the end can't precede that token.
                num_left = opened.asked.limit - max(0, so_far.get(request_id, 0))
                end_now_ns = first_token_now_ns + round(max(0.0, num_left) / tokens * mean_ns * usual[1])
            found[request_id] = OpenForecast(opened.forecast, first_token_now_ns if first_ns else None, end_now_ns)
        return found

    def _made(self, asked: Asked, cost: StepCost, now_ns: int) -> _Open:
        classes = asked.classes
        curve = self._lengths.curve(classes) if asked.ends_early else None
        shares = [level ** (1 / asked.num_choices) for level in LEVELS]
        shortest, length, _ = (asked.limit if curve is None else curve.at(share, asked.limit) for share in shares)
        is_known = shortest == asked.limit  # Nearly all similar answers end at their limit.
        _, host_ns, tokens = self._steps(now_ns)
        decodes, turns, residual_ns = self._present(cost, host_ns, now_ns)
        own = self._turn(asked, length)
        order = sorted([*turns, own], key=_due)
        place = order.index(own)
        steps = max(0, length - 1) / tokens if is_known else 0.0  # An answer may be empty.
        expected = self._expected(own.prompt, now_ns)
        found = self._first_token(cost, self._step_time, decodes, order, place, host_ns, steps, expected)
        first_ns = residual_ns + found.first_token_ns
        if asked.media_rows:  # The queue advances while its media are encoded.
            rows = asked.media_rows + self._numbers().num_waiting_media_rows
            first_ns = max(first_ns, self._encode_times.expected_ns(rows) + alone_ns(cost, own.prompt.tokens_left))
        first_ns += now_ns - asked.received_ns
        times_ns = [first_ns]
        if is_known:
            times_ns.append(first_ns + found.decode_ns(steps))
        raw = tuple((ns, ns, ns) for ns in times_ns)
        crowd = 4 if found.has_waited else min(place.bit_length(), 3)
        both = (
            self._kind("first token", crowd, own.prompt.tokens_left.bit_length() // 3),
            self._kind("end", crowd),
        )
        kinds = both[: len(raw)]
        told = tuple(kind.calibrated(three) for kind, three in zip(kinds, raw, strict=True))
        return _Open(asked._replace(prompts=[]), classes, curve, own, kinds, raw, told)

    def _first_token(
        self,
        cost: StepCost,
        step_time: StepTime,
        decodes: list[Decoding],
        order: list[_Turn],
        place: int,
        host_ns: float,
        most_steps: float = 0.0,
        expected: Expected | None = None,
    ) -> Ahead:
        prompts = [turn.prompt for turn in order]
        own = order[place].prompt
        scheduling = self._scheduler.order
        num_shorter = scheduling.num_shorter_steps(
            scheduling.foreground.num_shorter_steps,
            own.tokens_left,
            (one.tokens_left for one in prompts if one.has_place),
        )
        services = {name: scheduling.service_of(name) for name in {one.client for one in prompts}}
        rules = Rules(scheduling, services, num_shorter, host_ns)
        return follow(cost, step_time, rules, decodes, prompts, place, most_steps, expected)

    def _expected(self, prompt: Prompt, now_ns: int) -> Expected | None:
        """Return the expected requests, after counting the request with this prompt, which has just arrived."""
        gap_ns = now_ns - self._came_ns
        self._came_ns = now_ns
        self._clients.append(prompt.client)
        self._mean_prompt += 0.02 * (prompt.tokens_left - self._mean_prompt)
        for pace in self._paces if len(self._clients) > 1 else ():
            pace.learn(max(1, gap_ns))
        if len(self._clients) < PACES[1]:
            return None
        sizes = max(1, round(self._mean_prompt)), max(1, round(self._mean_tokens))
        return Expected(max(self._paces, key=_fit).gap_ns, *sizes, tuple(self._clients))

    def _kind(self, time: str, *kind: int) -> Calibration:
        """Return the calibration of this kind of request, which falls back on wider kinds."""
        found = self._calibrations.get((time, *kind))
        if found is None:
            found = Calibration(self._kind(time, *kind[:-1]) if kind else None)
            self._calibrations[time, *kind] = found
        return found

    def _steps(self, now_ns: int) -> tuple[float, float, float]:
        """Return the recent means of a step's time, the time between steps, and the tokens of a sequence in a step."""
        before = self._before
        now = self._numbers()
        before.append((now_ns, now))
        while len(before) > 2 and before[1][0] < now_ns - WINDOW_NS:
            before.popleft()
        then = before[0][1]
        num_steps = now.num_steps - then.num_steps
        num_sequences = now.num_step_sequences - then.num_step_sequences
        if not num_steps or not num_sequences:
            return 0.0, 0.0, 1.0
        model_ns = now.model_ns - then.model_ns
        host_ns = now.idle_with_work_ns - then.idle_with_work_ns
        num_accepted = now.num_accepted_tokens - then.num_accepted_tokens
        return (model_ns + host_ns) / num_steps, host_ns / num_steps, 1 + num_accepted / num_sequences

    def _present(self, cost: StepCost, host_ns: float, now_ns: int) -> tuple[list[Decoding], list[_Turn], float]:
        """Return the sequences that decode after the current step, the prompts without a first token by then, and the
        time until the step's end.

        Requests with a forecast that don't run yet count as prompts.
        """
        step, since_ns = self._under_way()
        computed: dict[Sequence, tuple[int, int]] = {}  # the first token in the step, and the number of them
        residual_ns = 0.0
        if step is not None:
            computed = {chunk.sequence: (chunk.start, chunk.num_tokens) for chunk in step.chunks}
            residual_ns = max(0.0, cost.expected_ns(load_of(step)) + host_ns - (now_ns - since_ns))
        decodes: list[Decoding] = []
        turns: list[_Turn] = []
        running = set[str]()
        for sequence in self._scheduler.running.copy():
            running.add(sequence.request_id)
            start, num_tokens = computed.get(sequence, (0, 0))
            done = sequence.num_computed
            if num_tokens and done == start:  # The sequence doesn't count the current step yet.
                done += num_tokens
            left = sequence.num_tokens - done
            tokens = self._tokens_left(sequence)
            if left > 1:
                prompt = Prompt(left, done, tokens, True, self._scheduler.order.client_of(sequence.client_name))
                turns.append(_Turn(sequence.key[0], prompt, sequence.request_id))
            elif tokens > 0:
                decodes.append(Decoding(tokens, done, self._scheduler.order.client_of(sequence.client_name)))
        turns += [opened.turn for request_id, opened in self._open.copy().items() if request_id not in running]
        return decodes, turns, residual_ns

    def _tokens_left(self, sequence: Sequence) -> int:
        """Return the expected number of tokens that a sequence will still draw. Each sequence has a quantile of its
        own, so that together they are distributed like their class."""
        limit = sequence.max_len - sequence.prompt_len
        so_far = max(0, sequence.num_tokens - sequence.prompt_len)
        opened = self._open.get(sequence.request_id)
        if opened is None or opened.curve is None:
            return limit - so_far
        share = (crc32(f"{sequence.request_id} {sequence.index}".encode()) % 1021 + 0.5) / 1021
        return opened.curve.at(share, limit, so_far) - so_far

    def _turn(self, asked: Asked, answer_tokens: int) -> _Turn:
        """Return the turn of a new request, with its prompts less the cached start of the first one."""
        size = self._scheduler.pool.block_size
        find = self._scheduler.pool.find
        token_ids = asked.prompts[0]
        parent: BlockHash | None = None
        num_cached = 0
        if self._scheduler.memory.has_prefix_cache:
            for start in range(0, len(token_ids) - size, size):
                parent = hash_block(parent, token_ids[start : start + size], asked.cache_salt)
                if find(parent) is None:
                    break
                num_cached = start + size
        num_new = sum(map(len, asked.prompts)) - num_cached
        due = self._scheduler.order.due_of(asked.client, num_new, asked.turn_ns)
        prompt = Prompt(num_new, num_cached, answer_tokens, client=self._scheduler.order.client_of(asked.client))
        return _Turn(due, prompt, asked.request_id)

    def _learn(self, ended: Ended) -> None:
        opened = self._open.pop(ended.request_id, None)
        received = ended.times.received
        first = ended.times.first_token
        last = ended.times.last_token
        tokenized_ns = ended.times.tokenized
        encoded_ns = ended.times.media_encoded
        if opened is not None and tokenized_ns is not None and encoded_ns is not None:
            self._encode_times.learn(opened.asked.media_rows, tokenized_ns, encoded_ns)
        if opened is not None and received is not None and ended.late_ns is not None:
            # The actual time is unknown, but later than this. A median that is later still counts as right.
            late_ns = ended.late_ns - received
            first_told = opened.told[0]
            end_told = opened.told[-1]
            late_first_ns = None
            if first is None:
                late_first_ns = max(late_ns, first_told[1])
            opened.learn((late_first_ns, max(late_ns, end_told[1])))
        if opened is None or received is None or first is None:
            return
        opened.learn((first - received, None if last is None else last - received))
        if ended.num_tokens and opened.curve is not None:
            has_ended = ended.is_whole and ended.num_tokens < opened.asked.limit
            self._lengths.observe(opened.classes, ended.num_tokens, has_ended=has_ended)
            self._mean_tokens += 0.02 * (ended.num_tokens - self._mean_tokens)
