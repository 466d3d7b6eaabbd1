"""Explains a request's time in sentences: its longest phases, and the causes of each.

The causes come from the request's account. Neighbours are named if they are among the recent requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from oaiserve.facts.record import FURTHER_CLIENTS, SLOW_CLOCK, Cause, OthersTime, RequestRecord, WaitReason, Whose
from oaiserve.facts.times import duration
from oaiserve.telemetry.loop_explanation import looped
from oaiserve.telemetry.reuse_explanation import read_again, restored

LEAST_PHASE = 0.1  # A phase gets a sentence from this share of the duration on.
LEAST_CAUSE = 0.01  # A cause is named from this share of the phase on.
_SAID = {
    Cause.PREEMPTION: "it was preempted and waited, or was computed again",
    Cause.NEIGHBOUR_MEDIA: "images and sounds of other requests were encoded",
    Cause.OWN_MEDIA: "images and sounds of its later prompts were encoded",
    Cause.CONSTRAINT: "its steps waited for the masks of grammars",
    Cause.HOST: "no step ran",
    Cause.MACHINE: "the machine was busy elsewhere",
    Cause.STANDSTILL: "the server stood still as a whole",
    Cause.ENGINE_RESTART: "its engine process had ended, and another one was started",
    Cause.NOT_KNOWN_YET: "it was in steps of a kind that the server had hardly seen before",
}
_KINDS = {"prompts_ns": "prompts", "decodes_ns": "decodes", "media_ns": "images and sounds"}
_WAITED_FOR = {
    WaitReason.PREFIX_RESTORED: "its prefix to be restored from host memory",
    WaitReason.NOT_KNOWN: "reasons that only an engine process knew that has ended",
}


class PhaseNeighbour(NamedTuple):
    """Another request that was in steps of the phase, with the expected times of its own tokens in them."""

    record: RequestRecord
    prompt_ns: float  # estimated time of its own prompt
    decode_ns: float  # time of its own decodes


def sentences(record: RequestRecord, ended: Sequence[RequestRecord]) -> Iterator[str]:
    """Yield sentences on the tokens that were read again or restored, on an answer that ended in a loop, and on each
    phase that took at least a tenth of the request's time, the longest first."""
    yield from filter(None, (read_again(record), restored(record), looped(record)))
    duration_ns = max(1, record.times.duration_ns)
    causes_ns = record.causes_ns
    in_order = record.times.phases()
    phases = sorted(in_order, key=lambda phase: -phase.duration_ns)
    for phase in phases:
        if phase.duration_ns < LEAST_PHASE * duration_ns:
            return
        parts: list[str] = []
        if phase.name == "queue":
            waits = sorted(record.account.waits_ns.items(), key=lambda wait: -wait[1])
            waits = [wait for wait in waits if wait[1] >= LEAST_CAUSE * phase.duration_ns]
            parts = [f"{duration(ns)} for {_WAITED_FOR.get(reason, reason.replace('_', ' '))}" for reason, ns in waits]
            others = record.account.others_ns.get("queue", [])
            if others and others[0].total_ns >= LEAST_CAUSE * phase.duration_ns:
                parts.append(f"{duration(others[0].total_ns)} of it went to {_whose(others[0])}")
        elif phase.name == "receive" and record.model_load_ns:
            parts = [f"for {duration(record.model_load_ns)} its model was being loaded"]
        elif phase.name == "encode_media":
            own_ns = min(phase.duration_ns, record.account.media.encode_ns)  # media of later prompts are encoded later
            parts = [f"its own images and sounds took {duration(own_ns)} of that"]
        elif phase is in_order[-1] and record.refusal_delay_ns:
            delay = duration(record.refusal_delay_ns)
            parts = [f"for {delay} its refusal was held back, because its client had many requests refused"]
        elif said := record.account.said_of(phase.name):
            parts = [*said]
        elif phase.name in causes_ns:
            neighbours = list(_neighbours(record, phase.name, ended))
            others = record.account.others_ns.get(phase.name, [])
            users_ns = record.account.machine_users_ns
            parts = list(_causes(causes_ns[phase.name], phase.duration_ns, neighbours, others, users_ns))
        yield "; ".join([f"{phase.name.replace('_', ' ')} took {duration(phase.duration_ns)}", *parts]) + "."


def _causes(
    causes_ns: Mapping[Cause, int],
    phase_ns: int,
    neighbours: list[PhaseNeighbour],
    others: list[OthersTime],
    users_ns: Mapping[str, int],
) -> Iterator[str]:
    """Yield the causes in words, the largest first. The time that the phase would have taken alone is never left
    out."""
    least_ns = LEAST_CAUSE * phase_ns
    parts = {Cause.MACHINE: _users(users_ns, is_largest=next(iter(causes_ns), None) is Cause.MACHINE)}
    if Cause.ALONE not in causes_ns:
        parts[Cause.NOT_KNOWN_YET] = _part_of(others)
    said = [
        (ns, f"for {duration(ns)} {_SAID[cause]}{parts.get(cause, '')}")
        for cause, ns in causes_ns.items()
        if cause in _SAID
    ]
    if unexplained_ns := causes_ns.get(Cause.UNEXPLAINED, 0):
        slowed = f" (meanwhile there was {SLOW_CLOCK})" if SLOW_CLOCK in users_ns else ""
        said.append((unexplained_ns, f"{duration(unexplained_ns)} are unexplained{slowed}"))
    decodes_ns = causes_ns.get(Cause.NEIGHBOUR_DECODES, 0)
    prompts_ns = causes_ns.get(Cause.NEIGHBOUR_PROMPTS, 0)
    if (ns := decodes_ns + prompts_ns) >= least_ns:
        text = f"{duration(ns)} came from {_named(decodes_ns, prompts_ns, neighbours)}"
        said.append((ns, text + _part_of(others)))
    said = [part for part in said if part[0] >= least_ns]
    if alone_ns := causes_ns.get(Cause.ALONE):
        said.append((alone_ns, f"alone it would have taken {duration(alone_ns)}"))
    elif Cause.NOT_KNOWN_YET in causes_ns:
        said.append((0, "what it would have taken alone is not known yet"))
    for _, text in sorted(said, key=itemgetter(0), reverse=True):
        yield text


def _named(decodes_ns: int, prompts_ns: int, neighbours: list[PhaseNeighbour]) -> str:
    """Return words for the neighbours, and for the one that added the most."""
    kinds = [f"{duration(ns)} {kind}" for ns, kind in ((decodes_ns, "decodes"), (prompts_ns, "prompts")) if ns]
    if not neighbours:
        return f"other requests that have not ended ({' and '.join(kinds)})"
    if len(neighbours) == 1:
        number = "one other request"
    else:
        number = f"{len(neighbours)} other requests"
    prompt_share = _share(prompts_ns, sum(one.prompt_ns for one in neighbours))
    decode_share = _share(decodes_ns, sum(one.decode_ns for one in neighbours))
    said = f"{number} ({' and '.join(kinds)})"
    most = max(neighbours, key=lambda one: prompt_share * one.prompt_ns + decode_share * one.decode_ns)
    if len(neighbours) == 1:
        most_text = most.record.request_id
    else:
        added_ns = prompt_share * most.prompt_ns + decode_share * most.decode_ns
        if added_ns > (prompts_ns + decodes_ns) / 2:
            part = "most"
        else:
            part = "the largest part"
        most_text = f"{part} from {most.record.request_id}"
    if prompt_share * most.prompt_ns > decode_share * most.decode_ns:
        return f"{said}, {most_text} and its prompt of {most.record.prompt_tokens:,} tokens"
    return f"{said}, {most_text} and its {most.record.completion_tokens:,} tokens"


def _users(users_ns: Mapping[str, int], *, is_largest: bool) -> str:
    """Return words for the programs that used the machine's cores most. `is_largest` means that MACHINE is the largest
    cause."""
    if not users_ns:
        return " (with what is not known: it took too short a time, or the system does not tell)" if is_largest else ""
    return f" (most of all with {' and '.join([*users_ns][:2])})"


def _part_of(others: list[OthersTime]) -> str:
    """Return words for the largest part of a time that was spent on one client."""
    if not others:
        return ""
    return f": {duration(others[0].total_ns)} of it for {_whose(others[0])}"


def _whose(others: OthersTime) -> str:
    """Return words for a client and for what its requests needed most: prompts, decodes or media."""
    kind = max(_KINDS, key=lambda kind: getattr(others, kind))
    if others.whose is Whose.SAME_CLIENT:
        return f"{_KINDS[kind]} of other requests of the same client"
    if others.client is None:
        return f"{_KINDS[kind]} of other clients"
    if others.client == FURTHER_CLIENTS:
        return f"{_KINDS[kind]} of further clients"
    return f"{_KINDS[kind]} of {others.client}"


def _share(added_ns: int, all_ns: float) -> float:
    if all_ns:
        return added_ns / all_ns
    return 0.0


def _neighbours(record: RequestRecord, phase: str, others: Sequence[RequestRecord]) -> Iterator[PhaseNeighbour]:
    own = _steps(record)[phase]
    for other in others:
        steps = _steps(other)
        shared = {name: num_shared(own, its) for name, its in steps.items()}
        if other is not record and any(shared.values()):
            alone_ns = {name: causes_ns.get(Cause.ALONE, 0) for name, causes_ns in other.causes_ns.items()}
            costs_ns = (alone_ns.get(name, 0) * shared[name] / max(1, len(its)) for name, its in steps.items())
            yield PhaseNeighbour(other, *costs_ns)


def num_shared(steps: range, others: range) -> int:
    return max(0, min(steps.stop, others.stop) - max(steps.start, others.start))


def _steps(record: RequestRecord) -> dict[str, range]:
    steps = record.account.steps
    middle = record.account.num_prefill_steps
    return {"prefill": steps[:middle], "decode": steps[middle:]}
