"""The decision of a router as the value of a header, so that the replica it has chosen can put it into its traces."""

from __future__ import annotations

import re
from collections.abc import Mapping

from oaiserve.cluster.router import Decision

DECISION_HEADER = "x-oaiserve-route"
_FORMS = {
    "replica": (str, r"[\w.:#\[\]-]{1,100}"),
    "reason": (str, r"[a-z_]{1,20}"),
    "expected_hit_tokens": (int, r"\d{1,9}"),
    "num_holders": (int, r"\d{1,9}"),
    "load": (float, r"-?\d{1,9}\.\d{1,3}"),
    "bound": (float, r"-?\d{1,9}\.\d{1,3}"),
}
_PATTERN = re.compile("; ".join(f"{name}=({pattern})" for name, (_, pattern) in _FORMS.items()), re.ASCII)


def as_text(decision: Decision) -> str:
    """Return a decision as text: the names of its fields, and their values."""
    shown = {**decision._asdict(), "load": f"{decision.load:.3f}", "bound": f"{decision.bound:.3f}"}
    return "; ".join(f"{name}={value}" for name, value in shown.items())


def of_text(text: str) -> Mapping[str, str | int | float]:
    """Return the fields of a decision by name; none if the text, which anybody may have sent, is not of that form."""
    found = _PATTERN.fullmatch(text)
    if found is None:
        return {}
    return {name: kind(value) for (name, (kind, _)), value in zip(_FORMS.items(), found.groups(), strict=True)}
