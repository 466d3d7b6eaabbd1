"""The shares of requests that compute one token of their only sequence in each step. Engine thread only, no torch.

A step is added to sums over all such requests, not to each request. A request notes the sums when it joins, and gets
its shares when it leaves. That is possible because a token's share depends on the step and, linearly, on the context,
which grows by one in each step.
"""

from __future__ import annotations

from dataclasses import dataclass

from oaiserve.engine.sequences.step import Chunk
from oaiserve.explain.causes import RequestCauses
from oaiserve.explain.step_cost import Load

# Number of steps after which all requests get their shares, so that the sums stay small and their differences exact.
MOST_STEPS = 1024


@dataclass(slots=True)
class _Sums:
    """Sums over steps of the cost of a token: the constant part, the part per token of context, that part times the
    step's number, and the part per cached token."""

    token: float = 0.0
    context: float = 0.0
    context_steps: float = 0.0
    cached: float = 0.0

    def add(self, factor: float, token: float, context: float, cached: float, step: int) -> None:
        self.token += token
        self.context += factor * context
        self.context_steps += factor * context * step
        self.cached += factor * cached

    def of(self, offset: int, num_cached: int) -> float:
        """Return the sum for a request whose context is `offset` tokens longer than the number of steps."""
        return self.token + self.context * offset + self.context_steps + self.cached * num_cached


@dataclass(slots=True)
class _Member:
    offset: int  # its tokens of context minus the number of steps so far
    num_cached: int
    before: tuple[float, float, float, float]  # its four sums when it joined; its shares are what was added since


class PlainDecodes:
    """The requests that computed one token of their only sequence in the last step, with the sums over steps."""

    def __init__(self) -> None:
        self._members: dict[RequestCauses, _Member] = {}
        # The members in the order of the last step's chunks; empty if one has come or left since.
        self._in_order: list[RequestCauses | None] = []
        self._sum_of_offsets = 0
        self._step = 0
        self._alone = _Sums()
        self._cores = _Sums()
        self._machine = _Sums()
        self._reads = 0.0

    def __len__(self) -> int:
        return len(self._members)

    def begin_step(self, chunks: list[Chunk], load: Load) -> list[Chunk]:
        """Note which requests take part in a step with this load, and return the chunks of all others."""
        if self._step >= MOST_STEPS:
            self.settle_all()
        members = self._members
        number = len(chunks)
        if load == (number, load.decode_context, load.cached_context, 0, 0, number, 0, 0):
            singles = chunks  # each has one token and one draw
            sum_of_starts = load.decode_context + load.cached_context
            others = []
        else:
            singles = [chunk for chunk in chunks if chunk[2] == 1 == chunk[3]]
            sum_of_starts = sum([chunk[1] for chunk in singles])
            others = [chunk for chunk in chunks if not chunk[2] == 1 == chunk[3]]
        owns = [chunk[0].causes for chunk in singles]
        if owns == self._in_order or (len(owns) == len(members) and members.keys() == set(owns)):
            # No context grows by more than a token in a step. So if their sum has grown by one for each, all have.
            if sum_of_starts == self._sum_of_offsets + len(members) * self._step:
                self._in_order = owns
                return others
            self.settle_all()
        for absent in members.keys() - set(owns):
            self.settle(absent)
        for chunk, own in zip(singles, owns, strict=True):
            if own is None:
                continue
            sequence = chunk.sequence
            member = members.get(own)
            if member is not None and member.offset + self._step != chunk.start:
                self.settle(own)
                member = None
            if member is None:
                if own.is_plain and not sequence.needs_ids:
                    self._come(own, chunk.start - self._step, sequence.num_cached)
                else:
                    others.append(chunk)
        return others

    def step_ended(
        self,
        costs_ns: tuple[float, float, float],
        unit: float,
        beside: float,
        core_ns: float,
        machine_ns: float,
        read: float,
        *,
        is_known: bool,
    ) -> None:
        """Add a step. `costs_ns` are the costs of a token: the constant part, per token of context, and extra per
        cached token.

        Its share of `core_ns` and `machine_ns` is `unit` times these costs, plus `beside`. It reads `read` of the
        weights. The expected time alone is added only if the time of the whole step `is_known`.
        """
        token_ns, context_ns, cached_ns = costs_ns
        step = self._step
        if is_known:
            self._alone.add(1.0, token_ns, context_ns, cached_ns, step)
        share = unit * token_ns + beside
        self._cores.add(core_ns * unit, core_ns * share, context_ns, cached_ns, step)
        self._machine.add(machine_ns * unit, machine_ns * share, context_ns, cached_ns, step)
        self._reads += read
        self._step += 1

    def settle(self, own: RequestCauses) -> None:
        """Give a request its shares, if it is a member, and remove it. It may join again with the next step."""
        member = self._members.pop(own, None)
        if member is None:
            return
        self._in_order = []
        self._sum_of_offsets -= member.offset
        alone_ns, core_ns, machine_ns, reads = self._amounts(member.offset, member.num_cached)
        before = member.before
        own.alone_ns += alone_ns - before[0]
        own.core_ns += core_ns - before[1]
        own.machine_ns += machine_ns - before[2]
        own.weight_reads += reads - before[3]

    def unsettled_ns(self, own: RequestCauses) -> float:
        """Return the expected time alone that a request has not been given yet. Any thread may call this."""
        member = self._members.get(own)
        return 0.0 if member is None else self._alone.of(member.offset, member.num_cached) - member.before[0]

    def settle_all(self) -> None:
        for own in list(self._members):
            self.settle(own)
        self._step = 0
        self._alone = _Sums()
        self._cores = _Sums()
        self._machine = _Sums()
        self._reads = 0.0

    def _come(self, own: RequestCauses, offset: int, num_cached: int) -> None:
        self._members[own] = _Member(offset, num_cached, self._amounts(offset, num_cached))
        self._in_order = []
        self._sum_of_offsets += offset

    def _amounts(self, offset: int, num_cached: int) -> tuple[float, float, float, float]:
        return (
            self._alone.of(offset, num_cached),
            self._cores.of(offset, num_cached),
            self._machine.of(offset, num_cached),
            self._reads,
        )
