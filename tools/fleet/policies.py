"""Policies that place requests on simulated replicas: ours, and those that it is compared with.

A policy is asked with the number of each replica's open requests, exact and without delay; ours does not read them: it
has reports, as in a fleet. All learn at once when a replica leaves or joins.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import numpy as np
import numpy.typing as npt

from oaiserve.facts.prefix_keys import MOST_BLOCKS, Prompt, marked_depths
from oaiserve.facts.report import ReplicaReport
from oaiserve.scale.rendezvous import order, seed_of
from oaiserve.scale.router import Router
from tools.fleet.traffic import Call

Numbers = npt.NDArray[np.int64]
_DOWN = 1 << 40  # added to the open requests of a replica that takes none


class Policy(Protocol):
    wants_reports: bool

    def choose(self, call: Call, num_open: Numbers, now: float) -> int: ...
    def set_up(self, up: list[bool], now: float) -> None: ...


class RoundRobin:
    wants_reports = False

    def __init__(self, number: int) -> None:
        self._up = [*range(number)]
        self._next = 0

    def set_up(self, up: list[bool], now: float) -> None:
        self._up = [index for index, is_up in enumerate(up) if is_up]

    def choose(self, call: Call, num_open: Numbers, now: float) -> int:
        self._next += 1
        return self._up[self._next % len(self._up)]


class LeastConnections:
    wants_reports = False

    def __init__(self, number: int) -> None:
        self._down = np.zeros(number, np.int64)

    def set_up(self, up: list[bool], now: float) -> None:
        self._down = np.where(up, 0, _DOWN)

    def choose(self, call: Call, num_open: Numbers, now: float) -> int:
        return int(np.argmin(num_open + self._down))


class HashOfBeginning:
    """Rendezvous hashing of the session, or else of the prompt's first 512 bytes, without a bound on load."""

    wants_reports = False

    def __init__(self, number: int) -> None:
        self._all = np.array([seed_of(f"{index}") for index in range(number)], np.uint64)
        self._seeds, self._up = self._all, [*range(number)]

    def set_up(self, up: list[bool], now: float) -> None:
        self._up = [index for index, is_up in enumerate(up) if is_up]
        self._seeds = self._all[self._up]

    def choose(self, call: Call, num_open: Numbers, now: float) -> int:
        keys = call.find_keys(MOST_BLOCKS)
        key = seed_of(call.session) if call.session else keys[1] if len(keys) > 1 else call.path[-1][0]
        return self._up[order(key, self._seeds)[0]]


class CacheAware:
    """It does what the gateways of vLLM and SGLang do by default, as their sources tell.

    If the most loaded replica has over 32 requests more than the least loaded one, and over 1.1 times as many, the
    least loaded one gets the request. Otherwise the one gets it that was last sent the longest known beginning of the
    prompt, if that is more than half of the prompt; or else the least loaded one. Beginnings are remembered by blocks
    of 64 tokens, to a fifth, instead of by characters, and at most two million of them.
    """

    wants_reports = False
    MOST_DIFFERENCE, MOST_RATIO, LEAST_PART, MOST_PREFIXES = 32, 1.1, 0.5, 2_000_000

    def __init__(self, number: int) -> None:
        self._down = np.zeros(number, np.int64)
        self._is_up = [True] * number
        self._last: OrderedDict[int, int] = OrderedDict()

    def set_up(self, up: list[bool], now: float) -> None:
        self._down = np.where(up, 0, _DOWN)
        self._is_up = up.copy()

    def choose(self, call: Call, num_open: Numbers, now: float) -> int:
        loads = num_open + self._down
        least = int(np.argmin(loads))
        lowest, highest = int(loads[least]), int(np.max(num_open * (self._down == 0)))
        keys = call.find_keys(MOST_BLOCKS)
        chosen = least
        if highest - lowest <= self.MOST_DIFFERENCE or highest <= self.MOST_RATIO * lowest:
            for depth in range(len(keys), int(self.LEAST_PART * len(keys)), -1):
                index = self._last.get(keys[depth - 1])
                if index is not None and self._is_up[index]:
                    chosen = index
                    break
        for depth in marked_depths(len(keys)):
            self._last[keys[depth - 1]] = chosen
            self._last.move_to_end(keys[depth - 1])
        while len(self._last) > self.MOST_PREFIXES:
            self._last.popitem(last=False)
        return chosen


class Ours:
    """The router of oaiserve.scale, or several of them, to which requests come in turns."""

    wants_reports = True

    def __init__(self, number: int, num_routers: int = 1, **options: int) -> None:
        self.routers = [Router(**options) for _ in range(num_routers)]
        self._next = 0
        self.set_up([True] * number, 0.0)

    def set_up(self, up: list[bool], now: float) -> None:
        names = [str(index) for index, is_up in enumerate(up) if is_up]
        for router in self.routers:
            router.update_replicas(names, _ns(now))

    def learn(self, report: ReplicaReport, now: float) -> None:
        for router in self.routers:
            router.learn(report, _ns(now))

    def choose(self, call: Call, num_open: Numbers, now: float) -> int:
        self._next += 1
        router = self.routers[self._next % len(self.routers)]
        prompt = Prompt(call.find_keys(MOST_BLOCKS), call.path[-1][0], call.num_tokens)
        decision = router.choose(prompt, _ns(now), call.session)
        return int(decision.replica)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
