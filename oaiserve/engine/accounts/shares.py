"""The shares of requests in what the server uses: the time of its cores, and its own time. Engine thread only, stdlib.

Each step's amount is divided by the learnt cost of steps (`StepCost.share_ns`). Time without work belongs to no
request: the start, and times without a request in a step. Work between two steps belongs to the later one, except that
encoding images and sounds belongs to their request.
"""

from __future__ import annotations

from oaiserve.explain.causes import RequestCauses
from oaiserve.explain.step_cost_fit import StepCostFit
from oaiserve.facts.engine_numbers import EngineNumbers


class Meter:
    """A growing amount, divided into integers that add up to it: the shares of requests, and the part that belongs to
    no request."""

    def __init__(self, total: int) -> None:
        self.total = self.nobody = total
        self.given = 0  # sum of the shares of ended requests
        self.of_step = 0  # amount that the last step added
        self._rest = 0.0  # remainder from rounding, added to the next share

    def step_ended(self, idle: int, of_step: int) -> None:
        self.total += idle + of_step
        self.nobody += idle
        self.of_step = of_step

    @property
    def _left(self) -> int:
        return self.total - self.nobody - self.given

    def drop(self, share: float) -> None:
        """Count a share as belonging to no request, because its request has ended."""
        self.nobody += min(self._left, round(share))

    def give(self, share: float, *, is_last: bool) -> int:
        """Give an ended request its share. The last open request gets all that is left, so that nothing is lost."""
        amount = self._left if is_last else min(self._left, int(share + self._rest))
        self._rest = 0.0 if is_last else self._rest + share - amount
        self.given += amount
        return amount


class Shares:
    """The two meters, and the requests that have just ended. `cores_ns` is the CPU time of the process so far.

    `cores_fit` learns the CPU time of a step, as another fit learns its duration, to estimate what a request takes
    alone.
    """

    def __init__(self, cores_ns: int, cores_fit: StepCostFit) -> None:
        self.cores = Meter(cores_ns)
        self.time = Meter(0)
        self.cores_fit = cores_fit
        self._closed: list[RequestCauses] = []  # they may have had a chunk in the step under way

    def encoded(self, own: RequestCauses | None, core_ns: int, machine_ns: int) -> None:
        """Charge the encoding of an image or a sound to its request, or to none if the request has ended."""
        for meter, amount in ((self.cores, core_ns), (self.time, machine_ns)):
            meter.total += amount
            meter.nobody += amount if own is None else 0
        if own is not None:
            own.core_ns += core_ns
            own.machine_ns += machine_ns

    def step_ended(self) -> None:
        """Charge to no request what the step computed for requests that ended meanwhile."""
        for own in self._closed:
            self.cores.drop(own.core_ns)
            self.time.drop(own.machine_ns)
            own.core_ns = own.machine_ns = 0.0
        self._closed.clear()

    def show(self, numbers: EngineNumbers) -> None:
        numbers.core_ns = self.cores.total
        numbers.nobody_core_ns = self.cores.nobody
        numbers.nobody_machine_ns = self.time.nobody

    def close(self, own: RequestCauses, *, is_last: bool) -> tuple[int, int]:
        """Return the core time and the machine time of a request that ends. `is_last` says that no other request is
        open."""
        core_ns = self.cores.give(own.core_ns, is_last=is_last)
        machine_ns = self.time.give(own.machine_ns, is_last=is_last)
        own.core_ns = own.machine_ns = 0.0
        own.is_plain = False  # Its part of a step under way belongs to no request.
        self._closed.append(own)
        return core_ns, machine_ns
