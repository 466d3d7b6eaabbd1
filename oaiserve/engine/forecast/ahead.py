"""Simulates the queue ahead of a request, and then its answer, step by step, with the learned cost of steps.

The scheduler's own `Order` decides which prompt is next and how many of its tokens a step computes. The simulation
ignores blocks, drafts and preemptions, and takes equal steps at once. Plain arithmetic, no clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import ceil, inf
from typing import NamedTuple

from oaiserve.engine.scheduling.clients import RequestTurn
from oaiserve.engine.scheduling.order import Order
from oaiserve.engine.scheduling.pacing import StepTime
from oaiserve.engine.scheduling.waiting import GENERATED_WEIGHT
from oaiserve.explain.step_cost import Load, StepCost

# Parts of prompts that a simulation computes up to the first token, at some microseconds each; half as many after it.
# The remaining tokens are assumed to take as long as those before them.
MOST_PARTS = 96
NOTHING_RUNS = RequestTurn()  # the turn of a request with nothing running


class Rules(NamedTuple):
    """The rules by which the scheduler fills steps at this moment: its order and limits, the clients' counters of
    service, and the time between two steps."""

    order: Order
    services: Mapping[str, int]  # by client: the counters by which they take turns
    num_shorter_steps: int = 0  # the next steps, in which prompts get only part of their time
    host_ns: float = 0.0  # time between two steps


class Expected(NamedTuple):
    """The requests that are expected to arrive meanwhile: one after each gap, like the recent ones."""

    gap_ns: float
    prompt_tokens: int
    answer_tokens: int
    clients: tuple[str, ...]  # The requests take these in turn.


class Decoding(NamedTuple):
    tokens_left: int
    context: int
    client: str = ""


class Prompt(NamedTuple):
    """A sequence whose prompt is not computed."""

    tokens_left: int
    start: int  # earlier tokens, which it attends to
    answer_tokens: int
    has_place: bool = False  # whether it runs; otherwise it waits
    client: str = ""


class Ahead(NamedTuple):
    """The forecast of a request from the queue ahead of it, counted from the end of the current step."""

    times: list[tuple[int, float]]  # steps and nanoseconds up to its first token, and up to later ones
    pace_ns: float  # time of each step after the last of these
    has_waited: bool  # whether it waited before it ran

    @property
    def first_token_ns(self) -> float:
        return self.times[0][1]

    def decode_ns(self, steps: float) -> float:
        """Return how long this number of steps after the first token takes."""
        step = self.times[0][0] + steps
        (last_step, last_ns) = self.times[-1]
        if step >= last_step:
            return last_ns + (step - last_step) * self.pace_ns - self.first_token_ns
        place = bisect_right(self.times, (step, inf))
        (from_step, from_ns), (to_step, to_ns) = self.times[place - 1 : place + 1]
        return from_ns + (step - from_step) * (to_ns - from_ns) / (to_step - from_step) - self.first_token_ns


@dataclass(slots=True, eq=False)
class _Client:
    """A client with its simulated prompts, as `Order` sees it."""

    service: float
    num_decodes: int = 0
    under_way: list[_Prompt] = field(default_factory=list)
    waiting: list[_Prompt] = field(default_factory=list)
    num_spare: int = 0  # Each sequence counts as a request of its own.

    @property
    def num_running(self) -> int:
        return self.num_decodes + len(self.under_way)


@dataclass(slots=True, eq=False)
class _Prompt:
    """A simulated prompt, as `Order` sees it."""

    key: int  # its place in the list of prompts
    client: _Client
    num_computed: int
    num_uncomputed: int
    answer_tokens: int
    turn: RequestTurn = NOTHING_RUNS


class _Turns:
    """The prompts, the decodes in the same steps, and the steps so far."""

    def __init__(
        self,
        step_time: StepTime,
        rules: Rules,
        decodes: Iterable[Decoding],
        prompts: list[Prompt],
        expected: Expected | None,
    ) -> None:
        self.rules = rules
        self.expected = expected
        self.num_arrived = 0
        self.step = 0
        self.now_ns = 0.0
        self.context = 0
        self.step_time = step_time
        self.taken: list[tuple[_Prompt, int]] = []  # the prompts in the next step, and the number of tokens of each
        self.budget = 0  # tokens that still fit into that step
        self.clients: dict[str, _Client] = {}
        self.ends: list[tuple[int, int, int, _Client]] = []  # a heap of decodes: step and context at their end, id
        self.prompts: list[_Prompt] = []
        for one in decodes:
            client = self._client(one.client)
            client.num_decodes += 1
            self.ends.append((one.tokens_left, one.context + one.tokens_left, id(client), client))
            self.context += one.context
        heapify(self.ends)
        for prompt in prompts:
            self._add(prompt)

    def _client(self, name: str) -> _Client:
        client = self.clients.get(name)
        if client is None:
            client = _Client(self.rules.services.get(name, 0))
            self.clients[name] = client
        return client

    def _add(self, prompt: Prompt) -> None:
        client = self._client(prompt.client)
        added = _Prompt(len(self.prompts), client, prompt.start, prompt.tokens_left, prompt.answer_tokens)
        self.prompts.append(added)
        (client.under_way if prompt.has_place else client.waiting).append(added)

    @property
    def next_ns(self) -> float:
        if self.expected is None or self.num_arrived >= MOST_PARTS:
            return inf
        return (self.num_arrived + 1) * self.expected.gap_ns

    def arrive(self) -> None:
        while (expected := self.expected) is not None and self.next_ns <= self.now_ns:
            name = expected.clients[self.num_arrived % len(expected.clients)]
            self.num_arrived += 1
            self._add(Prompt(expected.prompt_tokens, 0, expected.answer_tokens, client=name))

    def fill(self) -> None:
        """Take prompts into the next step, in the scheduler's order."""
        order = self.rules.order
        decodes = Load(len(self.ends), self.context, 0, 0, 0, len(self.ends))
        self.step_time.begin_with(decodes)
        self.taken = []
        self.budget = order.limits.max_step_tokens - decodes.decodes
        under_way = order.in_turn(prompt for client in self.clients.values() for prompt in client.under_way)
        num_running = len(self.ends) + len(under_way)
        has_several_clients = len(self.clients) > 1
        has_admitted = False
        while True:
            heads = [client.waiting[0] for client in self.clients.values() if client.waiting]
            head = order.first(heads) if heads else None
            is_full = num_running >= order.limits.max_running and not order.may_take_place(
                head, has_several_clients=has_several_clients, has_admitted=has_admitted
            )
            while under_way and self.budget > 0 and not order.passes(head, under_way[-1]):
                prompt = under_way.pop()
                self._take(prompt, under_way[-1] if under_way else None if is_full else head)
            if head is None or is_full or not self._take(head):
                break
            head.client.under_way.append(head.client.waiting.pop(0))
            num_running += 1
            has_admitted = True
        while under_way and self._take(under_way.pop()):
            pass

    def _take(self, prompt: _Prompt, next_prompt: _Prompt | None = None) -> bool:
        """Take a prompt into the step. Return False if there is no room."""
        if self.budget <= 0 or not self.step_time.has_room(prompt.num_uncomputed):
            self.budget = 0  # The step is full for all others, too.
            return False
        is_shorter = self.step < self.rules.num_shorter_steps
        part = self.rules.order.num_tokens(prompt, self.budget, next_prompt, self.step_time, is_shorter=is_shorter)
        self.step_time.add(prompt.num_computed, part)
        self.budget -= part
        prompt.client.service += part
        self.taken.append((prompt, part))
        return True

    def go(self, ns: float) -> list[_Prompt]:
        """Advance by the filled step, which takes this long, and by the equal steps after it. Return the prompts that
        have ended."""
        taken = self.taken
        ended = [prompt for prompt, part in taken if part >= prompt.num_uncomputed]
        steps = 1 if ended or len(taken) > 1 else self._num_alike(ns)
        self.now_ns += steps * (ns + self.rules.host_ns)
        self.context += len(self.ends) * steps
        self.step += steps
        for client in self.clients.values():
            client.service += GENERATED_WEIGHT * steps * client.num_decodes
        for prompt, part in taken:
            prompt.num_uncomputed -= part * steps
            prompt.num_computed += part * steps
        for prompt in ended:
            client = prompt.client
            client.under_way.remove(prompt)
            if prompt.answer_tokens > 1:
                self.context += prompt.num_computed
                client.num_decodes += 1
                num_left = prompt.answer_tokens - 1
                heappush(self.ends, (self.step + num_left, prompt.num_computed + num_left, id(client), client))
        while self.ends and self.ends[0][0] <= self.step:
            _, context, _, client = heappop(self.ends)
            self.context -= context
            client.num_decodes -= 1
        return ended

    def _num_alike(self, ns: float) -> int:
        """Return the number of equal steps, with the filled one, which takes this long and has at most one prompt."""
        limits = [(prompt.num_uncomputed - 1) // part for prompt, part in self.taken]
        if self.ends:
            limits.append(self.ends[0][0] - self.step)
        steps = min(limits)
        if 0 < self.rules.num_shorter_steps - self.step < steps:
            steps = self.rules.num_shorter_steps - self.step
        step_ns = ns + self.rules.host_ns
        if self.next_ns < self.now_ns + steps * step_ns:
            steps = ceil((self.next_ns - self.now_ns) / step_ns)
        return max(1, steps)

    def ahead_of(self, place: int) -> int:
        """Return about how many prompt tokens are computed up to the first token of the prompt at this place, including
        its own. No client gets more of them than the client of this prompt."""
        last = self.prompts[place]
        totals = dict.fromkeys(self.clients.values(), 0)
        for prompt in self.prompts:
            if prompt.client is not last.client or prompt.key <= last.key:
                totals[prompt.client] += max(0, prompt.num_uncomputed)
        most = totals[last.client]
        return sum(min(total, most) for total in totals.values())


def follow(
    cost: StepCost,
    step_time: StepTime,
    rules: Rules,
    decodes: Iterable[Decoding],
    prompts: list[Prompt],
    place: int,
    most_steps: float = 0.0,
    expected: Expected | None = None,
) -> Ahead:
    """Return when the prompt at this place has its first token, and its tokens of at most `most_steps` steps after it.

    Prompts of a client are in the order in which they are due. `step_time` is not shared, because it is changed.
    """
    turns = _Turns(step_time, rules, decodes, prompts, expected)
    has_waited = False
    num_parts = 0
    before = turns.ahead_of(place)
    times = list[tuple[int, float]]()
    while num_parts < MOST_PARTS and (not times or turns.step < times[0][0] + most_steps):
        turns.arrive()
        turns.fill()
        num_parts += len(turns.taken) + 1
        if not turns.taken and not turns.ends:  # Nothing can run: the prompts wait for room in the cache.
            break
        has_waited = has_waited or (not times and not turns.taken)
        ended = turns.go(cost.expected_ns(step_time.load))
        is_first = turns.prompts[place] in ended
        if is_first:
            num_parts = MOST_PARTS // 2
        if is_first or times:
            times.append((turns.step, turns.now_ns))
    if not times:
        done = max(1, before - turns.ahead_of(place))
        return Ahead([(turns.step, turns.now_ns * before / done)], turns.now_ns / max(1, turns.step), has_waited=True)
    num_steps = turns.step - times[0][0]
    return Ahead(times, (turns.now_ns - times[0][1]) / num_steps if num_steps else 0.0, has_waited)
