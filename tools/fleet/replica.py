"""A replica with the real scheduler, block pool and prefix cache. Only the time of its steps is a formula's."""

from __future__ import annotations

from collections import deque

from oaiserve.engine.blocks import BlockHash, BlockPool
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.scheduler import Limits, Scheduler
from oaiserve.engine.sequence import Sequence
from oaiserve.facts.prefix_keys import marked_depths
from oaiserve.facts.report import HeldPrefixes
from tools.fleet.coarse import Size
from tools.fleet.figures import Histogram
from tools.fleet.traffic import TOKENS_PER_KEY, Call
from tools.simulate import BLOCK_SIZE, Costs


class FullReplica:
    """It is used like a CoarseReplica."""

    def __init__(self, size: Size, costs: Costs, *, reports: bool = False) -> None:
        self._costs, self._reports = costs, reports
        self._pool = BlockPool(size.cache_tokens // BLOCK_SIZE, BLOCK_SIZE)
        self._scheduler = Scheduler(self._pool, Limits(size.max_running, size.max_step_tokens))
        self._inbox: deque[Call] = deque()
        self._open: dict[Sequence, Call] = {}
        self.clock = 0.0
        self.busy_seconds = 0.0
        self.work_seconds = 0.0
        self.itl = Histogram()
        self.held: HeldPrefixes[BlockHash] = HeldPrefixes()
        self.finished: list[Call] = []

    @property
    def num_open(self) -> int:
        return len(self._inbox) + len(self._open)

    @property
    def waiting_tokens(self) -> int:
        ready = sum(one.num_uncomputed for one in self._open if one.num_uncomputed > 1)
        return ready + sum(call.num_tokens for call in self._inbox)

    def push(self, call: Call) -> None:
        self._inbox.append(call)

    def open_calls(self) -> list[Call]:
        return [*self._inbox, *self._open.values()]

    def is_cached(self, place: BlockHash) -> bool:
        return self._pool.find(place) is not None

    def advance(self, until: float) -> None:
        scheduler = self._scheduler
        while self.clock < until:
            while self._inbox and self._inbox[0].arrival <= self.clock:
                self._add(self._inbox.popleft())
            step = scheduler.schedule()
            if step is None:
                self.clock = min(until, self._inbox[0].arrival) if self._inbox else until
                continue
            seconds = self._costs.seconds(step)
            self.clock += seconds
            self.busy_seconds += seconds
            self.work_seconds += seconds - self._costs.step
            num_decoding = 0
            scheduler.advance(step)
            for chunk in step.chunks:
                sequence = chunk.sequence
                call = self._open[sequence]
                num_decoding += sequence.num_generated > 0
                stream, length = call.path[-1]
                scheduler.commit(chunk, [stream + length + sequence.num_generated] if chunk.max_draws else [])
                if chunk.max_draws and sequence.num_generated == 1:
                    call.ttft = self.clock - call.arrival
                    call.hit_tokens = sequence.num_cached
                    if self._reports:
                        self._note(call, sequence)
                if len(sequence.token_ids) >= sequence.max_len:
                    del self._open[sequence]
                    self.finished.append(call)
            self.itl.add(seconds, num_decoding)

    def _note(self, call: Call, sequence: Sequence) -> None:
        blocks = TOKENS_PER_KEY // BLOCK_SIZE
        depths = marked_depths(len(call.keys))
        self.held.note((call.keys[depth - 1], sequence.hashes[depth * blocks - 1]) for depth in depths)

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()

    def _add(self, call: Call) -> None:
        prompt = [stream + position for stream, tokens in call.path for position in range(tokens)]
        sequence = Sequence("", 0, prompt, SamplingParams(), max_len=len(prompt) + call.answer)
        self._open[sequence] = call
        self._scheduler.add(sequence)
