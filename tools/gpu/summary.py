"""Makes the text of the GPU check: the figures with their targets, what is wrong, and their tables. Pure.

`sections` has the results of `run.run_all` by name. A figure that a section did not find is shown as missing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from tools.gpu import tables
from tools.gpu.sections import CHECKS
from tools.gpu.tables import Sections, ceilings, floor_ms
from tools.markdown import as_markdown, number

MOST_SHOWN = 10  # wrong results of a section; the rest is in the JSON
MOST_LINES = 8  # lines of a problem


def _of_64(sections: Sections, name: str) -> dict[str, Any]:
    return next(row for row in sections[name]["decode"] if row["sequences"] == 64)


def _times_floor(sections: Sections, name: str) -> float:
    decode = _of_64(sections, name)
    return decode["device_ms"] / floor_ms(sections, decode)  # type: ignore[no-any-return]


def _prefill_share(sections: Sections) -> float:
    prompt = sections["8b"]["steps"]["2048 prompt tokens behind 0"]
    peak = ceilings(sections)["operations_per_second"]
    return 100 * prompt["operations"] / prompt["device_ms"] * 1e3 / peak  # type: ignore[no-any-return]


def _launch_share(sections: Sections) -> float:
    mixed = sections["8b"]["steps"]["64 decodes, 400 prompt tokens"]
    return 100 * mixed["launch_ms"] / mixed["device_ms"]  # type: ignore[no-any-return]


class SpeedTarget(NamedTuple):
    """A limit for one figure. `find` takes the sections and raises KeyError if one of them did not find the figure."""

    what: str
    sign: str
    limit: float
    unit: str
    find: Callable[[Sections], float]


_FLOOR = "decode step of 64 at 512 tokens, to its floor"
_GAP = "gap between decode steps of 64"
_GPT2 = "GPT-2, 256 requests of 64 tokens at once, batch 64"
_SUBMIT = "GPT-2, submit p99 with 4 threads that tokenize"
_MIXED = "8B, host's launch of 64 decodes with 400 prompt tokens, of the device's time"
SPEED_TARGETS = tuple(
    SpeedTarget(*row)
    for row in (
        (f"8B, {_FLOOR}", "≤", 1.25, "times", lambda s: _times_floor(s, "8b")),
        (f"1B, {_FLOOR}", "≤", 1.25, "times", lambda s: _times_floor(s, "1b")),
        ("8B, prompt of 2,048, of the peak", "≥", 60, "%", _prefill_share),
        (_MIXED, "≤", 50, "%", _launch_share),
        (f"8B, {_GAP}", "≤", 5, "%", lambda s: 100 * _of_64(s, "8b")["gap_share"]),
        (f"1B, {_GAP}", "≤", 5, "%", lambda s: 100 * _of_64(s, "1b")["gap_share"]),
        (_GPT2, "≥", 40_000, "tokens/s", lambda s: s["gpt2"]["loads"]["at once"]["output_tokens_per_second"]),
        (_SUBMIT, "≤", 0.05, "ms", lambda s: 1e3 * s["gpt2"]["loads"]["one token, 4 workers"]["submit_p99"]),
        ("1B, 256 streams over HTTP", "≥", 40_000, "tokens/s", lambda s: s["streams"]["output_tokens_per_second"]),
    )
)


def is_correct(sections: Sections) -> bool:
    """Return whether every check of answers that was run ended well and found them equal, and nothing was off that
    should be on, in any section."""
    if any(result.get("off") for result in sections.values()):
        return False
    asked = [sections[name] for name in CHECKS if name in sections]
    return all(result["status"] == "done" and not compared(result, equal=False) for result in asked)


def compared(found: Any, *, equal: bool) -> list[dict[str, Any]]:
    """Return all rows, anywhere in a result, that were found to be equal, or not to be."""
    if isinstance(found, list):
        return [row for item in found for row in compared(item, equal=equal)]
    if not isinstance(found, dict):
        return []
    return [found] if found.get("equal") is equal else compared([*found.values()], equal=equal)


def targets_table(report: dict[str, Any]) -> list[list[str]]:
    """Return a row for each target, after the head."""
    rows = [["", "measured", "target", "met"]]
    for what, sign, limit, unit, find in SPEED_TARGETS:
        measured = report["is_dry_run"] or "missing"
        met = ""
        if not report["is_dry_run"]:
            with suppress(KeyError, StopIteration):
                value = find(report["sections"])
                is_met = value >= limit if sign == "≥" else value <= limit
                measured = f"{number(value)} {unit}"
                met = "yes" if is_met else "**no**"
        rows.append([what, measured, f"{sign} {number(limit)} {unit}", met])
    return rows


def as_text(report: dict[str, Any]) -> str:
    """Return the summary: how sections ended, what is wrong, the tables, and the targets."""
    sections: Sections = report["sections"]
    ended = "; ".join(
        f"{name} {result['status']}, {result.get('seconds', 0):.0f} s" for name, result in sections.items()
    )
    lines = [_where(report), "", f"{ended}.", "", *_problems(sections), *_correctness(sections), ""]
    lines += tables.figures(sections)
    return "\n".join([*lines, *as_markdown(targets_table(report))]) + "\n"


def as_page(report: dict[str, Any]) -> str:
    """Return the short form for the documentation."""
    made = f"oaiserve {report['version']}, {report['created']}"
    return tables.page(report["sections"], made, _checked(report["sections"]))


def _checked(sections: Sections) -> list[str]:
    """Say how many answers of each check were right."""
    counts = []
    for name in CHECKS:
        if (result := sections.get(name)) is not None:
            different = len(compared(result, equal=False))
            wrong = f" and **{different} wrong**" if different else ""
            unfinished = "" if result["status"] == "done" else f" ({result['status']})"
            counts.append(f"{name} {len(compared(result, equal=True))} right{wrong}{unfinished}")
    return [f"Checks of answers: {', '.join(counts)}."] if counts else []


def _problems(sections: Sections) -> list[str]:
    """Return the lines of what a section said when it broke, and of its parts that failed."""
    lines: list[str] = []
    for name, result in sections.items():
        problems = {name: result["problem"]} if "problem" in result else {}
        problems |= {f"{name}, {part}": text for part, text in result.get("problems", {}).items()}
        for what, text in problems.items():
            lines += [f"{what}:", "```", *(line[:300] for line in text.splitlines()[-MOST_LINES:]), "```", ""]
    return lines


def _where(report: dict[str, Any]) -> str:
    environment = report["sections"].get("environment", {})
    versions = ", ".join(f"{name} {version}" for name, version in environment.get("versions", {}).items())
    parts = [environment.get("device", "unknown device"), f"Python {environment.get('python', '?')}", versions]
    smi = environment.get("nvidia_smi", {})
    if "driver_version" in smi:
        parts.append(f"driver {smi['driver_version']}, {smi['clocks.max.sm']} at most, {smi['power.limit']}")
    text = f"{'; '.join(parts)}; {report['created']}; oaiserve {report['version']}. `{report['command']}`"
    return text + (". A dry run with tiny models: no time in it means anything." if report["is_dry_run"] else "")


def _correctness(sections: Sections) -> list[str]:
    lines = [
        f"- {name}: **{feature} is off**: {reason}"
        for name, result in sections.items()
        for feature, reason in result.get("off", {}).items()
    ]
    for name in CHECKS:
        if (result := sections.get(name)) is None:
            continue
        different = compared(result, equal=False)
        ending = f"**{len(different)} WRONG**" if different else f"{len(compared(result, equal=True))} equal"
        lines.append(f"- {name}: {ending if result['status'] == 'done' else '**' + result['status'] + '**'}")
        lines += [f"    - {row}" for row in different[:MOST_SHOWN]]
        for what, found in result.items():
            if isinstance(found, dict) and "problem" in found:
                lines.append(f"    - {what}: {found['problem']}")
    return lines
