"""`PassedAccount` divides the wait for an engine's first byte into causes, in numbers and in words.

The words name other clients, so only operators see them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from oaiserve.facts.record import Cause, EngineAccount, Whose
from oaiserve.facts.times import duration
from oaiserve.plugins.gateway.engines.presence import Behind, Presence, Presences, divided
from oaiserve.plugins.gateway.engines.read_again import SAID
from oaiserve.plugins.gateway.engines.reading import Told
from oaiserve.plugins.gateway.engines.reported import Reported

WAIT = "first_byte"  # the phase
LEAST_CAUSE = 0.01  # smallest share of the phase for which a cause is named


@dataclass(slots=True)
class PassedAccount(EngineAccount):
    """The account of a request to a foreign engine. Times of other requests, and of requests alone, are
    estimates."""

    wait_causes_ns: dict[Cause, int] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)  # sentences about the wait
    said_of_reuse: list[str] = field(default_factory=list)  # sentences about what could have been cached

    @property
    def causes_ns(self) -> dict[str, dict[Cause, int]]:
        return {WAIT: self.wait_causes_ns} if self.wait_causes_ns else {}

    @property
    def knows_others(self) -> bool:
        return bool(self.wait_causes_ns)

    def said_of(self, phase: str) -> Sequence[str]:
        return {WAIT: self.said, SAID: self.said_of_reuse}.get(phase, ())

    def divide(
        self, own: Presence, presences: Presences, told: Told, tokens: int, reported: Reported, *, is_stream: bool
    ) -> None:
        """Divide the wait of an answer that has begun, for a prompt of about `tokens` to compute."""
        times = own.times
        if times.sent is None or times.first_byte is None:
            return
        wait_ns = times.first_byte - times.sent
        behind, covered_ns = presences.behind(own)
        load_ns = min(told.load_ns or 0, wait_ns)
        own_ns = told.prompt_ns
        if own_ns is not None and not is_stream:
            own_ns += told.generate_ns or 0
        is_told = own_ns is not None
        if own_ns is None and is_stream:
            own_ns = presences.alone.at(tokens)
            if not behind:
                presences.alone.add(tokens, wait_ns)
        if own_ns is None:
            self.wait_causes_ns = {Cause.NOT_KNOWN_YET: wait_ns} if is_stream else {}
            self.said = [*_there(behind), *(["what it would have taken alone is not known yet"] if is_stream else [])]
        else:
            own_ns = min(own_ns, wait_ns - load_ns)
            others = divided(behind, min(wait_ns - load_ns - own_ns, covered_ns))
            self.others_ns = {WAIT: others}
            causes = {
                Cause.ALONE: own_ns,
                Cause.MODEL_LOAD: load_ns,
                Cause.NEIGHBOUR_PROMPTS: sum(one.prompts_ns for one in others),
                Cause.NEIGHBOUR_DECODES: sum(one.decodes_ns for one in others),
            }
            causes[Cause.INSIDE_ENGINE] = wait_ns - sum(causes.values())
            self.wait_causes_ns = {cause: ns for cause, ns in causes.items() if ns or cause is Cause.ALONE}
            self.said = list(_words(self.wait_causes_ns, behind, wait_ns, is_told=is_told))
        if told.queue_ns is not None and told.queue_ns >= max(1.0, LEAST_CAUSE * wait_ns):
            self.said.append(f"the engine says that it was in its queue for {duration(told.queue_ns)}")
        self.said += reported.said_between(times.sent, times.first_byte)


def _words(causes_ns: Mapping[Cause, int], behind: Sequence[Behind], wait_ns: int, *, is_told: bool) -> Iterator[str]:
    least_ns = LEAST_CAUSE * wait_ns
    others_ns = causes_ns.get(Cause.NEIGHBOUR_PROMPTS, 0) + causes_ns.get(Cause.NEIGHBOUR_DECODES, 0)
    share = others_ns / max(1, sum(one.total_ns for one in behind))
    for one in behind:
        if (ns := one.total_ns * share) >= max(1, least_ns):
            yield f"about {duration(ns)} were behind {_number_of(one)}"
    if (load_ns := causes_ns.get(Cause.MODEL_LOAD, 0)) >= max(1, least_ns):
        yield f"for {duration(load_ns)} its model was being loaded"
    own = duration(causes_ns[Cause.ALONE])
    if is_told:
        yield f"the engine says that it computed this request for {own} of it"
    else:
        yield f"alone it would have taken about {own}, as earlier requests did"
    if (rest_ns := causes_ns.get(Cause.INSIDE_ENGINE, 0)) >= max(1, least_ns):
        yield f"what the engine did for another {duration(rest_ns)} is not known from outside"


def _there(behind: Sequence[Behind]) -> Iterator[str]:
    for one in behind:
        yield f"meanwhile {_number_of(one)} were at the engine"


def _number_of(one: Behind) -> str:
    """Return a phrase with the numbers of a client's prompts and answers."""
    kinds = [(one.num_prompts, "prompt"), (one.num_answers, "answer")]
    said = " and ".join(f"{number:,} {kind}{'' if number == 1 else 's'}" for number, kind in kinds if number)
    if one.whose is Whose.SAME_CLIENT:
        return f"{said} of the same client"
    return f"{said} of {'other clients' if one.name is None else one.name}"
