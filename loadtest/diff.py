"""Compares the requests of two recordings or servers: a paragraph and a table of what took more or less time."""

from __future__ import annotations

from pathlib import Path

from loadtest.accounts import Account, AccountsDifference, MeanChange, difference, read
from loadtest.errors import UsageError

MOST_NAMED = 4  # the most causes that the paragraph names
LEAST_SHARE = 0.05  # A cause is not named if it is below this share of the duration's change.


def compared(a: Path, b: Path) -> AccountsDifference:
    """Return the difference between the requests of two files. Raises UsageError if they can't be compared."""
    before = _answered(a)
    after = _answered(b)
    models = [{account.model for account in side} for side in (before, after)]
    if models[0].isdisjoint(models[1]):
        known = [", ".join(sorted(names)) for names in models]
        raise UsageError(
            f"'{a}' has requests of {known[0]}, and '{b}' of {known[1]}: times of different models do not compare, "
            "unless both are served under one --served-model-name."
        )
    return difference(before, after)


def _answered(path: Path) -> list[Account]:
    accounts = read(path)
    if not accounts:
        raise UsageError(f"'{path}' has no request that was answered.")
    return accounts


def paragraph(difference: AccountsDifference) -> str:
    duration = difference.duration
    text = (
        f"A request took {_seconds(duration.before)} on average, and then {_seconds(duration.after)}: "
        f"{_signed(duration)}, over {difference.num_before} and {difference.num_after} requests."
    )
    if not duration.is_certain:
        text += " That may be chance."
    named = [
        (part, change)
        for part, change in sorted(difference.parts.items(), key=lambda item: -abs(item[1].change))
        if change.is_certain and abs(change.change) >= LEAST_SHARE * abs(duration.change)
    ][:MOST_NAMED]
    if named:
        text += " By cause: " + "; ".join(f"{_name(part)} {_signed(change)}" for part, change in named) + "."
    else:
        text += " No cause changed for certain."
    loads = [
        f"{change.before:.4g} to {change.after:.4g} {name}"
        for name, change in difference.load.items()
        if change.is_certain or (change.interval is None and change.before != change.after)
    ]
    return text + (f" The load went from {', '.join(loads)}." if loads else "")


def rows(difference: AccountsDifference) -> list[str]:
    """Return the table of all parts, as Markdown. A * marks the changes that are certain."""
    lines = ["| phase | cause | before | after | change | 95 % interval |", "|---|---|---|---|---|---|"]
    whole = {("duration", ""): difference.duration}
    for part, change in (difference.parts | whole).items():
        phase, cause = (name.replace("_", " ") for name in part)
        mark = "*" if change.is_certain else ""
        lines.append(
            f"| {phase} | {cause} | {_seconds(change.before)} | {_seconds(change.after)} "
            f"| {_seconds(change.change, sign=True)}{mark} | {_interval(change)} |"
        )
    return lines


def _name(part: tuple[str, str]) -> str:
    phase, cause = (name.replace("_", " ") for name in part)
    if cause:
        return f"{phase} ({cause})"
    return phase


def _signed(change: MeanChange) -> str:
    interval = _interval(change)
    return _seconds(change.change, sign=True) + (f" ({interval})" if interval else "")


def _interval(change: MeanChange) -> str:
    if change.interval is None:
        return ""
    low, high = change.interval
    return f"{_seconds(low, sign=True)} .. {_seconds(high, sign=True)}"


def _seconds(seconds: float, *, sign: bool = False) -> str:
    form = "+.3g" if sign else ".3g"
    if abs(seconds) >= 1:
        return f"{seconds:{form}} s"
    return f"{seconds * 1e3:{form}} ms"
