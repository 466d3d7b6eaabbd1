"""Makes the text of the GPU check: the figures with their targets, what is wrong, and all other results. Pure.

`sections` has the results of `run.run_all` by name. A figure that a section did not find is shown as missing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from tools.gpu.sections import CHECKS
from tools.markdown import as_markdown, number

Sections = dict[str, dict[str, Any]]
_ENDING = ("status", "seconds", "problem", "off")
MOST_SHOWN = 10  # wrong results of a section; the rest is in the JSON


def floor_ms(sections: Sections, decode: dict[str, Any]) -> float:
    """Return the time of a decode step that reads what it must while it computes, at the rates that were measured.
    Raises KeyError if there are none."""
    ceilings = _ceilings(sections)
    return max(decode[work] / ceilings[f"{work}_per_second"] for work in ("bytes", "operations")) * 1e3  # type: ignore[no-any-return]


def _ceilings(sections: Sections) -> dict[str, Any]:
    found = sections["environment"]["ceilings"]
    if not isinstance(found, dict):
        raise KeyError(found)  # why there are none
    return found


def _times_floor(sections: Sections, decode: dict[str, Any]) -> float:
    return decode["period_ms"] / floor_ms(sections, decode)  # type: ignore[no-any-return]


def _of_64(sections: Sections, name: str) -> dict[str, Any]:
    return next(row for row in sections[name]["decode"] if row["sequences"] == 64)


def _prefill_share(sections: Sections) -> float:
    peak = _ceilings(sections)["operations_per_second"]
    return 100 * sections["decode-8b"]["prefill"]["operations_per_second"] / peak  # type: ignore[no-any-return]


class SpeedTarget(NamedTuple):
    """A limit for one figure. `find` takes the sections and raises KeyError if one of them did not find the figure."""

    what: str
    sign: str
    limit: float
    unit: str
    find: Callable[[Sections], float]


_GPT2 = "GPT-2 124M, 256 requests of 64 tokens, batch 64: output"
_ONE_TOKEN = "GPT-2 124M, 256 prompts of 259 tokens, one new token, batch 16: submit p99"
_UNEVEN = "1B, decode step of one sequence of 65,536 tokens and 63 of 300, to its floor"
_ARRIVALS = "1B, 64 decodes while prompts arrive: ITL p99, to the steady one"
_STREAMS = "GPT-2, 256 streams over HTTP: output"
_FLOOR = "decode step of 64 at 512 tokens, to its floor"
_GAP = "gap between decode steps of 64"
SPEED_TARGETS = tuple(
    SpeedTarget(*row)
    for row in (
        (_GPT2, "≥", 100_000, "tokens/s", lambda s: s["gpt2"]["at_once"]["output_tokens_per_second"]),
        ("the same, all at once: TTFT p99", "≤", 50, "ms", lambda s: s["gpt2"]["at_once"]["ttft_p99_ms"]),
        ("the same, from 64 clients: TTFT p99", "≤", 50, "ms", lambda s: s["gpt2"]["clients"]["ttft_p99_ms"]),
        (_ONE_TOKEN, "≤", 0.02, "ms", lambda s: s["gpt2"]["one_token"]["submit_p99_ms"]),
        ("the same: TTFT p99", "≤", 100, "ms", lambda s: s["gpt2"]["one_token"]["ttft_p99_ms"]),
        (f"1B, {_FLOOR}", "≤", 1.25, "times", lambda s: _times_floor(s, _of_64(s, "decode-1b"))),
        (f"8B, {_FLOOR}", "≤", 1.25, "times", lambda s: _times_floor(s, _of_64(s, "decode-8b"))),
        ("8B, prompts in chunks of 2,048, of the peak", "≥", 60, "%", _prefill_share),
        (f"1B, {_GAP}", "≤", 5, "%", lambda s: 100 * _of_64(s, "decode-1b")["gap_share"]),
        (f"8B, {_GAP}", "≤", 5, "%", lambda s: 100 * _of_64(s, "decode-8b")["gap_share"]),
        (f"GPT-2, {_GAP}", "≤", 5, "%", lambda s: 100 * s["gpt2"]["steps"]["gap_share"]),
        (_UNEVEN, "≤", 1.5, "times", lambda s: _times_floor(s, s["uneven"]["uneven"])),
        (_ARRIVALS, "≤", 1.5, "times", lambda s: s["uneven"]["arrivals"]["itl_p99_to_steady"]),
        (_STREAMS, "≥", 40_000, "tokens/s", lambda s: s["streams"]["streams"]["output_tokens_per_second"]),
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
    """Return the summary, then a chapter for each section."""
    sections: Sections = report["sections"]
    lines = [_where(report), "", *as_markdown(targets_table(report)), "", *_correctness(sections)]
    ended = [[name, result["status"], f"{result.get('seconds', 0):.0f}"] for name, result in sections.items()]
    lines += ["", *as_markdown([["section", "how it ended", "s"], *ended])]
    for name, result in sections.items():
        if "problem" in result:
            lines += ["", f"{name}:", "", "```", result["problem"], "```"]
    for name, result in sections.items():
        if name not in CHECKS and (found := {key: result[key] for key in result if key not in _ENDING}):
            lines += ["", f"### {name}", *_shown("", _with_floors(sections, found))]
    return "\n".join(lines) + "\n"


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


def _with_floors(sections: Sections, found: Any) -> Any:
    """Return the result, with the floor of each step added where the ceilings are known."""
    if isinstance(found, list):
        return [_with_floors(sections, row) for row in found]
    if not isinstance(found, dict):
        return found
    if "bytes" in found and "period_ms" in found:
        with suppress(KeyError):
            floor = floor_ms(sections, found)
            return found | {"floor_ms": floor, "times_floor": found["period_ms"] / floor}
    return {key: _with_floors(sections, value) for key, value in found.items()}


def _shown(title: str, found: Any) -> list[str]:
    """Return the lines of any result: rows as a table, numbers by name as one row, then the parts."""
    if isinstance(found, dict):
        plain = {key: value for key, value in found.items() if not isinstance(value, dict | list)}
        lines = _shown(title, [plain]) if plain else []
        for key in [key for key in found if key not in plain]:
            lines += _shown(f"{title}, {key}" if title else key, found[key])
        return lines
    if not (isinstance(found, list) and all(isinstance(row, dict) for row in found)):
        return ["", f"{title}: {_cell(found)}"]
    rows = [_flat(row) for row in found]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(key, "")) for key in keys] for row in rows]
    return ["", *([f"{title}:", ""] if title else []), *(as_markdown([keys, *cells]) if keys else [])]


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row in which the values of a dictionary are columns of their own. Lists are in the JSON alone."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        found |= {f"{key} {part}": one for part, one in value.items()} if isinstance(value, dict) else {key: value}
    return {key: value for key, value in found.items() if not isinstance(value, list | dict)}


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:.3g}" if abs(value) >= 1e9 else number(value)
