"""Reports the runs of agents: a table for each server, and a sentence that names the shapes that were read again. Pure
functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from loadtest.agents.runs import ShapeRun, Turn
from loadtest.tables import Rows, table

LEAST_SHARE = 0.01  # The sentence names a shape if this share of its prompt tokens was needlessly read again.
NOT_REPORTED = "not reported"
HEAD = ["shape", "prompts", "cached", "new", "again, had to", "again, beyond", "its time", "to first tokens", "kept"]


def rows_of(runs: Sequence[ShapeRun]) -> Rows:
    """Return the table of one server: tokens and seconds per run, as means over the runs of each shape. A run that
    ended early isn't counted."""
    return [HEAD, *(_row(shape, group) for shape, group in _by_shape(runs))]


def _row(shape: str, runs: Sequence[ShapeRun]) -> list[str]:
    turns = [turn for run in runs for turn in run.turns]

    def tokens(values: Iterable[float | None]) -> str:
        found = list(values)
        if None in found:
            return NOT_REPORTED
        return f"{round(sum(filter(None, found)) / len(runs)):,}"

    beyond = [turn.beyond_seconds for turn in turns]
    return [
        shape,
        tokens(turn.prompt for turn in turns),
        tokens(turn.cached for turn in turns) + ("*" if any(turn.cached_by == "timings" for turn in turns) else ""),
        tokens(turn.new for turn in turns),
        tokens(turn.again_at_least for turn in turns),
        tokens(turn.again_beyond for turn in turns),
        NOT_REPORTED if None in beyond else f"{sum(filter(None, beyond)) / len(runs):.2f} s",
        f"{sum(turn.first_token_seconds for turn in turns) / len(runs):.2f} s",
        f"{round(max(run.kept_tokens for run in runs)):,}",
    ]


def beyond_of(runs: Sequence[ShapeRun]) -> tuple[float, float]:
    """Return the tokens that a run needlessly read again, as a mean over the runs, and the seconds that this took."""
    turns = [turn for run in runs for turn in run.turns]
    number = max(1, len(runs))
    return (
        sum(turn.again_beyond or 0.0 for turn in turns) / number,
        sum(turn.beyond_seconds or 0.0 for turn in turns) / number,
    )


def verdict(runs: Sequence[ShapeRun]) -> str:
    """Return a sentence with the number of tokens that were needlessly read again, and the shapes that caused it."""
    groups = _by_shape(runs)
    complete = [run for _, group in groups for run in group]
    turns = _turns(complete)
    if not turns:
        return "No run was completed."
    if any(turn.cached is None for turn in turns):
        return (
            "The server does not report how many tokens of a prompt it had cached (usage.prompt_tokens_details), so "
            "only what had to be read is known. vLLM reports it with --enable-prompt-tokens-details."
        )
    tokens, seconds = beyond_of(complete)
    causes = [
        f"{shape} {beyond_of(group)[0]:,.0f} tokens in {beyond_of(group)[1]:.2f} s"
        for shape, group in sorted(groups, key=lambda pair: -beyond_of(pair[1])[0])
        if beyond_of(group)[0] >= LEAST_SHARE * sum(turn.prompt for turn in _turns(group)) / len(group)
    ]
    said = f"Read again beyond what had to be: {tokens:,.0f} tokens per run in {seconds:.2f} s"
    return f"{said}. Most of it: {', '.join(causes)}." if causes else f"{said}, less than 1 % in each shape."


def shown(runs: Sequence[ShapeRun], titles: dict[str, str]) -> str:
    """Return the report for a terminal. `titles` are keyed by the server's URL."""
    parts = []
    for url, title in titles.items():
        own = [run for run in runs if run.url == url]
        lines = [title, "", table(rows_of(own)), "", *notes_of(own), verdict(own)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def notes_of(runs: Sequence[ShapeRun]) -> Iterator[str]:
    """Yield notes on what was unusual about runs, and why some ended early."""
    for run in runs:
        if run.note:
            yield f"{run.shape}: {run.note}."
        if run.error:
            yield f"{run.shape}: not measured: {run.error}"
    if any(turn.cached_by == "timings" for turn in _turns(runs)):
        yield "* from the server's timings, because its usage has no cached_tokens"


def as_json(runs: Sequence[ShapeRun]) -> list[dict[str, Any]]:
    """Return the runs as JSON objects, with every request."""
    return [asdict(run) for run in runs]


def _by_shape(runs: Sequence[ShapeRun]) -> list[tuple[str, list[ShapeRun]]]:
    complete = [run for run in runs if not run.error]
    shapes = dict.fromkeys(run.shape for run in complete)
    return [(shape, [run for run in complete if run.shape == shape]) for shape in shapes]


def _turns(runs: Sequence[ShapeRun]) -> list[Turn]:
    return [turn for run in runs for turn in run.turns]
