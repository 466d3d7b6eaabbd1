"""`OpenRow` describes an open request for `/debug/requests` and the live page: its phases and its progress. It contains
no text of prompts or answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from oaiserve.facts.record import Cause, Origin, OthersTime
from oaiserve.facts.times import Phase, RequestTimes

MOST_SHOWN = 20  # the newest open requests in a list, of those in the engine and of those outside it each


class OthersSoFar(msgspec.Struct):
    """The part of a phase that was spent on requests of one client, as the operator sees it. `client` is None without a
    key."""

    whose: str
    client: str | None
    prompts_ns: int
    decodes_ns: int
    media_ns: int


class PhaseSoFar(msgspec.Struct):
    """A phase of an open request. `start_ns` counts from when the request was received. The last phase has not ended.

    `causes_ns` are the causes of `prefill` and `decode` up to the last step. `others` are the clients whose requests
    the time was spent on, in the queue as well. Both are sorted, the largest first.
    """

    name: str
    start_ns: int
    duration_ns: int
    causes_ns: dict[str, int] = {}
    others: list[OthersSoFar] = []


class OpenRow(msgspec.Struct, kw_only=True):
    """An open request. Numbers of tokens are 0 until they are known.

    `computed_prompt_tokens` include the `cached_tokens`. `waits_for` is the reason why it is still in `queue`.
    `prompt_left_ns` is the estimated time until the first token, and `answer_left_ns` that until the last one if the
    answer becomes as long as it may. Both extrapolate the phase's pace so far, and are None while that is unknown.
    """

    request_id: str
    received_unix_ns: int
    operation: str
    route: str
    model: str
    client: str | None
    elapsed_ns: int
    phase: str  # the last of `phases`
    phases: list[PhaseSoFar]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_prompt_tokens: int = 0
    completion_tokens: int = 0
    waits_for: str | None = None
    prompt_left_ns: int | None = None
    answer_left_ns: int | None = None
    replica: str | None = None  # the replica of --replicas that has the request

    @classmethod
    def of(
        cls,
        origin: Origin,
        times: RequestTimes,
        clock_ns: Callable[[], int],
        epoch_offset_ns: int,
        *,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        computed_prompt_tokens: int = 0,
        completion_tokens: int = 0,
        num_continued_tokens: int = 0,
        most_tokens: int = 0,
        waits_for: str | None = None,
        causes_ns: Mapping[str, Mapping[Cause, int]] = MappingProxyType({}),
        others_ns: Mapping[str, Sequence[OthersTime]] = MappingProxyType({}),
    ) -> OpenRow:
        """Return the current row. Other threads may still write into `times`, but `received` is already set.

        `epoch_offset_ns` is the wall clock minus the monotonic clock. `most_tokens` is the limit of the answer's
        length, or 0 for none, and `num_continued_tokens` is how many tokens of the answer came from another server.
        `causes_ns` and `others_ns` are keyed by phase.
        """
        phases = times.so_far(clock_ns)
        received_ns = phases[0].start_ns
        return cls(
            request_id=origin.request_id,
            received_unix_ns=received_ns + epoch_offset_ns,
            operation=origin.operation,
            route=origin.http_route,
            model=origin.model,
            client=origin.client,
            elapsed_ns=phases[-1].end_ns - received_ns,
            phase=phases[-1].name,
            phases=[
                PhaseSoFar(
                    phase.name,
                    phase.start_ns - received_ns,
                    phase.duration_ns,
                    {cause.value: ns for cause, ns in causes_ns.get(phase.name, {}).items()},
                    [OthersSoFar(*one) for one in others_ns.get(phase.name, ())],
                )
                for phase in phases
            ],
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            computed_prompt_tokens=computed_prompt_tokens,
            completion_tokens=completion_tokens,
            waits_for=waits_for if phases[-1].name == "queue" else None,
            prompt_left_ns=_left_ns(
                phases[-1], "prefill", computed_prompt_tokens - cached_tokens, prompt_tokens - cached_tokens
            ),
            answer_left_ns=_left_ns(
                phases[-1],
                "decode",
                completion_tokens - num_continued_tokens - 1,
                most_tokens - num_continued_tokens - 1,
            ),
        )


def _left_ns(phase: Phase, name: str, done: int, all_of_it: int) -> int | None:
    """Return the remaining time of a phase that has done a part of its tokens, or None if it can't be estimated."""
    if phase.name != name or done <= 0 or all_of_it < done:
        return None
    return phase.duration_ns * (all_of_it - done) // done
