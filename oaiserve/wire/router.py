"""The router chooses the replica for each request: one that is not busy and holds the longest prefix of its prompt.

It is pure: it reads no clock, draws no random numbers and never waits, so routers with the same data make the same
choices. It knows neither HTTP nor the start and stop of replicas.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from math import exp, sqrt

import numpy as np
import numpy.typing as npt

from oaiserve.wire.prefix_keys import BLOCK_BYTES, BYTES_PER_TOKEN, Prompt, key_of_session, marked_depths
from oaiserve.wire.report import ReplicaReport
from oaiserve.wire.routing_decision import Decision, Reason

# A replica takes no request that would bring it above BOUND times the mean load, as long as another one is below.
BOUND = 1.25
# A replica within DEVIATIONS standard deviations of the mean isn't busy either: request counts vary by about their
# square root.
DEVIATIONS = 2
IDLE_LOAD = 4  # added to the mean for this, so that a few requests don't make a replica of an idle fleet busy
# Load is counted in requests. Each time this many prompt tokens are left to compute, they count as one more request.
TOKENS_PER_REQUEST = 1024
# A prefix that is a smaller part of the prompt doesn't decide the replica. Otherwise, all prompts that begin alike
# would go to the same few replicas.
LEAST_PART = 1 / 4
SILENT_NS = 10_000_000_000  # a replica without a report for this long is used only if all are silent
FADING_NS = 2_000_000_000  # The weight of a sent request in the load estimate falls to 1/e in this time.
NEWS = 1 / 2  # weight of the latest report against earlier ones, because loads vary from second to second
_MOST_EXPONENT = 20
_ROUNDING = 1e-6  # tolerance for rounding errors in sums of loads
MOST_PREFIXES = 1_000_000  # prefix keys, at about 200 bytes each
MOST_HOLDERS = 64  # maximum holders that are noted for a prefix
_ALL_BITS = (1 << 64) - 1
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # factors in splitmix64's last steps


class NoReplica(Exception):
    """There is no replica for a request."""


class Router:
    """The current replicas, their prefixes and loads from their reports, and the requests sent since then.

    `now_ns` is the caller's monotonic clock.
    """

    def __init__(self, *, most_prefixes: int = MOST_PREFIXES) -> None:
        self.holders = Holders(most_prefixes)
        self._members: dict[str, _Replica] = {}
        # Replicas that can be chosen, in the order of their names, which is the same for every router.
        self._available: list[_Replica] = []
        self._seeds = np.zeros(0, np.uint64)
        self._total_sent = self._total_rest = 0.0  # sums over the available replicas, as in _Replica
        self._fading_since_ns = 0
        self._next_silent_ns = 0  # earliest time at which one of them may count as silent

    def update_replicas(self, names: Iterable[str], now_ns: int) -> None:
        """Set the current replicas, without draining ones and those without an open port."""
        members = {name: self._members.get(name) or _Replica(name, now_ns) for name in names}
        if members.keys() != self._members.keys():
            self._members = members
            self._find_available(now_ns)

    def exclude(self, name: str, now_ns: int) -> None:
        """Avoid a replica until it reports again, because a request could not be delivered to it."""
        replica = self._members.get(name)
        if replica is not None:
            replica.heard_ns = now_ns - SILENT_NS
            self._find_available(now_ns)

    def learn(self, report: ReplicaReport, now_ns: int) -> None:
        """Apply a replica's report, unless a later one has arrived before."""
        replica = self._members.get(report.replica)
        if replica is None:
            return
        if report.incarnation != replica.incarnation:
            if replica.incarnation is not None:  # Data of the old process doesn't apply to the new one.
                replica = self._members[replica.name] = _Replica(replica.name, now_ns)
                self._find_available(now_ns)
            replica.incarnation = report.incarnation
        elif report.number <= replica.report_number:
            return
        was_silent = now_ns - replica.heard_ns >= SILENT_NS
        is_first = was_silent or replica.report_number < 0
        replica.report_number = report.number
        replica.heard_ns = now_ns
        if was_silent:
            self._find_available(now_ns)
        load = report.num_open + report.waiting_tokens / TOKENS_PER_REQUEST
        fading = self._fading(now_ns)  # It may rescale every `sent`, so it comes before `sent` is read.
        rest = load - replica.sent / fading
        if not is_first:
            rest = replica.rest + NEWS * (rest - replica.rest)
        if replica.is_available:
            self._total_rest += rest - replica.rest
        replica.rest = rest
        before = set(replica.reported)
        after = set(report.keys)
        for key in after - before:
            self.holders.add(key, replica)
        if not report.is_full:  # A full report leaves out keys that the replica may still hold.
            for key in before - after:
                self.holders.discard(key, replica)
        replica.reported = report.keys

    def choose(
        self,
        prompt: Prompt,
        now_ns: int,
        session: str | None = None,
        without: Collection[str] = (),
    ) -> Decision:
        """Choose the replica for a request, and count the request as sent to it.

        Replicas with the same prefix are tried in an order that depends on the conversation. The less loaded one of the
        first two that are not busy is chosen; for a `session` the first one, so that its requests stay together.
        `without` has the names of replicas that have already refused the request. Raises NoReplica.
        """
        if now_ns >= self._next_silent_ns:
            self._find_available(now_ns)
        if all(replica.name in without for replica in self._available):
            raise NoReplica("there is no replica that the request could be sent to")
        fading = self._fading(now_ns)
        own = prompt.conversation if session is None else key_of_session(session)
        bound = self._bound(_weight(prompt.num_tokens), fading)
        longest = num_holders = 0
        # A replica that refused the request still counts as a holder of its prefix.
        refused = next(self._holders_of(prompt, ()), None) if without else None
        held_share = 0.0 if refused is None else _share(prompt, refused[0])
        for depth, replicas in self._holders_of(prompt, without):
            if not longest:
                longest = depth
                num_holders = len(replicas)
                held_share = max(held_share, _share(prompt, longest))
            hit_tokens = _num_tokens(prompt, depth)
            most_load = bound - _weight(prompt.num_tokens - hit_tokens)
            in_order = sorted(replicas, key=lambda replica: -score(own, replica.seed))
            chosen = _first_below(most_load, in_order, fading, session)
            if chosen is not None:
                reason = Reason.PREFIX if depth == longest else Reason.SHORTER_PREFIX
                load = self._send(chosen, prompt, hit_tokens, fading)
                return Decision(chosen.name, reason, hit_tokens, num_holders, load, bound, held_share)
        key = own
        if session is None and longest:  # Spilling in a fixed order soon puts the prefix on those replicas.
            key = prompt.keys[longest - 1]
        elif session is None and prompt.keys and not self.holders.find(prompt.keys[0]):
            key = prompt.keys[0]  # Several routers then send a new prefix to the same replica.
        everywhere = (self._available[position] for position in order(key, self._seeds))
        allowed = (replica for replica in everywhere if replica.name not in without)
        chosen = _first_below(bound - _weight(prompt.num_tokens), allowed, fading, session)
        if chosen is None:
            assert without, "the least loaded replica is below the bound"
            rest = (replica for replica in self._available if replica.name not in without)
            chosen = min(rest, key=lambda replica: replica.load(fading))
        reason = Reason.SPILLED if longest else Reason.NEW
        load = self._send(chosen, prompt, 0, fading)
        return Decision(chosen.name, reason, 0, num_holders, load, bound, held_share)

    def _holders_of(self, prompt: Prompt, without: Collection[str]) -> Iterator[tuple[int, list[_Replica]]]:
        """Yield prefix lengths in blocks with their available holders, longest first. Prefixes that are too short are
        left out."""
        num_before = 0
        for depth in range(len(prompt.keys), 0, -1):
            if _num_tokens(prompt, depth) < LEAST_PART * prompt.num_tokens:
                return
            holders = self.holders.find(prompt.keys[depth - 1])
            if len(holders) > num_before:  # Otherwise they are the same: a holder of a longer prefix holds this one.
                num_before = len(holders)
                if replicas := [one for one in holders if one.is_available and one.name not in without]:
                    yield depth, replicas

    def _bound(self, weight: float, fading: float) -> float:
        """Return the bound on the load of a replica for a request with this weight without any prefix.

        The load of a replica with a long prefix may exceed the mean by chance, and by the cost of computing that prefix
        elsewhere. The mean with the whole request added is never below the least load with it, so there is always a
        replica below the bound.
        """
        number = len(self._available)
        mean = (self._total_sent / fading + self._total_rest) / number
        chance = DEVIATIONS * sqrt(max(mean, 0) + IDLE_LOAD)
        return max(BOUND * (mean + weight / number), mean + chance + weight - 1) + _ROUNDING

    def _send(self, replica: _Replica, prompt: Prompt, hit_tokens: int, fading: float) -> float:
        """Count a request as sent, and return the load with it. From now on, the replica counts as a holder of its
        prompt."""
        weight = _weight(prompt.num_tokens - hit_tokens)
        replica.sent += weight * fading
        self._total_sent += weight * fading
        for depth in marked_depths(len(prompt.keys)):
            self.holders.add(prompt.keys[depth - 1], replica)
        return replica.load(fading)

    def _fading(self, now_ns: int) -> float:
        """Return the weight of a request sent now. Earlier ones have lower weights."""
        exponent = (now_ns - self._fading_since_ns) / FADING_NS
        if exponent > _MOST_EXPONENT:
            for replica in self._members.values():
                replica.sent *= exp(-exponent)
            self._total_sent *= exp(-exponent)
            self._fading_since_ns = now_ns
            exponent = 0.0
        return exp(exponent)

    def _find_available(self, now_ns: int) -> None:
        """Find the available replicas: all with recent reports, or all if there is none."""
        for replica in self._available:
            replica.is_available = False
        members = [replica for _, replica in sorted(self._members.items())]
        self._available = [one for one in members if now_ns - one.heard_ns < SILENT_NS] or members
        for replica in self._available:
            replica.is_available = True
        self._seeds = np.array([replica.seed for replica in self._available], np.uint64)
        self._total_sent = sum(replica.sent for replica in self._available)
        self._total_rest = sum(replica.rest for replica in self._available)
        heard_ns = [one.heard_ns for one in self._available if now_ns - one.heard_ns < SILENT_NS]
        self._next_silent_ns = min(heard_ns, default=now_ns) + SILENT_NS


@dataclass(slots=True, eq=False)
class _Replica:
    """A replica, with the data of its reports."""

    name: str
    heard_ns: int
    seed: int = field(init=False)
    incarnation: str | None = None
    report_number: int = -1
    reported: array[int] = field(default_factory=lambda: array("Q"))
    # Its load is sent / fading + rest. Sent requests fade, because they end. The rest is the reported load in excess of
    # that, an average in which later reports count more. It comes from other routers' requests, and from requests that
    # end more slowly. It is negative if they end faster.
    sent: float = 0.0
    rest: float = 0.0
    is_available: bool = False

    def __post_init__(self) -> None:
        self.seed = seed_of(self.name)

    def load(self, fading: float) -> float:
        return self.sent / fading + self.rest


def _weight(tokens_to_compute: int) -> float:
    return 1 + tokens_to_compute / TOKENS_PER_REQUEST


def _num_tokens(prompt: Prompt, num_blocks: int) -> int:
    return min(num_blocks * BLOCK_BYTES // BYTES_PER_TOKEN, prompt.num_tokens)


def _share(prompt: Prompt, num_blocks: int) -> float:
    return _num_tokens(prompt, num_blocks) / max(1, prompt.num_tokens)


def _first_below(most_load: float, replicas: Iterable[_Replica], fading: float, session: str | None) -> _Replica | None:
    """Return the first replica with at most that load, or None; without a session, the less loaded one of the first
    two."""
    first = None
    for replica in replicas:
        if replica.load(fading) <= most_load:
            if session is not None:
                return replica
            if first is not None:
                return replica if replica.load(fading) < first.load(fading) else first
            first = replica
    return first


class Holders:
    """Replicas by prefix key. The least recently used keys are dropped first. If a key has too many holders, the oldest
    is dropped."""

    def __init__(self, most_keys: int) -> None:
        self._most_keys = most_keys
        self._holders: OrderedDict[int, tuple[_Replica, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def find(self, key: int) -> tuple[_Replica, ...]:
        return self._holders.get(key, ())

    def add(self, key: int, replica: _Replica) -> None:
        """Store a prefix that a replica holds, or is about to compute."""
        holders = self._holders.get(key)
        if holders is None:
            self._holders[key] = (replica,)
            if len(self._holders) > self._most_keys:
                self._holders.popitem(last=False)
            return
        self._holders.move_to_end(key)
        if replica not in holders:
            self._holders[key] = (*holders[len(holders) >= MOST_HOLDERS :], replica)

    def discard(self, key: int, replica: _Replica) -> None:
        holders = self._holders.get(key, ())
        if replica in holders:
            rest = tuple(one for one in holders if one is not replica)
            if rest:
                self._holders[key] = rest
            else:
                del self._holders[key]


# Rendezvous hashing orders the replicas by their scores for a key, in the same way in every router. If a replica leaves
# or joins, only the keys that rank it first move.


def seed_of(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def score(key: int, seed: int) -> int:
    """Return the score of one replica for a key. Replicas with different seeds never have the same score."""
    bits = key ^ seed
    bits = (bits ^ bits >> 30) * _FACTORS[0] & _ALL_BITS
    bits = (bits ^ bits >> 27) * _FACTORS[1] & _ALL_BITS
    return bits ^ bits >> 31


def order(key: int, seeds: npt.NDArray[np.uint64]) -> list[int]:
    """Return the positions of all seeds, from the highest score to the lowest."""
    bits = seeds ^ np.uint64(key)
    bits = (bits ^ bits >> np.uint64(30)) * np.uint64(_FACTORS[0])
    bits = (bits ^ bits >> np.uint64(27)) * np.uint64(_FACTORS[1])
    bits ^= bits >> np.uint64(31)
    positions: list[int] = np.argsort(~bits).tolist()
    return positions
