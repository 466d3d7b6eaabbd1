"""The work of steps by client, so that an account can say whose work a request waited for. Engine thread only, stdlib.

Each step adds its tokens and its time to the sums of their clients. A request keeps these sums when a phase begins.
Their growth until its end, without the request's own part, divides the time that others have added to the phase.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from heapq import nlargest
from itertools import chain
from operator import attrgetter, sub
from typing import NamedTuple, TypeVar

from oaiserve.facts.record import FURTHER_CLIENTS, OthersTime, Whose

MOST_GONE = 64  # clients to remember that have nothing open, because requests may have waited for them
MOST_NAMED = 8  # clients with a key in the account of a phase; the rest counts as one

_Key = TypeVar("_Key", bound=Hashable)


class Work(NamedTuple):
    """Tokens of prompts and rows of decodes that steps have computed for a client, the time of the steps that went to
    them, and that of its images and sounds, in nanoseconds."""

    prompt_tokens: int = 0
    decodes: int = 0
    prompts_ns: float = 0.0
    decodes_ns: float = 0.0
    media_ns: int = 0

    @property
    def total_ns(self) -> float:
        return self.prompts_ns + self.decodes_ns + self.media_ns


NO_WORK = Work()
_sums_of = attrgetter(*Work._fields)


@dataclass(slots=True, eq=False)
class ClientWork:
    """The work for a client so far, and its requests."""

    client: str  # as in its requests: the name of its key, or its address
    name: str | None  # name of the client's key, which may be shown
    num_opened: int = 0  # requests so far
    num_open: int = 0
    last_step: int = 0  # number of the last step with work for it
    prompt_tokens: int = 0
    decodes: int = 0
    prompts_ns: float = 0.0
    decodes_ns: float = 0.0
    media_ns: int = 0

    @property
    def work(self) -> Work:
        return Work._make(_sums_of(self))

    def since(self, then: Work) -> Work:
        return Work._make(map(sub, _sums_of(self), then))


class WorkBefore(NamedTuple):
    """The work for each client, and the requests of a request's own client, before a phase of the request."""

    number: int  # number of steps
    work: Mapping[ClientWork, Work]
    num_opened: int
    num_open: int


class StepWork(NamedTuple):
    """The work of one step by client, and the time of each token of a prompt, and of each row of decodes."""

    prompt_tokens: Mapping[ClientWork | None, int]
    decodes: Mapping[ClientWork | None, int]
    prompt_token_ns: float
    decode_ns: float

    def work(self, client: ClientWork) -> Work:
        tokens = self.prompt_tokens.get(client, 0)
        rows = self.decodes.get(client, 0)
        return Work(tokens, rows, tokens * self.prompt_token_ns, rows * self.decode_ns)


class WorkByClient:
    """The work for all clients with open requests, and for some that had one.

    A step costs an addition for each of its clients. What the work was after a step, or before it, is copied at most
    once, however many requests end a phase with it. A copy reads only the clients that got something since the one
    before.
    """

    def __init__(self) -> None:
        self._clients: dict[str, ClientWork] = {}
        self._gone: dict[ClientWork, None] = {}  # clients without open requests, the longest idle one first
        self.lone: ClientWork | None = None  # the only client with open requests
        self._number = 0  # number of steps so far
        self._last_step = StepWork({}, {}, 0.0, 0.0)
        # The work for each client as of the last copy, and the clients that got more since then
        self._works: dict[ClientWork, Work] = {}
        self._changed: set[ClientWork] = set()
        # Copies of the work, now and before the last step, once one was needed
        self._work_now: Mapping[ClientWork, Work] | None = None
        self._work_before_step: Mapping[ClientWork, Work] | None = None

    def opened(self, client: str, name: str | None) -> ClientWork:
        """Count a request of a client, and return its client."""
        found = self._clients.get(client)
        if found is None:
            found = self._clients[client] = ClientWork(client, name)
            self._works[found] = NO_WORK
        self._gone.pop(found, None)
        found.num_opened += 1
        found.num_open += 1
        self._find_lone()
        return found

    def closed(self, client: ClientWork) -> None:
        client.num_open -= 1
        if client.num_open:
            return
        self._gone[client] = None
        if len(self._gone) > MOST_GONE:
            first = next(iter(self._gone))
            del self._gone[first]
            del self._clients[first.client]
            del self._works[first]
        self._find_lone()

    def _find_lone(self) -> None:
        self.lone = None
        if len(self._clients) - len(self._gone) == 1:
            self.lone = next(client for client in reversed(self._clients.values()) if client.num_open)

    def step_of_one(self, client: ClientWork, work: Work) -> None:
        """Add a step with requests of one client only."""
        tokens, rows, prompts_ns, decodes_ns, _ = work
        self._add(StepWork({client: tokens}, {client: rows}, prompts_ns / max(1, tokens), decodes_ns / max(1, rows)))

    def step_ended(
        self, parts: Iterable[tuple[ClientWork | None, int, int]], prompts_ns: float, decodes_ns: float
    ) -> None:
        """Add a step: each chunk's client with the tokens of its prompt, and its rows of decodes. The step's time went
        to all prompts and all decodes in these parts."""
        prompt_tokens = Counter[ClientWork | None]()
        decodes = Counter[ClientWork | None]()
        for client, num_prompt_tokens, num_decodes in parts:
            if num_prompt_tokens:
                prompt_tokens[client] += num_prompt_tokens
            if num_decodes:
                decodes[client] += num_decodes
        num_tokens = max(1, prompt_tokens.total())
        num_rows = max(1, decodes.total())
        self._add(StepWork(prompt_tokens, decodes, prompts_ns / num_tokens, decodes_ns / num_rows))

    def decodes_ended(self, clients: list[ClientWork | None], decodes_ns: float) -> None:
        """Add a step whose chunks, each of which is one row of decodes, belong to these clients."""
        self._add(StepWork({}, Counter(clients), 0.0, decodes_ns / len(clients)))

    def _add(self, step: StepWork) -> None:
        self._number = number = self._number + 1
        self._last_step = step
        self._work_now = self._work_before_step = None
        prompt_tokens, decodes, prompt_token_ns, decode_ns = step
        for client, tokens in prompt_tokens.items():
            if client is not None and tokens:
                client.prompt_tokens += tokens
                client.prompts_ns += tokens * prompt_token_ns
                client.last_step = number
                self._changed.add(client)
        for client, rows in decodes.items():
            if client is not None and rows:
                client.decodes += rows
                client.decodes_ns += rows * decode_ns
                client.last_step = number
                self._changed.add(client)

    def encoded(self, client: ClientWork, media_ns: int) -> None:
        """Add the time of an image or a sound between two steps."""
        client.media_ns += media_ns
        client.last_step = self._number + 1
        self._changed.add(client)
        self._work_now = self._work_before_step = None

    def before(self, own: ClientWork, *, in_last_step: bool = False) -> WorkBefore:
        """Return the work before a phase of this client's request, which begins now, or began with the last step."""
        if self._work_now is None:
            self._works.update((client, client.work) for client in self._changed if client in self._works)
            self._changed.clear()
            self._work_now = self._works.copy()
        if not in_last_step:
            return WorkBefore(self._number, self._work_now, own.num_opened, own.num_open)
        if self._work_before_step is None:
            work = dict(self._work_now)
            step = self._last_step
            in_step = {*step.prompt_tokens, *step.decodes}.intersection(work)
            work.update((client, client.since(step.work(client))) for client in in_step if client is not None)
            self._work_before_step = work
        return WorkBefore(self._number - 1, self._work_before_step, own.num_opened, own.num_open)

    def since(
        self, before: WorkBefore, own: ClientWork, own_tokens: int, own_rows: int, own_media_ns: int = 0
    ) -> dict[ClientWork, Work]:
        """Return the work for each client since then, without clients that got none. The request itself had
        `own_tokens` of its client's prompts, `own_rows` of its decodes and that time of its media, which don't count.
        """
        found = {}
        for client in dict.fromkeys(chain(before.work, self._clients.values())):
            if client.last_step <= before.number:
                continue
            grown = client.since(before.work.get(client, NO_WORK))
            if client is own:
                has_others = before.num_open > 1 or client.num_opened > before.num_opened
                grown = _without(grown, own_tokens, own_rows, own_media_ns) if has_others else NO_WORK
            if any(grown):
                found[client] = grown
        return found


def _without(work: Work, tokens: int, rows: int, media_ns: int) -> Work:
    left_tokens = max(0, work.prompt_tokens - tokens)
    left_rows = max(0, work.decodes - rows)
    return Work(
        left_tokens,
        left_rows,
        work.prompts_ns * left_tokens / max(1, work.prompt_tokens),
        work.decodes_ns * left_rows / max(1, work.decodes),
        max(0, work.media_ns - media_ns),
    )


def while_waiting(work: Mapping[ClientWork, Work], own: ClientWork, waited_ns: int) -> list[OthersTime]:
    """Return the time of steps that went to each client's work while a request waited, or computed tokens of its own.
    It is at most the time of the wait, which has only a part of the first and of the last of these steps."""
    whole_ns = sum(one.total_ns for one in work.values())
    scale = min(1.0, waited_ns / whole_ns) if whole_ns else 0.0
    return _largest_first(
        OthersTime(*owner, int(one.prompts_ns * scale), int(one.decodes_ns * scale), int(one.media_ns * scale))
        for owner, one in _by_owner(work, own).items()
    )


def beside(
    work: Mapping[ClientWork, Work], own: ClientWork, prompts_ns: int, decodes_ns: int, media_ns: int
) -> list[OthersTime]:
    """Divide the time that others' prompts, decodes and media have added to a request's phase among their clients, by
    tokens, by rows, and by time. Each sum is kept, unless there were no such others."""
    owners = _by_owner(work, own)
    prompts = divided(prompts_ns, {owner: one.prompt_tokens for owner, one in owners.items()})
    decodes = divided(decodes_ns, {owner: one.decodes for owner, one in owners.items()})
    media = divided(media_ns, {owner: one.media_ns for owner, one in owners.items()})
    return _largest_first(
        OthersTime(*owner, prompts.get(owner, 0), decodes.get(owner, 0), media.get(owner, 0)) for owner in owners
    )


def divided(amount: int, weights: Mapping[_Key, int]) -> dict[_Key, int]:
    """Divide an amount by weights into integers that add up to it; into none if all weights are zero."""
    left = amount
    left_weight = sum(weights.values())
    parts = {}
    for key, weight in weights.items():
        if weight:
            parts[key] = left * weight // left_weight
            left -= parts[key]
            left_weight -= weight
    return parts


def _by_owner(work: Mapping[ClientWork, Work], own: ClientWork) -> dict[tuple[Whose, str | None], Work]:
    """Return the work by owner: the request's own client, each of the MOST_NAMED named clients with the most work, the
    other named clients together, and the clients without a name together."""
    others = {client: one for client, one in work.items() if client is not own}
    named = [client for client in others if client.name is not None]
    if len(named) > MOST_NAMED:
        named = nlargest(MOST_NAMED, named, key=lambda client: others[client].total_ns)
    names = {client.name for client in named}
    by_name: dict[str | None, list[Work]] = {}
    for client, one in others.items():
        is_named = client.name is None or client.name in names
        by_name.setdefault(client.name if is_named else FURTHER_CLIENTS, []).append(one)
    owners: dict[tuple[Whose, str | None], Work] = {}
    if own in work:
        owners[Whose.SAME_CLIENT, own.name] = work[own]
    for name, parts in by_name.items():
        owners[Whose.OTHER_CLIENT, name] = Work._make(map(sum, zip(*parts, strict=True)))
    return owners


def _largest_first(times: Iterable[OthersTime]) -> list[OthersTime]:
    found = [one for one in times if one.total_ns]
    return sorted(found, key=attrgetter("total_ns"), reverse=True)
