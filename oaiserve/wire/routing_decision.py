"""The decision of a router, and its form as a header, which the chosen replica adds to its traces."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

HOPS_HEADER = "x-oaiserve-hops"  # number of gateways that a request has passed
DECISION_HEADER = "x-oaiserve-route"
BACKGROUND_HEADER = "x-oaiserve-background"  # the request can wait: it is a line of a batch
FORWARDED_HEADER = "x-oaiserve-forwarded"  # a proxy in front of the gateway has sent the request
_FORMS = {
    "replica": (str, r"[\w.:\[\]-]{1,110}"),  # host and port
    "reason": (str, r"[a-z_]{1,20}"),
    "expected_hit_tokens": (int, r"\d{1,9}"),
    "num_holders": (int, r"\d{1,9}"),
    "load": (float, r"-?\d{1,9}\.\d{1,3}"),
    "bound": (float, r"-?\d{1,9}\.\d{1,3}"),
    "held_share": (float, r"[01]\.\d{3}"),
}
_PATTERN = re.compile("; ".join(f"{name}=({pattern})" for name, (_, pattern) in _FORMS.items()), re.ASCII)


class Reason(StrEnum):
    """The reasons to choose a replica."""

    PREFIX = "prefix"  # it holds the longest known beginning of the prompt
    SHORTER_PREFIX = "shorter_prefix"  # It holds a shorter one, and the replicas with the longest are at the bound.
    SPILLED = "spilled"  # All replicas with a beginning of the prompt are at the bound.
    NEW = "new"  # No replica is known to hold a useful part of the prompt.


class Decision(NamedTuple):
    """The chosen replica of a request, with the reason, for a span."""

    replica: str
    reason: Reason
    expected_hit_tokens: int  # a lower estimate, since not all prefix lengths are known
    num_holders: int  # replicas that hold the longest known beginning and can be chosen
    load: float  # load of the replica, with the request
    bound: float  # limit of its load at that moment
    held_share: float = 0.0  # share of the prompt in the longest known beginning that any replica holds


def as_text(decision: Decision, *, names_replica: bool = True) -> str:
    """Return a decision as text, with the names and values of its fields. Clients get it without the replica's name."""
    rounded = {name: f"{getattr(decision, name):.3f}" for name in ("load", "bound", "held_share")}
    shown = decision._asdict() | rounded
    if not names_replica:
        del shown["replica"]
    return "; ".join(f"{name}={value}" for name, value in shown.items())


def of_text(text: str) -> Mapping[str, str | int | float]:
    """Return the fields of a decision by name; none for any other text, since anyone may send one."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        return {}
    return {name: kind(value) for (name, (kind, _)), value in zip(_FORMS.items(), match.groups(), strict=True)}


def held_elsewhere(routing: Mapping[str, str | int | float]) -> float:
    """Return which share of a prompt another replica holds, if that is more than what the chosen one holds; else 0."""
    return 0.0 if routing.get("reason") == Reason.PREFIX else float(routing.get("held_share", 0.0))
