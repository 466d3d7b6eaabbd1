"""`PassedRoom`: the part of the queue limits that requests in an engine process use until it gives it back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from oaiserve.engine.admission import Admission
from oaiserve.engine.request import Request
from oaiserve.http.shared_limit import SharedLimit

_CHOICES, _BYTES = range(2)


@dataclass(slots=True)
class PassedRoom:
    """The part of the front's limits that requests in an engine process use, by client. It has no lock of its own."""

    admission: Admission
    by_client: dict[str, list[int]] = field(default_factory=dict)  # waiting choices, and bytes of bodies

    def note(self, request: Request) -> None:
        """Note what an admitted request takes of the limits."""
        counts = self.by_client.setdefault(request.client, [0, 0])
        counts[_CHOICES] += num_waiting(request)
        counts[_BYTES] += request.num_bytes

    def left(self, waiting: Iterable[tuple[str, int]], num_bytes: Iterable[tuple[str, int]]) -> None:
        """Give back what the process reports: waiting choices and bytes of bodies, by client."""
        self._give_back(_CHOICES, self.admission.waiting, waiting)
        self._give_back(_BYTES, self.admission.body_bytes, num_bytes)

    def give_back(self, request: Request) -> None:
        """Give back what a request takes of the limits that no process has."""
        client = request.client
        self.left([(client, num_waiting(request))], [(client, request.num_bytes)])

    def add(self, request: Request) -> None:
        """Count a request as waiting: no process has started it."""
        self.admission.waiting.add(request.client, num_waiting(request))
        self.admission.body_bytes.add(request.client, request.num_bytes)
        self.note(request)

    def count_again(self, requests: Iterable[Request]) -> None:
        """Count `requests`, which are all that are open here, as waiting again: no process has started them."""
        for client, (num_choices, num_bytes) in self.by_client.items():
            self.admission.waiting.give_back(client, num_choices)
            self.admission.body_bytes.give_back(client, num_bytes)
        self.by_client.clear()
        for request in requests:
            self.add(request)

    def _give_back(self, index: int, limit: SharedLimit, left: Iterable[tuple[str, int]]) -> None:
        for client, number in left:
            counts = self.by_client.get(client, [0, 0])
            number = min(number, counts[index])
            counts[index] -= number
            limit.give_back(client, number)
            if counts == [0, 0]:
                self.by_client.pop(client, None)


def num_waiting(request: Request) -> int:
    """Return how many choices of a request count against the shared limit. Background requests have their own limit."""
    return 0 if request.is_background else request.num_choices
