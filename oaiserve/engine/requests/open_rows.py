"""Describes the engine's open requests for `/debug/requests` and the live page, from their submission on.

Any thread may do this. It reads what the engine thread writes without a lock, so a number may be one step old.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from oaiserve.engine.accounts.step_causes import StepCauses
from oaiserve.engine.requests.commands import Submitted
from oaiserve.engine.requests.open_request import OpenRequest
from oaiserve.engine.requests.open_requests import OpenRequests
from oaiserve.facts.open_row import OpenRow
from oaiserve.facts.times import RequestTimes


@dataclass(frozen=True, slots=True)
class OpenRows:
    """The rows of requests that wait in the inbox, and of open ones."""

    arriving: dict[str, Submitted]
    requests: OpenRequests
    causes: StepCauses | None
    clock_ns: Callable[[], int]

    def newest(self, most: int, epoch_offset_ns: int) -> dict[str, OpenRow]:
        """Return the rows of the newest requests by id, newest first. It may take milliseconds."""
        newest = dict(islice(reversed(self._all().items()), most))
        return {request_id: self._row(each, epoch_offset_ns) for request_id, each in newest.items()}

    def one(self, request_id: str, epoch_offset_ns: int) -> dict[str, OpenRow]:
        """Return the row of this request by its id, if it is open."""
        found = self._all().get(request_id)
        return {} if found is None else {request_id: self._row(found, epoch_offset_ns)}

    def _all(self) -> dict[str, Submitted | OpenRequest]:
        arriving = self.arriving.copy()  # read first, because these may become open requests meanwhile
        open_now: dict[str, Submitted | OpenRequest] = {**self.requests.all()}
        return open_now | {request_id: each for request_id, each in arriving.items() if request_id not in open_now}

    def _row(self, entry: Submitted | OpenRequest, epoch_offset_ns: int) -> OpenRow:
        origin = entry.request.origin
        if isinstance(entry, Submitted):
            times = RequestTimes(received=entry.request.received_ns or entry.at_ns, submitted=entry.at_ns)
            return OpenRow.of(origin, times, self.clock_ns, epoch_offset_ns)
        account = entry.account
        causes_ns = {"prefill": account.prefill_causes_ns}
        others_ns = account.others_ns.copy()
        if self.causes is not None and entry.causes is not None:
            phase = _phase_in_steps(entry.times)
            causes_ns[phase] = so_far = self.causes.so_far(entry.causes)
            others_ns[phase] = entry.notes.others_so_far(so_far, self.clock_ns())
        sequences = [*entry.outputs.copy()]
        most_tokens = 0
        if len(sequences) == account.num_choices:  # No choice has ended yet.
            most_tokens = sum(each.max_len - each.prompt_len for each in sequences)
        return OpenRow.of(
            origin,
            entry.times,
            self.clock_ns,
            epoch_offset_ns,
            causes_ns=causes_ns,
            others_ns=others_ns,
            waits_for=self.requests.reason_of(sequences[0]) if sequences else None,
            most_tokens=most_tokens,
            prompt_tokens=entry.usage.prompt_tokens,
            cached_tokens=entry.usage.cached_tokens,
            computed_prompt_tokens=entry.computed_prompt_tokens,
            completion_tokens=entry.usage.completion_tokens,
            num_continued_tokens=account.num_continued_tokens,
        )


def _phase_in_steps(times: RequestTimes) -> str:
    """Return the current phase of a request that waits for its first step or takes part in steps."""
    if times.scheduled is None:
        return "queue"
    return "prefill" if times.first_token is None else "decode"
