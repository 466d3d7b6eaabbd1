"""Explains a request's time in sentences: its longest phases, and the causes of each.

The causes are in its account. The named neighbours are among the recent requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from oaiserve.facts.record import Cause, RequestRecord
from oaiserve.telemetry.amounts import seconds
from oaiserve.telemetry.reuse_explanation import read_again

LEAST_PHASE = 0.1  # share of the duration from which a phase gets a sentence
LEAST_CAUSE = 0.01  # share of the phase from which a cause is named
_SAID = {
    Cause.PREEMPTION: "it was preempted and waited, or was computed again",
    Cause.NEIGHBOUR_MEDIA: "images and sounds of other requests were encoded",
    Cause.CONSTRAINT: "its steps waited for the masks of grammars",
    Cause.HOST: "no step ran",
    Cause.MACHINE: "the machine was busy elsewhere",
}


class PhaseNeighbour(NamedTuple):
    """Another request in the steps of a phase, with its expected times in them."""

    record: RequestRecord
    prompt_ns: float  # estimated time of its own prompt
    decode_ns: float  # time of its own decodes


def sentences(record: RequestRecord, others: Sequence[RequestRecord]) -> Iterator[str]:
    """Yield a sentence on what was read again, and one for each phase of a tenth of the request's time or more, the
    longest first."""
    if (again := read_again(record)) is not None:
        yield again
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
            parts = [f"{seconds(ns)} for {reason.replace('_', ' ')}" for reason, ns in waits]
        elif phase.name == "receive" and record.model_load_ns:
            parts = [f"for {seconds(record.model_load_ns)} its model was being loaded"]
        elif phase.name == "encode_media":
            parts = [f"its own images and sounds took {seconds(record.account.media_encode_ns)} of that"]
        elif phase is in_order[-1] and record.refusal_delay_ns:
            delay = seconds(record.refusal_delay_ns)
            parts = [f"for {delay} its refusal was held back, because its client had many requests refused"]
        elif phase.name in causes_ns:
            neighbours = list(_neighbours(record, phase.name, others))
            parts = list(_causes(causes_ns[phase.name], phase.duration_ns, neighbours))
        yield "; ".join([f"{phase.name.replace('_', ' ')} took {seconds(phase.duration_ns)}", *parts]) + "."


def _causes(causes_ns: Mapping[Cause, int], phase_ns: int, neighbours: list[PhaseNeighbour]) -> Iterator[str]:
    if alone_ns := causes_ns.get(Cause.ALONE):  # unknown for the first prefills, before costs of steps are learned
        yield f"alone it would have taken {seconds(alone_ns)}"
    least_ns = LEAST_CAUSE * phase_ns
    decodes_ns = causes_ns.get(Cause.NEIGHBOUR_DECODES, 0)
    prompts_ns = causes_ns.get(Cause.NEIGHBOUR_PROMPTS, 0)
    if decodes_ns + prompts_ns >= least_ns:
        yield f"{seconds(decodes_ns + prompts_ns)} came from {_named(decodes_ns, prompts_ns, neighbours)}"
    for cause, ns in sorted(causes_ns.items(), key=lambda item: -item[1]):
        if cause in _SAID and ns >= least_ns:
            yield f"for {seconds(ns)} {_SAID[cause]}"
    unexplained_ns = causes_ns.get(Cause.UNEXPLAINED, 0)
    if unexplained_ns >= least_ns:
        yield f"{seconds(unexplained_ns)} are unexplained"


def _named(decodes_ns: int, prompts_ns: int, neighbours: list[PhaseNeighbour]) -> str:
    """Return the neighbours in words, and the one that added the most."""
    kinds = [f"{seconds(ns)} {kind}" for ns, kind in ((decodes_ns, "decodes"), (prompts_ns, "prompts")) if ns]
    if not neighbours:
        return f"neighbours that have not ended ({' and '.join(kinds)})"
    if len(neighbours) == 1:
        number = "one neighbour"
    else:
        number = f"{len(neighbours)} neighbours"
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
