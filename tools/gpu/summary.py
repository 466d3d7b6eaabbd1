"""Makes the text of the GPU check: the figures beside their targets, what is wrong, and all other results. Pure.

`sections` has the results of `run.run_all` by name. A figure that a section did not find is shown as missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.gpu import kernel_tables
from tools.markdown import as_markdown, number

Sections = dict[str, dict[str, Any]]
CORRECTNESS = ("families", "kernels", "layers", "experts", "graphs", "compiled", "overload", "waits")
# Ceilings for targets where they could not be measured: what devices are sold as, times what is usually reached of it.
NOMINAL = {
    "H200": {"bytes_per_second": 0.9 * 4.8e12, "operations_per_second": 0.78 * 989e12},
    "H100": {"bytes_per_second": 0.9 * 3.35e12, "operations_per_second": 0.78 * 989e12},
    "A100": {"bytes_per_second": 0.9 * 2.0e12, "operations_per_second": 0.85 * 312e12},
}
BATCHES = (1, 16, 64, 256)
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


def best_peer(section: dict[str, Any], batch: int) -> float:
    """Return the tokens per second of the fastest settings that ran. Raises KeyError if none did."""
    rates = [by_batch[str(batch)] for by_batch in section["transformers"].values() if str(batch) in by_batch]
    if not rates:
        raise KeyError("transformers")
    return max(rates)  # type: ignore[no-any-return]


def _ratio(name: str, batch: int) -> Callable[[Sections], float]:
    def find(sections: Sections) -> float:
        ours = sections[name]["oaiserve"][str(batch)]["output_tokens_per_second"]
        return ours / best_peer(sections[name], batch)  # type: ignore[no-any-return]

    return find


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
    *(
        SpeedTarget(
            f"{title}, {batch} at once, to transformers' best", "times", 3, _ratio(name, batch), more_is_better=True
        )
        for title, name in (("1B", "peers-1b"), ("SmolLM2-135M", "peers-smollm2"))
        for batch in BATCHES
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
    for name, show in CHAPTERS.items():
        if len(sections.get(name, {})) > 3 or sections.get(name, {}).get("status") == "done":
            try:
                lines += ["", *show(sections, name)]
            except (KeyError, TypeError, IndexError):
                lines += ["", f"{name}: not complete; gpu_check.json has what there is."]
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


def _environment(sections: Sections, name: str) -> list[str]:
    found = sections[name]["ceilings"]
    if isinstance(found, str):
        return ["### What the device can do", "", found]
    rows = [["", ""]]
    rows += [[f"memory, {key}", f"{value / 1e9:,.0f} GB/s"] for key, value in found["bandwidth"].items()]
    rows += [[f"product {key}", f"{value / 1e12:,.0f} TFLOP/s"] for key, value in found["products"].items()]
    rows += [[f"launch, {key.removesuffix('_us')}", f"{value:.2f} us"] for key, value in found["launch"].items()]
    rows += [[f"4 KiB, {key.removesuffix('_us')}", f"{value:.1f} us"] for key, value in found["pinned_copy"].items()]
    return ["### What the device can do", "", *as_markdown(rows)]


def _gpt2(sections: Sections, name: str) -> list[str]:
    runs = {
        "64 tokens each, all at once": "at_once",
        "64 tokens each, from as many clients as the batch": "clients",
        "one token each": "one_token",
    }
    rows = [{"GPT-2 124M": title, **sections[name][key]} for title, key in runs.items()]
    keys = ["GPT-2 124M", "requests", "repeats", *_SPEED, "submit_p50_ms", "submit_p99_ms"]
    return ["### GPT-2 124M", "", *_table(rows, keys), "", *_steps([sections[name]["steps"]])]


_SPEED = ["output_tokens_per_second", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms"]
_PERIOD = ["steps", "period_ms", "period_p10_ms", "period_p90_ms", "device_ms", "gap_ms", "gap_share"]


def _steps(rows: list[dict[str, Any]]) -> list[str]:
    flat = [row | {f"host {part}": value for part, value in row["host_ms"].items()} for row in rows]
    parts = [key for key in flat[0] if key.startswith("host ")]
    return ["Steps, in ms; of the host what it did in one:", "", *_table(flat, ["sequences", *_PERIOD, *parts])]


def _model(sections: Sections, name: str) -> list[str]:
    result = sections[name]
    lines = [f"### {result['model']}, bfloat16, random weights", "", *_steps(result["decode"]), ""]
    rows = []
    for row in result["decode"]:
        try:
            floor = floor_ms(sections, row)
            row = row | {"floor_ms": floor, "times_floor": row["period_ms"] / floor}
        except (KeyError, TypeError):  # the ceilings were not measured
            pass
        rows.append(row)
    keys = ["sequences", "context", "floor_ms", "times_floor", *_SPEED]
    lines += [*_table(rows, [key for key in keys if key in rows[0]])]
    for key, title in (("prefill", "our kernels"), ("prefill_varlen", "torch's varlen attention")):
        if "ms" in (found := result.get(key, {})):
            shown = ", ".join(number(ms) for ms in found["ms"])
            lines += [
                "",
                f"Prompts of {found['prompt']} tokens in chunks of {found['chunk']}, {title}: {shown} ms by chunk, "
                f"{found['operations_per_second'] / 1e12:,.0f} TFLOP/s.",
            ]
    for kind in ("decode", "prefill") if "parts" in result else ():
        found = result["parts"][kind]
        lines += [
            "",
            f"A {kind} step of {found['tokens']} tokens: launched in {number(found['launch_ms'])} ms, its results "
            f"after {number(found['whole_ms'])} ms; the {found['on']} is busy for {number(found['busy_ms'])} ms of it:",
            "",
            *as_markdown(
                [
                    [f"on the {found['on']}", "calls", "us"],
                    *([f"`{row['name'][:90]}`", f"{row['calls']:g}", number(row["us"])] for row in found["kernels"]),
                ]
            ),
        ]
    return lines


def _peers(sections: Sections, name: str) -> list[str]:
    result = sections[name]
    rates = {"oaiserve": {key: row["output_tokens_per_second"] for key, row in result["oaiserve"].items()}}
    rates |= {f"transformers, {settings}": found for settings, found in result["transformers"].items()}
    head = ["output tokens/s", *(f"{batch} at once" for batch in result["oaiserve"])]
    rows = [
        [who, *(number(found[batch]) if batch in found else "" for batch in result["oaiserve"])]
        for who, found in rates.items()
    ]
    attention = result.get("attention", "no attention that worked")
    about = f"{result['prompt_tokens']} tokens in, {result['num_tokens']} out; theirs with {attention}."
    problems = [f"- {settings}: {problem}" for settings, problem in result.get("problems", {}).items()]
    return [
        f"### {result['model']}, beside transformers' continuous batching",
        "",
        about,
        "",
        *as_markdown([head, *rows]),
        *(["", *problems] if problems else []),
    ]


def _modes(sections: Sections, name: str) -> list[str]:
    lines = ["### With and without compiled layers, CUDA graphs and overlap"]
    for model, rows in sections[name].items():
        if isinstance(rows, list):
            named = [dict.fromkeys(("compile", "cuda_graph", "overlap"), "") | row for row in rows]
            lines += ["", f"{model}, {rows[0]['sequences']} sequences:", ""]
            lines += _table(named, ["compile", "cuda_graph", "overlap", *_PERIOD, "output_tokens_per_second"])
    return lines


def _uneven(sections: Sections, name: str) -> list[str]:
    found = sections[name]
    rows = [{"": kind, **found[kind]} for kind in ("even", "uneven") if kind in found]
    lines = ["### Ragged steps of Llama 1B", "", *_table(rows, ["", "sequences", "context", *_PERIOD])]
    if "arrivals" in found:
        lines += ["", "64 decodes, and prompts that arrive beside them:", "", *_table([found["arrivals"]], _ARRIVALS)]
    return lines


_ARRIVALS = ["steps", "mixed_steps", "steady_ms", "mixed_p50_ms", "itl_p99_ms"]


def _streams(sections: Sections, name: str) -> list[str]:
    row = sections[name]["streams"]
    return ["### GPT-2 124M over HTTP", "", *_table([row], list(row))]


def _start(sections: Sections, name: str) -> list[str]:
    rows = [{"model": model, **found} for model, found in sections[name].items() if isinstance(found, dict)]
    return ["### A start with default settings", "", *_table(rows, list(rows[0]))] if rows else []


def _kernels(sections: Sections, name: str) -> list[str]:
    return [kernel_tables.as_markdown(sections.get("kernels", {}) | sections[name]).rstrip()]


def _layers(sections: Sections, name: str) -> list[str]:
    keys = ["matrix", "kind", "rows", "us", "bfloat16_us", "of_bandwidth"]
    return ["### Products with packed weights", "", *_table(sections[name]["products"], keys)]


def _experts(sections: Sections, name: str) -> list[str]:
    keys = ["experts", "rows", "us", "of_bandwidth"]
    return ["### Layers of packed experts", "", *_table(sections[name]["layers"], keys)]


def _split(sections: Sections, name: str) -> list[str]:
    found, title = sections[name], "### A model that is split over two GPUs"
    if "left_out" in found:
        return [title, "", f"Left out: {found['left_out']}."]
    rows = found.get("decodes", [])
    lines = [title, "", *_table(rows, list(rows[-1]))] if rows else []
    if "killed_worker_noticed_s" in found:
        lines += ["", f"A killed worker was noticed after {found['killed_worker_noticed_s']:.1f} s."]
    return lines


CHAPTERS: dict[str, Callable[[Sections, str], list[str]]] = {
    "environment": _environment,
    "gpt2": _gpt2,
    "decode-1b": _model,
    "uneven": _uneven,
    "decode-8b": _model,
    "streams": _streams,
    "peers-1b": _peers,
    "peers-smollm2": _peers,
    "peers-gpt2": _peers,
    "modes": _modes,
    "start": _start,
    "kernel-speed": _kernels,
    "layer-speed": _layers,
    "expert-speed": _experts,
    "split": _split,
}


def _table(rows: list[dict[str, Any]], keys: list[str]) -> list[str]:
    head = [key.removesuffix("_ms").replace("_", " ") + (", ms" if key.endswith("_ms") else "") for key in keys]
    return as_markdown([head, *([_cell(key, row) for key in keys] for row in rows)])


def _cell(key: str, row: dict[str, Any]) -> str:
    value = row.get(key, "")
    if f"{key}_least" in row:
        return f"{number(value)} ({number(row[f'{key}_least'])}..{number(row[f'{key}_most'])})"
    if key.endswith("_share"):
        return f"{value:.1%}"
    if key.endswith("_bytes"):
        return f"{value / 2**30:.1f} GiB"
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
