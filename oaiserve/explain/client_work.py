"""The work that steps do for each client, so that a request's account can say whose work it waited for. Engine thread
only, stdlib.

Each step adds its tokens and its time to the sums of their clients. A request stores these sums when a phase begins. By
their growth until the phase ends, without the request's own part, the time that others have added to the phase is
divided among them.
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

MOST_GONE = 64  # clients without open requests that are remembered, because other requests may have waited for them
MOST_NAMED = 8  # clients with a key that the account of a phase names; the others count as one

_Key = TypeVar("_Key", bound=Hashable)


class Work(NamedTuple):
    """The tokens of prompts and the rows of decodes that steps have computed for a client, with their shares of the
    steps' time, and the time spent on its images and sounds, in nanoseconds."""

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
    """A client's number of requests, and the work done for it so far."""

    client: str  # as in the records of its requests: the name of its key, or its address
    name: str | None  # name of the client's key, which may be shown to others
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
    """The work done for each client before a phase of a request, and the number of requests of its own client then."""

    number: int  # number of steps
    work: Mapping[ClientWork, Work]
    num_opened: int
    num_open: int


class StepWork(NamedTuple):
    """The work of one step by client, the time per prompt token, and the time per row of decodes."""

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

    A step costs one addition per client in it. The sums after a step, or before it, are copied at most once, however
    many requests end a phase with that step. A copy reads only the clients whose sums have changed since the last copy.
    """

    def __init__(self) -> None:
        self._clients: dict[str, ClientWork] = {}
        self._gone: dict[ClientWork, None] = {}  # clients without open requests, the one idle for longest first
        self.lone: ClientWork | None = None  # the only client with open requests
        self._number = 0  # number of steps so far
        self._last_step = StepWork({}, {}, 0.0, 0.0)
        # The work for each client as of the last copy, and the clients whose work has grown since then.
        self._works: dict[ClientWork, Work] = {}
        self._changed: set[ClientWork] = set()
        # Copies of the work, current and before the last step; None until they are needed.
        self._work_now: Mapping[ClientWork, Work] | None = None
        self._work_before_step: Mapping[ClientWork, Work] | None = None

    def opened(self, client: str, name: str | None) -> ClientWork:
        """Count a new request of a client, and return the client's work."""
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
        """Add a step. For each chunk, `parts` has the client, its number of prompt tokens, and its number of decode
        rows. The times are those of all prompts and of all decodes in the step."""
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
        """Add a step in which each chunk is one row of decodes of one of these clients."""
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
        """Return the work before a phase of a request of client `own`. The phase begins now, or began with the last
        step."""
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
        """Return the work for each client since `before`, leaving out clients without any. The request's own part
        doesn't count: `own_tokens` of its prompts, `own_rows` of its decodes, and `own_media_ns` of its media."""
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
    The times are scaled down to at most the time of the wait, which contains the first and the last of these steps only
    in part."""
    whole_ns = sum(one.total_ns for one in work.values())
    scale = min(1.0, waited_ns / whole_ns) if whole_ns else 0.0
    return _largest_first(
        OthersTime(*owner, int(one.prompts_ns * scale), int(one.decodes_ns * scale), int(one.media_ns * scale))
        for owner, one in _by_owner(work, own).items()
    )


def beside(
    work: Mapping[ClientWork, Work], own: ClientWork, prompts_ns: int, decodes_ns: int, media_ns: int
) -> list[OthersTime]:
    """Divide the time that other requests have added to a phase among their clients: that of prompts by tokens, that of
    decodes by rows, and that of media by their time. Each sum stays the same, unless there were no such requests."""
    owners = _by_owner(work, own)
    prompts = divided(prompts_ns, {owner: one.prompt_tokens for owner, one in owners.items()})
    decodes = divided(decodes_ns, {owner: one.decodes for owner, one in owners.items()})
    media = divided(media_ns, {owner: one.media_ns for owner, one in owners.items()})
    return _largest_first(
        OthersTime(*owner, prompts.get(owner, 0), decodes.get(owner, 0), media.get(owner, 0)) for owner in owners
    )


def divided(amount: int, weights: Mapping[_Key, int]) -> dict[_Key, int]:
    """Divide an amount in proportion to weights into integers that add up to it. If all weights are zero, there are
    none."""
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
