"""The work of steps by client, so that an account can say whose work a request waited for. Engine thread only, stdlib.

Each step adds its tokens and its time to the sums of their clients. A request keeps these sums when a phase begins.
Their growth until its end, without the request's own part, divides the time that others have added to the phase.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from oaiserve.facts.record import OthersTime, Whose

MOST_GONE = 64  # clients to remember that have nothing open, because requests may have waited for them
MOST_NAMED = 8  # clients in the account of a phase; the rest is one without a name

_others_ns = attrgetter("total_ns")


class Work(NamedTuple):
    """Tokens of prompts and rows of decodes that steps have computed for a client, the time of the steps that went to
    them, and that of its images and sounds, in nanoseconds."""

    prompt_tokens: int = 0
    decodes: int = 0
    prompts_ns: float = 0.0
    decodes_ns: float = 0.0
    media_ns: int = 0


@dataclass(slots=True, eq=False)
class ClientWork:
    """The work for a client so far, and its requests."""

    client: str  # as in its requests: the name of its key, or its address
    name: str | None  # that of its key, which may be shown
    num_opened: int = 0  # requests so far
    num_open: int = 0
    prompt_tokens: int = 0
    decodes: int = 0
    prompts_ns: float = 0.0
    decodes_ns: float = 0.0
    media_ns: int = 0

    def add(self, work: Work) -> None:
        self.prompt_tokens += work.prompt_tokens
        self.decodes += work.decodes
        self.prompts_ns += work.prompts_ns
        self.decodes_ns += work.decodes_ns

    @property
    def work(self) -> Work:
        return Work(self.prompt_tokens, self.decodes, self.prompts_ns, self.decodes_ns, self.media_ns)

    def since(self, then: Work) -> Work:
        return Work(
            self.prompt_tokens - then.prompt_tokens,
            self.decodes - then.decodes,
            self.prompts_ns - then.prompts_ns,
            self.decodes_ns - then.decodes_ns,
            self.media_ns - then.media_ns,
        )


class WorkBefore(NamedTuple):
    """The work for each client, and the requests of a request's own client, before a phase of the request."""

    work: Mapping[ClientWork, Work]
    num_opened: int
    num_open: int


class WorkByClient:
    """The work for all clients with open requests, and for some that had one."""

    def __init__(self) -> None:
        self._clients: dict[str, ClientWork] = {}
        self._gone: dict[ClientWork, None] = {}  # those without open requests, the first one longest ago
        self.lone: ClientWork | None = None  # the only client with open requests
        self._last_step: dict[ClientWork, Work] = {}

    def opened(self, client: str, name: str | None) -> ClientWork:
        """Count a request of a client, and return its client."""
        found = self._clients.get(client)
        if found is None:
            found = self._clients[client] = ClientWork(client, name)
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
        self._find_lone()

    def _find_lone(self) -> None:
        self.lone = None
        if len(self._clients) - len(self._gone) == 1:
            self.lone = next(client for client in reversed(self._clients.values()) if client.num_open)

    def step_of_one(self, client: ClientWork, work: Work) -> None:
        """Add a step with requests of one client only."""
        self._add({client: work})

    def step_ended(
        self, parts: Iterable[tuple[ClientWork | None, int, int]], prompts_ns: float, decodes_ns: float
    ) -> None:
        """Add a step: each chunk's client with the tokens of its prompt, and its rows of decodes. The step's time went
        to all prompts and all decodes in these parts."""
        prompt_tokens = Counter[ClientWork | None]()
        decodes = Counter[ClientWork | None]()
        for client, num_prompt_tokens, num_decodes in parts:
            prompt_tokens[client] += num_prompt_tokens
            decodes[client] += num_decodes
        prompt_token_ns = prompts_ns / max(1, prompt_tokens.total())
        decode_ns = decodes_ns / max(1, decodes.total())
        self._add(
            {
                client: Work(tokens, rows, tokens * prompt_token_ns, rows * decode_ns)
                for client, rows in decodes.items()
                if client is not None and (tokens := prompt_tokens[client]) + rows
            }
        )

    def decodes_ended(self, clients: list[ClientWork | None], decodes_ns: float) -> None:
        """Add a step in which each of its chunks, which are these clients', is one row of decodes."""
        decode_ns = decodes_ns / len(clients)
        rows = Counter(clients)
        self._add({one: Work(0, n, 0.0, n * decode_ns) for one, n in rows.items() if one is not None})

    def _add(self, step: dict[ClientWork, Work]) -> None:
        self._last_step = step
        for client, work in step.items():
            client.add(work)

    def before(self, own: ClientWork, *, in_last_step: bool = False) -> WorkBefore:
        """Return what a phase of a request of this client begins with, now, or in the last step."""
        work = {client: client.work for client in self._clients.values()}
        if in_last_step:
            work |= {client: client.since(of_step) for client, of_step in self._last_step.items()}
        return WorkBefore(work, own.num_opened, own.num_open)

    def since(self, before: WorkBefore, own: ClientWork, own_tokens: int, own_rows: int) -> dict[ClientWork, Work]:
        """Return what was computed for each client since then, without clients that got nothing. Of a request's own
        client, the request itself had `own_tokens` of its prompts and `own_rows` of its decodes, which don't count."""
        found = {}
        for client in {**dict.fromkeys(before.work), **dict.fromkeys(self._clients.values())}:
            then = before.work.get(client, Work())
            grown = client.since(then)
            if client is own:
                has_others = before.num_open > 1 or client.num_opened > before.num_opened
                grown = _without(grown, own_tokens, own_rows) if has_others else Work()
            if any(grown):
                found[client] = grown
        return found


def _without(work: Work, tokens: int, rows: int) -> Work:
    left_tokens = max(0, work.prompt_tokens - tokens)
    left_rows = max(0, work.decodes - rows)
    return Work(
        left_tokens,
        left_rows,
        work.prompts_ns * left_tokens / max(1, work.prompt_tokens),
        work.decodes_ns * left_rows / max(1, work.decodes),
        work.media_ns,
    )


def while_waiting(work: Mapping[ClientWork, Work], own: ClientWork, waited_ns: int) -> list[OthersTime]:
    """Return the time of steps that went to each client's work while a request waited, or computed tokens of its own.
    It is at most the time of the wait, which has only a part of the first and of the last of these steps."""
    whole_ns = sum(one.prompts_ns + one.decodes_ns + one.media_ns for one in work.values())
    scale = min(1.0, waited_ns / whole_ns) if whole_ns else 0.0
    return _named(
        {
            client: (int(one.prompts_ns * scale), int(one.decodes_ns * scale), int(one.media_ns * scale))
            for client, one in work.items()
        },
        own,
    )


def beside(
    work: Mapping[ClientWork, Work], own: ClientWork, prompts_ns: int, decodes_ns: int, media_ns: int
) -> list[OthersTime]:
    """Divide the time that others' prompts, decodes and media have added to a request's phase among their clients, by
    tokens, by rows, and by time. Each sum is kept, unless there were no such others."""
    prompts = divided(prompts_ns, {client: one.prompt_tokens for client, one in work.items()})
    decodes = divided(decodes_ns, {client: one.decodes for client, one in work.items()})
    media = divided(media_ns, {client: one.media_ns for client, one in work.items()})
    parts = {client: (prompts.get(client, 0), decodes.get(client, 0), media.get(client, 0)) for client in work}
    return _named(parts, own)


def divided(amount: int, weights: Mapping[ClientWork, int]) -> dict[ClientWork, int]:
    """Divide an amount by weights into integers that add up to it; into none if all weights are zero."""
    left = amount
    left_weight = sum(weights.values())
    parts = {}
    for client, weight in weights.items():
        if weight:
            parts[client] = left * weight // left_weight
            left -= parts[client]
            left_weight -= weight
    return parts


def _named(parts: Mapping[ClientWork, tuple[int, int, int]], own: ClientWork) -> list[OthersTime]:
    """Return the times by client, the largest first. Clients without a name, and those after the first few, are one."""
    sums: dict[tuple[Whose, str | None], tuple[int, int, int]] = {}
    largest = sorted(parts.items(), key=lambda part: sum(part[1]), reverse=True)
    for number, (client, times) in enumerate(largest):
        if client is own:
            key = (Whose.SAME_CLIENT, client.name)
        else:
            key = (Whose.OTHER_CLIENT, client.name if number < MOST_NAMED else None)
        prompts_ns, decodes_ns, media_ns = (a + b for a, b in zip(sums.get(key, (0, 0, 0)), times, strict=True))
        sums[key] = (prompts_ns, decodes_ns, media_ns)
    found = [OthersTime(*key, *times) for key, times in sums.items() if any(times)]
    return sorted(found, key=_others_ns, reverse=True)
