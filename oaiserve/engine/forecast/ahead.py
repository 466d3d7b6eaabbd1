"""Follows the queue ahead of a request, step by step, by the learnt cost of steps: when does its first token come?

It knows the rules of the scheduler by and large: decodes first, then prompts in their order within the time of a step,
and no more sequences than may run. It jumps over steps in which nothing changes. Plain arithmetic, no clock.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import NamedTuple

from oaiserve.engine.pacing import StepTime
from oaiserve.engine.scheduler import SHORTER_SHARE
from oaiserve.engine.waiting import GENERATED_WEIGHT
from oaiserve.explain.step_cost import Load, StepCost

_service = attrgetter("service")
# Parts of prompts that are followed, each for some microseconds. What is left of a longer queue takes as long, for each
# token, as what went before.
MOST_PARTS = 96


class Rules(NamedTuple):
    """What fills a step at this moment."""

    max_running: int
    max_step_tokens: int
    services: Mapping[str, int]  # by client: the counters by which they take turns
    num_shorter_steps: int = 0  # in which prompts get a part of their time only
    host_ns: float = 0.0  # between two steps


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
    """What the queue makes of a request's first token."""

    first_token_ns: float  # from the end of the step under way
    num_decodes: int  # beside it, then
    context: int  # that these attend to, added up
    has_waited: bool  # for a place


@dataclass(slots=True)
class _Client:
    service: int
    num_decodes: int = 0
    begun: list[int] = field(default_factory=list)  # prompts with a place, by number
    waiting: list[int] = field(default_factory=list)


class _Turns:
    """The prompts, the decodes beside them, and the steps so far."""

    def __init__(self, rules: Rules, decodes: Iterable[Decoding], prompts: list[Prompt]) -> None:
        self.rules = rules
        self.prompts = prompts
        self.left = [prompt.tokens_left for prompt in prompts]
        self.step, self.now_ns, self.context = 0, 0.0, 0
        self.clients: dict[str, _Client] = {}
        self.ends: list[
            tuple[int, int, str]
        ] = []  # a heap: after which step, the context that each has then, its client
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
    def decodes(self) -> Load:
        return Load(len(self.ends), self.context, 0, 0, 0, len(self.ends))

    def filled(self, step_time: StepTime) -> list[tuple[int, int]]:
        """Return the prompts in the next step, each with its number of tokens: as `Scheduler._compute_prompts`."""
        step_time.begin_with(self.decodes)
        taken: list[tuple[int, int]] = []
        budget = [self.rules.max_step_tokens - len(self.ends)]
        clients = self.clients.values()
        begun = sorted(((one.service, number) for one in clients for number in one.begun), reverse=True)
        num_running = len(self.ends) + len(begun)
        while True:
            waiting = [one for one in clients if one.waiting]
            client = min(waiting, key=_service) if waiting else None
            head = None if client is None else client.waiting[0]
            while begun and budget[0] > 0 and (head is None or not self._passes(head, begun[-1][1])):
                number = begun.pop()[1]
                behind = begun[-1][1] if begun else head
                self._take(number, behind, step_time, taken, budget)
            if head is None or client is None or budget[0] <= 0:
                break
            if num_running >= self.rules.max_running and (client.num_decodes or client.begun):
                break
            if not self._take(head, None, step_time, taken, budget):
                break
            client.waiting.pop(0)
            insort(client.begun, head)
            num_running += 1
        while begun and budget[0] > 0:
            self._take(begun.pop()[1], None, step_time, taken, budget)
        return taken

    def _passes(self, head: int, number: int) -> bool:
        return head < number and self.prompts[head].client == self.prompts[number].client

    def _take(
        self, number: int, behind: int | None, step_time: StepTime, taken: list[tuple[int, int]], budget: list[int]
    ) -> bool:
        """Give a prompt its tokens, of which it leaves half to a shorter one behind it. Return False if none fit."""
        left, prompt = self.left[number], self.prompts[number]
        if budget[0] > 0 and not step_time.has_room(left):
            budget[0] = 0  # nor for others
        if budget[0] <= 0:
            return False
        share = SHORTER_SHARE if self.step < self.rules.num_shorter_steps else 1.0
        if behind is not None and self.left[behind] < left and self.prompts[behind].client == prompt.client:
            share /= 2
        start = prompt.start + prompt.tokens_left - left
        part = step_time.fitting(start, min(left, budget[0]), share)
        step_time.add(start, part)
        budget[0] -= part
        self.clients[prompt.client].service += part
        taken.append((number, part))
        return True

    def go(self, taken: list[tuple[int, int]], ns: float) -> list[int]:
        """Go on by this step, and by those after it that are alike. Return the prompts that have ended."""
        ended = [number for number, part in taken if part >= self.left[number]]
        steps = 1
        if not ended and len(taken) < 2:
            steps = (self.left[taken[0][0]] - 1) // taken[0][1] if taken else self.ends[0][0] - self.step
            if self.ends:
                steps = min(steps, self.ends[0][0] - self.step)
            if 0 < self.rules.num_shorter_steps - self.step < steps:
                steps = self.rules.num_shorter_steps - self.step
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
        """Return about how many tokens are computed before the first token of a prompt, with its own: of each other
        client as many as of its own, if there are so many."""
        totals = dict.fromkeys(self.clients, 0)
        for number, left in enumerate(self.left):
            name = self.prompts[number].client
            if name != self.prompts[place].client or number <= place:
                totals[name] += max(0, left)
        own = totals[self.prompts[place].client]
        return sum(min(total, own) for total in totals.values())


def first_token(
    cost: StepCost, step_time: StepTime, rules: Rules, decodes: Iterable[Decoding], prompts: list[Prompt], place: int
) -> Ahead:
    """Return when the prompt at this place has its first token: prompts of a client are in the order in which they are
    due. `step_time` is one of its own."""
    turns = _Turns(rules, decodes, prompts)
    has_waited, num_parts, before = False, 0, turns.ahead_of(place)
    while num_parts < MOST_PARTS:
        load = turns.decodes
        taken = turns.filled(step_time)
        num_parts += len(taken) + 1
        if not taken and not turns.ends:  # nothing may ever run: only a limit of the cache could say when
            break
        has_waited = has_waited or not taken
        ended = turns.go(taken, cost.expected_ns(step_time.load if taken else load))
        if place in ended:
            return Ahead(turns.now_ns, load.decodes, load.decode_context, has_waited)
    done = max(1, before - turns.ahead_of(place))
    return Ahead(turns.now_ns * before / done, len(turns.ends), turns.context, has_waited=True)
