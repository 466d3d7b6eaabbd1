"""The command `oaiserve diff`: a paragraph and a table of the difference of two recordings or measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cyclopts import App

from oaiserve.errors import StartupError
from oaiserve.explain import commands
from oaiserve.explain.diff.difference import AccountsDifference, MeanChange, difference, read

MOST_NAMED = 4  # causes in the paragraph
LEAST_SHARE = 0.05  # A cause is named from this share of the change of the duration.


def main(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code: 2 if the user can correct the error."""
    return commands.run(_command_line(), argv)


def _command_line() -> App:
    app = App(name="oaiserve diff", version_flags=[])

    @app.default
    def diff(a: Path, b: Path, /, *, table: bool = True) -> int:
        """Compare the requests of two recordings: where those of B spent more or less time than those of A, and why.

        Parameters
        ----------
        a
            A recording (serve --record-requests), or an answer of /debug/requests: the baseline.
        b
            What is compared with A: another recording or answer.
        table
            Print all parts below the paragraph.
        """
        sides = []
        for path in (a, b):
            accounts = read(path)
            if not accounts:
                raise StartupError(f"'{path}' has no request that was answered.")
            sides.append(accounts)
        models = [{account.model for account in side} for side in sides]
        if models[0].isdisjoint(models[1]):
            known = [", ".join(sorted(names)) for names in models]
            raise StartupError(
                f"'{a}' has requests of {known[0]}, and '{b}' of {known[1]}: times of different models do not compare, "
                "unless both are served under one --served-model-name."
            )
        change = difference(*sides)
        print(paragraph(change))
        if table:
            print("\n" + "\n".join(rows(change)))
        return 0

    return app


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
    """Return the table of all parts, as markdown. Those marked * changed for certain."""
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
