"""Makes the text of the GPU check: the figures beside their targets, what is wrong, and all other results. Pure.

`sections` has the results of `run.run_all` by name. A figure that a section did not find is shown as missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.markdown import as_markdown, number

Sections = dict[str, dict[str, Any]]
CORRECTNESS = ("families", "kernels", "layers", "experts", "graphs", "compiled", "overload", "waits")
# Ceilings for targets where they could not be measured: what devices are sold as, times what is usually reached of it.
NOMINAL = {
    "H200": {"bytes_per_second": 0.9 * 4.8e12, "operations_per_second": 0.78 * 989e12},
    "H100": {"bytes_per_second": 0.9 * 3.35e12, "operations_per_second": 0.78 * 989e12},
    "A100": {"bytes_per_second": 0.9 * 2.0e12, "operations_per_second": 0.85 * 312e12},
}
_ENDING = ("status", "seconds", "problem")
MOST_SHOWN = 10  # wrong results of a section; the rest is in the JSON


@dataclass(frozen=True, slots=True)
class SpeedTarget:
    """A limit for one figure. `find` takes the sections and raises KeyError if one of them did not find the figure."""

    what: str
    unit: str
    limit: float
    find: Callable[[Sections], float]
    more_is_better: bool = False

    def is_met(self, value: float) -> bool:
        return value >= self.limit if self.more_is_better else value <= self.limit


def ceilings(sections: Sections) -> dict[str, float]:
    """Return what the device can do, as measured, or else as it is sold. Raises KeyError for a device that is not
    known."""
    environment = sections["environment"]
    if isinstance(environment.get("ceilings"), dict):
        return environment["ceilings"]  # type: ignore[no-any-return]
    device = environment.get("device", "")
    for name, found in NOMINAL.items():
        if name in device:
            return found
    raise KeyError(device)


def floor_ms(sections: Sections, decode: dict[str, Any]) -> float:
    """Return the time of a decode step that only reads what it must, at the bandwidth that was measured."""
    rate = ceilings(sections)["bytes_per_second"]
    return decode["bytes"] / rate * 1e3  # type: ignore[no-any-return]


def _decode(sections: Sections, name: str, batch: int) -> dict[str, Any]:
    return next(row for row in sections[name]["decode"] if row["sequences"] == batch)


def _times_floor(name: str, batch: int) -> Callable[[Sections], float]:
    def find(sections: Sections) -> float:
        row = _decode(sections, name, batch)
        return row["period_ms"] / floor_ms(sections, row)  # type: ignore[no-any-return]

    return find


def _prefill_share(sections: Sections) -> float:
    peak = ceilings(sections)["operations_per_second"]
    return 100 * sections["decode-8b"]["prefill"]["operations_per_second"] / peak  # type: ignore[no-any-return]


SPEED_TARGETS = (
    SpeedTarget(
        "GPT-2 124M, 256 requests of 64 tokens, batch 64: output",
        "tokens/s",
        100_000,
        lambda s: s["gpt2"]["at_once"]["output_tokens_per_second"],
        more_is_better=True,
    ),
    SpeedTarget("the same, all at once: TTFT p99", "ms", 50, lambda s: s["gpt2"]["at_once"]["ttft_p99_ms"]),
    SpeedTarget("the same, from 64 clients: TTFT p99", "ms", 50, lambda s: s["gpt2"]["clients"]["ttft_p99_ms"]),
    SpeedTarget(
        "GPT-2 124M, 256 prompts of 259 tokens, one new token, batch 16: submit p99",
        "ms",
        0.02,
        lambda s: s["gpt2"]["one_token"]["submit_p99_ms"],
    ),
    SpeedTarget("the same: TTFT p99", "ms", 100, lambda s: s["gpt2"]["one_token"]["ttft_p99_ms"]),
    SpeedTarget("1B, decode step of 64 at 512 tokens, to its floor", "times", 1.25, _times_floor("decode-1b", 64)),
    SpeedTarget("8B, decode step of 64 at 512 tokens, to its floor", "times", 1.25, _times_floor("decode-8b", 64)),
    SpeedTarget("8B, prompts in chunks of 2,048, of the peak", "%", 60, _prefill_share, more_is_better=True),
    SpeedTarget("1B, gap between decode steps of 64", "%", 5, lambda s: 100 * _decode(s, "decode-1b", 64)["gap_share"]),
    SpeedTarget("8B, gap between decode steps of 64", "%", 5, lambda s: 100 * _decode(s, "decode-8b", 64)["gap_share"]),
    SpeedTarget("GPT-2, gap between decode steps of 64", "%", 5, lambda s: 100 * s["gpt2"]["steps"]["gap_share"]),
    SpeedTarget(
        "1B, decode step of one sequence of 65,536 tokens and 63 of 300, to its floor",
        "times",
        1.5,
        lambda s: s["uneven"]["uneven"]["period_ms"] / floor_ms(s, s["uneven"]["uneven"]),
    ),
    SpeedTarget(
        "1B, 64 decodes while prompts arrive: ITL p99, to the steady one",
        "times",
        1.5,
        lambda s: s["uneven"]["arrivals"]["itl_p99_to_steady"],
    ),
    SpeedTarget(
        "GPT-2, 256 streams over HTTP, four front ends: output",
        "tokens/s",
        90_000,
        lambda s: s["streams"]["streams"]["output_tokens_per_second"],
        more_is_better=True,
    ),
)


def is_correct(sections: Sections) -> bool:
    """Return whether every section about answers that was run ended well and found the answers equal."""
    asked = [sections[name] for name in CORRECTNESS if name in sections]
    return all(result["status"] == "done" and not wrong(result) for result in asked)


def wrong(found: Any) -> list[dict[str, Any]]:
    """Return all rows, anywhere in a result, whose `equal` is false."""
    if isinstance(found, list):
        return [row for item in found for row in wrong(item)]
    if not isinstance(found, dict):
        return []
    if found.get("equal") is False:
        return [found]
    return [row for value in found.values() for row in wrong(value)]


def num_right(found: Any) -> int:
    """Return the number of rows, anywhere in a result, whose `equal` is true."""
    if isinstance(found, list):
        return sum(map(num_right, found))
    if not isinstance(found, dict):
        return 0
    return 1 if found.get("equal") is True else sum(map(num_right, found.values()))


def targets_table(report: dict[str, Any]) -> list[list[str]]:
    """Return a row for each target, after the head."""
    sections: Sections = report["sections"]
    rows = [["", "measured", "target", "met"]]
    for target in SPEED_TARGETS:
        sign = "≥" if target.more_is_better else "≤"
        goal = f"{sign} {number(target.limit)} {target.unit}"
        try:
            if report["is_dry_run"]:
                raise KeyError
            value = target.find(sections)
            rows.append(
                [target.what, f"{number(value)} {target.unit}", goal, "yes" if target.is_met(value) else "**no**"]
            )
        except (KeyError, StopIteration):
            rows.append([target.what, report["is_dry_run"] or "missing", goal, ""])
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
        if name not in CORRECTNESS and (found := {key: result[key] for key in result if key not in _ENDING}):
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
    lines = []
    for name in CORRECTNESS:
        if name not in sections:
            continue
        result, different = sections[name], wrong(sections[name])
        if result["status"] != "done":
            lines.append(f"- {name}: **{result['status']}**")
        else:
            lines.append(f"- {name}: {f'**{len(different)} WRONG**' if different else f'{num_right(result)} equal'}")
        lines += [f"    - {row}" for row in different[:MOST_SHOWN]]
        lines += [f"    - {what}: {found['problem']}" for what, found in result.items() if _has_problem(found)]
    return lines


def _has_problem(found: Any) -> bool:
    return isinstance(found, dict) and "problem" in found


def _with_floors(sections: Sections, found: Any) -> Any:
    """Return what was found, with the floor of each step beside it where the ceilings are known."""
    if isinstance(found, list):
        return [_with_floors(sections, row) for row in found]
    if not isinstance(found, dict):
        return found
    if "bytes" in found and "period_ms" in found:
        try:
            floor = floor_ms(sections, found)
        except KeyError:
            return found
        return found | {"floor_ms": floor, "times_floor": found["period_ms"] / floor}
    return {key: _with_floors(sections, value) for key, value in found.items()}


def _shown(title: str, found: Any) -> list[str]:
    """Return the lines of any result: rows as a table, numbers by name as one row, then the parts."""
    if isinstance(found, list) and all(isinstance(row, dict) for row in found):
        rows = [_flat(row) for row in found]
        keys = list(dict.fromkeys(key for row in rows for key in row))
        cells = [[_cell(row.get(key, "")) for key in keys] for row in rows]
        return ["", f"{title}:", "", *(as_markdown([keys, *cells]) if keys else [])]
    if not isinstance(found, dict):
        return ["", f"{title}: {_cell(found)}"]
    plain = {key: value for key, value in found.items() if not isinstance(value, dict | list)}
    lines = ["", *([f"{title}:", ""] if title else []), *_row(plain)] if plain else []
    for key, value in found.items():
        if isinstance(value, dict | list):
            lines += _shown(f"{title}, {key}" if title else key, value)
    return lines


def _row(values: dict[str, Any]) -> list[str]:
    return as_markdown([list(values), [*map(_cell, values.values())]])


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
