"""The decision of a router, and its form as a header: the chosen replica puts it into its traces."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

HOPS_HEADER = "x-oaiserve-hops"  # how many gateways a request has passed
DECISION_HEADER = "x-oaiserve-route"
# These reach a child process only from its gateway, which has checked the key.
OWNER_HEADER = "x-oaiserve-owner"  # the digest of the request's API key
BACKGROUND_HEADER = "x-oaiserve-background"  # the request can wait: it is a line of a batch
_FORMS = {
    "replica": (str, r"[\w./:\[\]-]{1,110}"),  # with a port, or a Unix socket
    "reason": (str, r"[a-z_]{1,20}"),
    "expected_hit_tokens": (int, r"\d{1,9}"),
    "num_holders": (int, r"\d{1,9}"),
    "load": (float, r"-?\d{1,9}\.\d{1,3}"),
    "bound": (float, r"-?\d{1,9}\.\d{1,3}"),
}
_PATTERN = re.compile("; ".join(f"{name}=({pattern})" for name, (_, pattern) in _FORMS.items()), re.ASCII)


class Reason(StrEnum):
    """The reasons for which a replica is chosen."""

    PREFIX = "prefix"  # it holds the longest known beginning of the prompt
    SHORTER_PREFIX = "shorter_prefix"  # it holds a shorter one, and those with the longest are at the bound
    SPILLED = "spilled"  # all that hold a beginning of the prompt are at the bound
    NEW = "new"  # no replica is known to hold a part of the prompt that is worth it


class Decision(NamedTuple):
    """The chosen replica of a request, with the reason, for a span."""

    replica: str
    reason: Reason
    expected_hit_tokens: int  # about, and at least: not all lengths are known
    num_holders: int  # replicas that hold the longest known beginning and can be chosen
    load: float  # load of the replica, with the request
    bound: float  # on its load, at that moment


def as_text(decision: Decision, *, names_replica: bool = True) -> str:
    """Return a decision as text: the names of its fields, and their values; for clients without the replica's name."""
    shown = {**decision._asdict(), "load": f"{decision.load:.3f}", "bound": f"{decision.bound:.3f}"}
    if not names_replica:
        del shown["replica"]
    return "; ".join(f"{name}={value}" for name, value in shown.items())


def of_text(text: str) -> Mapping[str, str | int | float]:
    """Return the fields of a decision by name; none for any other text, since anybody may send one."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        return {}
    return {name: kind(value) for (name, (kind, _)), value in zip(_FORMS.items(), match.groups(), strict=True)}
