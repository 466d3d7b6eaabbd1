"""Follows the queue ahead of a request, and then its answer, step by step, by the learnt cost of steps.

It knows the rules of the scheduler by and large: decodes first, then prompts in their order within the time of a step,
and no more sequences than may run. It jumps over steps in which nothing changes. Plain arithmetic, no clock.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import ceil, inf
from operator import attrgetter
from typing import NamedTuple

from oaiserve.engine.scheduling.order import SHORTER_SHARE
from oaiserve.engine.scheduling.pacing import StepTime
from oaiserve.engine.scheduling.waiting import GENERATED_WEIGHT
from oaiserve.explain.step_cost import Load, StepCost

_service = attrgetter("service")
# Parts of prompts that are followed up to the first token, each for some microseconds; half as many behind it. What is
# left takes as long, for each token, as what went before.
MOST_PARTS = 96


class Rules(NamedTuple):
    """The rules by which the scheduler fills steps at this moment: its limits, the clients' counters of service, and
    the time between two steps."""

    max_running: int
    max_step_tokens: int
    services: Mapping[str, int]  # by client: the counters by which they take turns
    num_shorter_steps: int = 0  # in which prompts get a part of their time only
    host_ns: float = 0.0  # between two steps


class Expected(NamedTuple):
    """The requests that are expected to come meanwhile: one in each gap, as those of late."""

    gap_ns: float
    prompt_tokens: int
    answer_tokens: int
    clients: tuple[str, ...]  # of one after the other


class Decoding(NamedTuple):
    """A sequence that decodes."""

    tokens_left: int
    context: int
    client: str = ""


class Prompt(NamedTuple):
    """A sequence whose prompt is not computed."""

    tokens_left: int
    start: int  # tokens before, which it attends to
    answer_tokens: int
    has_place: bool = False  # or else it waits for one
    client: str = ""


class Ahead(NamedTuple):
    """The forecast of a request by the queue ahead of it, from the end of the step under way."""

    times: list[tuple[int, float]]  # steps and nanoseconds: of its first token, and of later ones
    pace_ns: float  # of the steps behind the last of these
    has_waited: bool  # for a place

    @property
    def first_token_ns(self) -> float:
        return self.times[0][1]

    def decode_ns(self, steps: float) -> float:
        """Return how long so many steps behind the first token take."""
        step, (last_step, last_ns) = self.times[0][0] + steps, self.times[-1]
        if step >= last_step:
            return last_ns + (step - last_step) * self.pace_ns - self.first_token_ns
        place = bisect_right(self.times, (step, inf))
        (from_step, from_ns), (to_step, to_ns) = self.times[place - 1 : place + 1]
        return from_ns + (step - from_step) * (to_ns - from_ns) / (to_step - from_step) - self.first_token_ns


@dataclass(slots=True)
class _Client:
    service: int
    num_decodes: int = 0
    begun: list[int] = field(default_factory=list)  # prompts with a place, by number
    waiting: list[int] = field(default_factory=list)


class _Turns:
    """The prompts, the decodes beside them, and the steps so far."""

    def __init__(
        self,
        step_time: StepTime,
        rules: Rules,
        decodes: Iterable[Decoding],
        prompts: list[Prompt],
        expected: Expected | None,
    ) -> None:
        self.rules = rules
        self.prompts = [*prompts]
        self.expected, self.num_come = expected, 0
        self.left = [prompt.tokens_left for prompt in prompts]
        self.step, self.now_ns, self.context = 0, 0.0, 0
        self.step_time = step_time
        self.taken: list[tuple[int, int]] = []  # by the step that is filled: prompts, and how many tokens of each
        self.budget = 0  # further tokens of that step
        self.clients: dict[str, _Client] = {}
        self.ends: list[tuple[int, int, str]] = []  # a heap of decodes: the step and the context at their end, client
        for one in decodes:
            self.ends.append((one.tokens_left, one.context + one.tokens_left, one.client))
            self.context += one.context
            self._client(one.client).num_decodes += 1
        heapify(self.ends)
        for number, prompt in enumerate(prompts):
            client = self._client(prompt.client)
            (client.begun if prompt.has_place else client.waiting).append(number)

    def _client(self, name: str) -> _Client:
        client = self.clients.get(name)
        if client is None:
            client = self.clients[name] = _Client(self.rules.services.get(name, 0))
        return client

    @property
    def next_ns(self) -> float:
        """Return when the next request is expected."""
        if self.expected is None or self.num_come >= MOST_PARTS:
            return inf
        return (self.num_come + 1) * self.expected.gap_ns

    def come(self) -> None:
        """Let the requests come that are expected by now."""
        while (expected := self.expected) is not None and self.next_ns <= self.now_ns:
            name = expected.clients[self.num_come % len(expected.clients)]
            self.num_come += 1
            self._client(name).waiting.append(len(self.prompts))
            self.prompts.append(Prompt(expected.prompt_tokens, 0, expected.answer_tokens, client=name))
            self.left.append(expected.prompt_tokens)

    def fill(self) -> None:
        """Take prompts into the next step, as `Scheduler._compute_prompts` does."""
        decodes = Load(len(self.ends), self.context, 0, 0, 0, len(self.ends))
        self.step_time.begin_with(decodes)
        self.taken, self.budget = [], self.rules.max_step_tokens - decodes.decodes
        clients = [one for one in self.clients.values() if one.begun or one.waiting]
        if not clients:
            return
        begun = sorted(((one.service, number) for one in clients for number in one.begun), reverse=True)
        num_running = len(self.ends) + len(begun)
        while True:
            waiting = [one for one in clients if one.waiting]
            client = min(waiting, key=_service) if waiting else None
            head = None if client is None else client.waiting[0]
            while begun and self.budget > 0 and (head is None or not self._passes(head, begun[-1][1])):
                number = begun.pop()[1]
                self._take(number, begun[-1][1] if begun else head)
            if head is None or client is None:
                break
            if num_running >= self.rules.max_running and (client.num_decodes or client.begun):
                break
            if not self._take(head):
                break
            client.waiting.pop(0)
            insort(client.begun, head)
            num_running += 1
        while begun and self._take(begun.pop()[1]):
            pass

    def _passes(self, head: int, number: int) -> bool:
        return head < number and self.prompts[head].client == self.prompts[number].client

    def _take(self, number: int, behind: int | None = None) -> bool:
        """Take a prompt into the step. It leaves half to a shorter one behind it. Return False if there is no room."""
        left, prompt = self.left[number], self.prompts[number]
        if self.budget <= 0 or not self.step_time.has_room(left):
            self.budget = 0  # nor for others
            return False
        share = SHORTER_SHARE if self.step < self.rules.num_shorter_steps else 1.0
        if behind is not None and self.left[behind] < left and self.prompts[behind].client == prompt.client:
            share /= 2
        start = prompt.start + prompt.tokens_left - left
        part = self.step_time.fitting(start, min(left, self.budget), share)
        self.step_time.add(start, part)
        self.budget -= part
        self.clients[prompt.client].service += part
        self.taken.append((number, part))
        return True

    def go(self, ns: float) -> list[int]:
        """Go on by the filled step, which takes so long, and by those after it that are alike. Return the prompts that
        have ended."""
        taken = self.taken
        ended = [number for number, part in taken if part >= self.left[number]]
        steps = 1
        if not ended and len(taken) < 2:
            steps = (self.left[taken[0][0]] - 1) // taken[0][1] if taken else self.ends[0][0] - self.step
            if self.ends:
                steps = min(steps, self.ends[0][0] - self.step)
            if 0 < self.rules.num_shorter_steps - self.step < steps:
                steps = self.rules.num_shorter_steps - self.step
            if self.next_ns < self.now_ns + steps * (ns + self.rules.host_ns):
                steps = ceil((self.next_ns - self.now_ns) / (ns + self.rules.host_ns))
            steps = max(1, steps)
        self.now_ns += steps * (ns + self.rules.host_ns)
        self.context += len(self.ends) * steps
        self.step += steps
        for client in self.clients.values():
            client.service += GENERATED_WEIGHT * steps * client.num_decodes
        for number, part in taken:
            self.left[number] -= part * steps
        for number in ended:
            prompt = self.prompts[number]
            client = self.clients[prompt.client]
            client.begun.remove(number)
            if prompt.answer_tokens > 1:
                context = prompt.start + prompt.tokens_left
                self.context += context
                client.num_decodes += 1
                end = self.step + prompt.answer_tokens - 1, context + prompt.answer_tokens - 1, prompt.client
                heappush(self.ends, end)
        while self.ends and self.ends[0][0] <= self.step:
            _, context, name = heappop(self.ends)
            self.context -= context
            self.clients[name].num_decodes -= 1
        return ended

    def ahead_of(self, place: int) -> int:
        """Return about how many prompt tokens are computed up to the first token of the prompt at this place, its own
        included. Of each other client they are as many as of its own, if there are so many."""
        totals = dict.fromkeys(self.clients, 0)
        for number, left in enumerate(self.left):
            name = self.prompts[number].client
            if name != self.prompts[place].client or number <= place:
                totals[name] += max(0, left)
        own = totals[self.prompts[place].client]
        return sum(min(total, own) for total in totals.values())


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
    """Return when the prompt at this place has its first token, and those of at most so many steps after it.

    Prompts of a client are in the order in which they are due. `step_time` is one of its own.
    """
    turns = _Turns(step_time, rules, decodes, prompts, expected)
    has_waited, num_parts, before, times = False, 0, turns.ahead_of(place), list[tuple[int, float]]()
    while num_parts < MOST_PARTS and (not times or turns.step < times[0][0] + most_steps):
        turns.come()
        turns.fill()
        num_parts += len(turns.taken) + 1
        if not turns.taken and not turns.ends:  # nothing may ever run: only a limit of the cache could say when
            break
        has_waited = has_waited or (not times and not turns.taken)
        is_first = place in turns.go(cost.expected_ns(step_time.load))
        if is_first:
            num_parts = MOST_PARTS // 2
        if is_first or times:
            times.append((turns.step, turns.now_ns))
    if not times:
        done = max(1, before - turns.ahead_of(place))
        return Ahead([(turns.step, turns.now_ns * before / done)], turns.now_ns / max(1, turns.step), has_waited=True)
    num_steps = turns.step - times[0][0]
    return Ahead(times, (turns.now_ns - times[0][1]) / num_steps if num_steps else 0.0, has_waited)
