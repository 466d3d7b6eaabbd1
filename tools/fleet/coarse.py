"""A model of a replica whose steps take the same time however many sequences run, for fleets of hundreds.

Steps are composed as the scheduler does (decodes first, then prompts in their order, up to a budget), but a step knows
only how many sequences decode and how long they are together, and when each of them will end. Its prefix cache knows
how many tokens of each stream it has. What it leaves out: blocks that do not fit, preemption, several clients.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from oaiserve.facts.prefix_keys import marked_depths
from oaiserve.facts.report import HeldPrefixes
from tools.fleet.figures import Histogram
from tools.fleet.traffic import TOKENS_PER_KEY, Call
from tools.simulate import BLOCK_SIZE, Costs


@dataclass(frozen=True)
class Size:
    """The size of a replica."""

    cache_tokens: int
    max_running: int = 256
    max_step_tokens: int = 2048


class CoarseReplica:
    """`advance` computes steps until a time is reached. Requests are given to it before the time of their arrival."""

    def __init__(self, size: Size, costs: Costs, *, reports: bool = False) -> None:
        self._size, self._costs, self._reports = size, costs, reports
        self._waiting: deque[Call] = deque()
        self._prefilling: deque[tuple[Call, int]] = deque()  # and the tokens that are left
        self._num_decoding = 0
        self._context = 0  # tokens of those that decode
        self._ends: dict[int, list[Call]] = {}  # by the step in which they draw their last token
        self._num_steps = 0
        self._cached: OrderedDict[int, int] = OrderedDict()  # tokens by stream
        self._num_cached = 0
        self.clock = 0.0
        self.work_seconds = 0.0  # without what a step takes however little it computes
        self.itl = Histogram()
        self.held: HeldPrefixes[tuple[int, int]] = HeldPrefixes()
        self.finished: list[Call] = []

    @property
    def num_open(self) -> int:
        return len(self._waiting) + len(self._prefilling) + self._num_decoding

    @property
    def waiting_tokens(self) -> int:
        return sum(call.num_tokens for call in self._waiting) + sum(row[1] for row in self._prefilling)

    def push(self, call: Call) -> None:
        self._waiting.append(call)

    def open_calls(self) -> list[Call]:
        calls = [*self._waiting, *(row[0] for row in self._prefilling)]
        return calls + [call for row in self._ends.values() for call in row]

    def drop_all(self) -> list[Call]:
        """Return what is open, and forget it and the cache, as when the process is killed."""
        lost = self.open_calls()
        self._waiting.clear()
        self._prefilling.clear()
        self._ends.clear()
        self._cached.clear()
        self.held = HeldPrefixes()
        self._num_cached = self._num_decoding = self._context = 0
        return lost

    def is_cached(self, place: tuple[int, int]) -> bool:
        return self._cached.get(place[0], 0) >= place[1]

    def advance(self, until: float) -> None:
        costs, waiting, prefilling, ends = self._costs, self._waiting, self._prefilling, self._ends
        max_running, max_step_tokens = self._size.max_running, self._size.max_step_tokens
        while self.clock < until:
            if not self._num_decoding and not prefilling:
                if not waiting:
                    self.clock = until
                    return
                if waiting[0].arrival > self.clock:
                    self.clock = waiting[0].arrival
                    continue
            decoding = self._num_decoding
            budget = max_step_tokens - decoding
            tokens, context = decoding, self._context + decoding
            started: list[Call] = []
            num_running = decoding + len(prefilling)
            while waiting and num_running < max_running and waiting[0].arrival <= self.clock:
                call = waiting.popleft()
                prefilling.append((call, call.num_tokens - self._admit(call)))
                num_running += 1
            while prefilling and budget > 0:
                call, left = prefilling.popleft()
                taken = min(left, budget)
                budget -= taken
                tokens += taken
                context += call.num_tokens - left + taken
                if taken == left:
                    started.append(call)
                else:
                    prefilling.appendleft((call, left - taken))
            seconds = costs.step + costs.token * tokens + costs.context * context / 1000
            self.clock += seconds
            self.work_seconds += seconds - costs.step
            self._context += decoding
            number = self._num_steps
            self._num_steps += 1
            for call in ends.pop(number, ()):
                self._num_decoding -= 1
                self._context -= call.num_tokens + call.answer - 1
                self._finish(call)
            for call in started:
                call.ttft = self.clock - call.arrival
                if self._reports:
                    depths = marked_depths(len(call.keys))
                    self.held.note(zip([call.keys[depth - 1] for depth in depths], _places(call, depths), strict=True))
                if call.answer == 1:
                    self._finish(call)
                else:
                    self._num_decoding += 1
                    self._context += call.num_tokens
                    ends.setdefault(number + call.answer - 1, []).append(call)
            self.itl.add(seconds, decoding)

    def _admit(self, call: Call) -> int:
        """Return how many tokens of the prompt are cached, and let the cache have all of it."""
        cached, hit, is_whole = self._cached, 0, True
        for stream, tokens in call.path:
            if is_whole:
                have = cached.get(stream, 0)
                hit += min(have, tokens)
                is_whole = have >= tokens
        for stream, tokens in reversed(call.path):
            self._hold(stream, tokens)
        hit = max(hit, call.num_brought)
        call.hit_tokens = min(hit, call.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        return call.hit_tokens

    def _hold(self, stream: int, tokens: int) -> None:
        cached = self._cached
        have = cached.get(stream, 0)
        if tokens > have:
            cached[stream] = tokens
            self._num_cached += tokens - have
        cached.move_to_end(stream)
        while (excess := self._num_cached - self._size.cache_tokens) > 0:
            oldest, held = next(iter(cached.items()))
            if held > excess:
                cached[oldest] = held - excess  # the end of a stream is reused before its beginning
                self._num_cached -= excess
            else:
                del cached[oldest]
                self._num_cached -= held

    def _finish(self, call: Call) -> None:
        stream, tokens = call.path[-1]
        self._hold(stream, tokens + call.answer - 1)
        self.finished.append(call)


def _places(call: Call, depths: Iterable[int]) -> list[tuple[int, int]]:
    """Return where the cache has the last token of each of these beginnings: a stream, and its tokens up to there."""
    found, start, path = [], 0, iter(call.path)
    stream, tokens = next(path)
    for end in (depth * TOKENS_PER_KEY for depth in depths):
        while start + tokens < end:
            start += tokens
            stream, tokens = next(path)
        found.append((stream, end - start))
    return found
