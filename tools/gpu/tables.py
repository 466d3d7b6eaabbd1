"""Makes the tables of the GPU check's figures: each step stands beside its floor and its matrix products alone. Pure.

`sections` has the results of `run.run_all` by name. What a section did not find has no row, and no cell.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from tools.markdown import as_markdown, number

Sections = dict[str, dict[str, Any]]
Rows = list[list[str]]
MODELS = {"8b": "8B", "1b": "1B"}  # sections, and how their models are called
SHOWN_GAPS = 3
MARGIN = 120  # characters of a line on a page
_SHOWN_VERSIONS = ("torch", "triton")
WAITING = ("wait", "idle")  # parts of the engine thread's time in which it has nothing to do


def ceilings(sections: Sections) -> dict[str, Any]:
    """Return the rates that the device was measured to reach. Raises KeyError if there are none."""
    found = sections["environment"]["ceilings"]
    if not isinstance(found, dict):
        raise KeyError(found)  # why there are none
    return found


def floor_ms(sections: Sections, step: dict[str, Any]) -> float:
    """Return the time of a step that reads what it must while it computes, at the rates that were measured.
    Raises KeyError if there are none."""
    rates = ceilings(sections)
    return max(step[work] / rates[f"{work}_per_second"] for work in ("bytes", "operations")) * 1e3  # type: ignore[no-any-return]


def products_ms(section: dict[str, Any], rows: int) -> float | None:
    """Return the time of the matrix products alone for this many tokens."""
    return next((one["products_ms"] for one in section.get("reference", ()) if one["rows"] == rows), None)


def host_ms(decode: dict[str, Any]) -> float:
    """Return the time in which the engine thread works on a step."""
    return sum(ms for part, ms in decode["host_ms"].items() if part not in WAITING)


def figures(sections: Sections) -> list[str]:
    """Return the lines of all tables."""
    tables = [
        *(table for name, title in MODELS.items() if name in sections for table in _of_model(sections, name, title)),
        quantized(sections),
        products(sections),
        gpt2(sections),
    ]
    lines = [line for table in tables if len(table) > 1 for line in (*as_markdown(table), "")]
    for sentences in (gaps(sections), streams(sections), offload(sections), kernel_times(sections)):
        lines += [*sentences, ""] if sentences else []
    return lines


def _of_model(sections: Sections, name: str, title: str) -> Iterator[Rows]:
    yield decodes(sections, sections[name], title)
    yield steps(sections, sections[name], title)
    yield attention(sections[name], title)


def decodes(sections: Sections, section: dict[str, Any], title: str) -> Rows:
    rows = [[f"{title}, decode", "step ms", "device", "floor", "times", "products", "copy", "gap", "host", "tokens/s"]]
    copies = {one["rows"]: one.get("copy_ms") for one in section.get("reference", ())}
    for row in sorted(section.get("decode", ()), key=lambda one: one["sequences"]):
        batch = row["sequences"]
        floor, times = _to_floor(sections, row, "device_ms")
        rows.append(
            [
                f"{batch} at {row['context']}",
                *map(_cell, (row["period_ms"], row["device_ms"])),
                floor,
                times,
                *map(_cell, (products_ms(section, batch), copies.get(batch), row["gap_ms"], host_ms(row))),
                number(round(1e3 * batch / row["period_ms"])),
            ]
        )
    return rows


def steps(sections: Sections, section: dict[str, Any], title: str) -> Rows:
    rows = [[f"{title}, other steps", "device ms", "floor", "times", "products", "launch", "overlapped", "alone"]]
    for name, row in section.get("steps", {}).items():
        floor, times = _to_floor(sections, row, "device_ms")
        products = products_ms(section, row["tokens"])
        others = (products, row["launch_ms"], row["period_ms"], row["alone_ms"])
        rows.append([name, _cell(row["device_ms"]), floor, times, *map(_cell, others)])
    return rows


def attention(section: dict[str, Any], title: str) -> Rows:
    """Compare a layer's attention of a prompt with torch's, in microseconds and, in brackets, TFLOP/s."""
    rows = [[f"{title}, attention of a prompt, us (TFLOP/s)", "ours", "flash", "cudnn"]]
    found: dict[tuple[int, int], dict[str, str]] = {}
    operations: dict[tuple[int, int], float] = {}
    for row in section.get("attention", ()):
        key = row["earlier"], row["tokens"]
        operations[key] = row["operations"]
        found.setdefault(key, {})[row["by"]] = _with_rate(row["us"], row["operations"]) if "us" in row else "none"
    for (earlier, tokens), by in sorted(found.items()):
        names = (f"prompt of {tokens}", f"{tokens} behind {earlier}")
        profile = section.get("profiles", {}).get(names[bool(earlier)], {})
        for kernel in profile.get("kernels", ()):
            if kernel["name"] == "prefill_kernel":
                by["ours"] = _with_rate(kernel["us"] / kernel["calls"], operations[earlier, tokens])
        rows.append([names[1], *(by.get(name, "") for name in ("ours", "flash", "cudnn"))])
    return rows


def _with_rate(us: float, operations: float) -> str:
    return f"{number(us)} ({operations / us / 1e6:.0f})"


def gaps(sections: Sections) -> list[str]:
    """Say for each profiled step which parts lose most time to their floors."""
    lines = []
    for name, title in {**MODELS, "quantized": ""}.items():
        section = sections.get(name, {})
        profiles = section.get("profiles") or {
            what: found["profile"] for what, found in section.items() if isinstance(found, dict) and "profile" in found
        }
        for step, profile in profiles.items():
            with suppress(KeyError):
                lines.append(f"- {title}{', ' * bool(title)}{step}: {gaps_of(sections, profile)}")
    return ["Lost to the floor, in us:", "", *lines] if lines else []


def gaps_of(sections: Sections, profile: dict[str, Any]) -> str:
    """Return the parts of a step that lose most, and what they reach. Raises KeyError without ceilings."""
    rates = ceilings(sections)
    whole = profile["device_us"]
    lost = {part["part"]: (_lost_us(part, rates), _reached(part)) for part in profile["parts"]}
    lost["between kernels"] = max(0.0, whole - profile["busy_us"]), ""
    worst = sorted(lost.items(), key=lambda one: -one[1][0])[:SHOWN_GAPS]
    named = ", ".join(f"{name} {number(us)}{reached}" for name, (us, reached) in worst)
    return f"{number(sum(us for us, _ in lost.values()))} of {number(whole)}: {named}"


def _lost_us(part: dict[str, Any], rates: dict[str, Any]) -> float:
    floors = (part[work] / rates[f"{work}_per_second"] for work in ("bytes", "operations"))
    return max(0.0, part["us"] - 1e6 * max(floors))  # type: ignore[no-any-return]


def _reached(part: dict[str, Any]) -> str:
    """Say what a part does in a second, of bytes or, where these are few for its operations, of operations."""
    if not part["bytes"] and not part["operations"]:
        return ""
    rates = f"{part['bytes'] / part['us'] / 1e6:.2f} TB/s"
    if part["operations"] > 200 * part["bytes"]:
        rates = f"{part['operations'] / part['us'] / 1e6:.0f} TFLOP/s"
    return f" of {number(part['us'])} ({rates})"


def quantized(sections: Sections) -> Rows:
    section = sections.get("quantized", {})
    found = {name: one for name, one in section.items() if isinstance(one, dict) and "decode" in one}
    batches = sorted({row["sequences"] for one in found.values() for row in one["decode"]})
    prompts = sorted({row["tokens"] for one in found.values() for row in one.get("prompts", ())})
    rows = [["few layers, decode: device ms (floor; times)", *map(str, batches), *(f"prompt of {n}" for n in prompts)]]
    for name, one in found.items():
        by_batch = {row["sequences"]: _with_floor(sections, row) for row in one["decode"]}
        by_tokens = {row["tokens"]: _with_floor(sections, row) for row in one.get("prompts", ())}
        cells = [*(by_batch.get(batch, "") for batch in batches), *(by_tokens.get(tokens, "") for tokens in prompts)]
        rows.append([f"{name}, {one['weight_bytes'] / 1e9:.2f} GB", *cells])
    return rows


def products(sections: Sections) -> Rows:
    """Return the times of products by the way that the start tried, and by the number of rows."""
    section = sections.get("quantized", {})
    times = {
        f"{name}, {way}": seconds
        for name, one in section.items()
        if isinstance(one, dict)
        for way, seconds in one.get("products", {}).get("seconds", {}).items()
    }
    numbers = sorted({int(rows) for seconds in times.values() for rows in seconds})
    rows = [["a layer's products: µs with rows", *map(str, numbers)]]
    for name, seconds in times.items():
        rows.append([name, *(_cell(_in_us(seconds.get(str(one)))) for one in numbers)])
    return rows


def _in_us(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def _with_floor(sections: Sections, row: dict[str, Any]) -> str:
    floor, times = _to_floor(sections, row, "device_ms")
    return f"{number(row['device_ms'])} ({floor}; {times})"


def gpt2(sections: Sections) -> Rows:
    """Return the figures of the loads, in ms apart from the rate."""
    names = ("submit_wall", "submit_p99", "queue_p50", "prefill_p50", "ttft_p50", "ttft_p99", "tpot_p50", "itl_p99")
    rows = [["GPT-2, ms", "tokens/s", *(name.replace("_", " ") for name in names)]]
    for name, load in sections.get("gpt2", {}).get("loads", {}).items():
        times = (f"{1e3 * load[key]:.3g}" if key in load else "" for key in names)
        rows.append([f"{load['requests']}, {name}", number(round(load["output_tokens_per_second"])), *times])
    return rows


def streams(sections: Sections) -> list[str]:
    with suppress(KeyError):
        found = sections["streams"]
        threads = ", ".join(f"{row['thread']} {row['us_per_token']:.1f}" for row in found["threads"][:6])
        return [
            f"1B, {found['streams']} streams over HTTP: {number(round(found['output_tokens_per_second']))} tokens/s, "
            f"ITL p50 {number(found['itl_p50_ms'])} ms, p99 {number(found['itl_p99_ms'])} ms (client: "
            f"{found['client']}). CPU time of the server's threads, us a token: {threads}."
        ]
    return []


def offload(sections: Sections) -> list[str]:
    with suppress(KeyError):
        row = max(sections["offload"]["copies"], key=lambda one: one["bytes"])
        rates = ", ".join(f"{row['bytes'] / row[f'{way}_ms'] / 1e6:.1f} GB/s {way}" for way in ("out", "in"))
        return [
            f"KV blocks of an 8B in host memory, {row['blocks']} at once ({number(row['bytes'] / 1e6)} MB): {rates}; "
            f"a step waits {number(row['step_waits_ms'])} ms for them."
        ]
    return []


def kernel_times(sections: Sections) -> list[str]:
    sentences = [
        f"{row['tokens']} tokens behind {number(row['context'])}, attention of a layer of an 8B: "
        f"{number(row['cut_us'])} µs with keys cut among programs, {number(row['whole_us'])} without."
        for row in sections.get("few-tokens", {}).get("attention", [])
    ]
    sentences += [
        f"{row['model']}, latent attention of a layer, {row['rows']} decodes: {number(row['us'])} µs, "
        f"{number(row['gb_per_s'])} GB/s."
        for row in sections.get("latent", {}).get("attention", [])
    ]
    sentences += [
        f"Draws of {row['rows']}: {number(row['us'])} µs, with penalties {number(row['us_with_penalties'])}."
        for row in sections.get("penalties", {}).get("draws", [])
    ]
    return sentences


def _to_floor(sections: Sections, row: dict[str, Any], measured: str) -> tuple[str, str]:
    """Return the floor, and how many times it was measured; empty where there are no ceilings."""
    with suppress(KeyError):
        floor = floor_ms(sections, row)
        return number(floor), f"{row[measured] / floor:.2f}"
    return "", ""


def _cell(value: float | None) -> str:
    return "" if value is None else number(value)


def page(sections: Sections, created: str, checked: Sequence[str]) -> str:
    """Return the short form for the documentation: where it was measured, a table of steps, and a few results."""
    head = ["device ms (floor; products alone)", *(title for name, title in MODELS.items() if name in sections)]
    found = [_page_rows(sections, sections[name]) for name in MODELS if name in sections]
    names = list(dict.fromkeys(name for column in found for name in column))
    table = [head, *([name, *(column.get(name, "") for column in found)] for name in names)]
    lines = [*_wrapped(_where(sections, created)), "", *as_markdown(table)]
    for more in (quantized(sections), products(sections), gpt2(sections)):
        lines += ["", *as_markdown(more)] if len(more) > 1 else []
    for sentence in (*streams(sections), *offload(sections), *kernel_times(sections), *checked):
        lines += ["", *_wrapped(sentence)]
    return "\n".join(lines) + "\n"


def _where(sections: Sections, created: str) -> str:
    found = sections.get("environment", {})
    versions = [f"{name} {version}" for name, version in found.get("versions", {}).items() if name in _SHOWN_VERSIONS]
    text = (
        f"Models with random weights on {found.get('device', 'an unknown device')} ({', '.join([*versions, created])})."
    )
    with suppress(KeyError):
        rates = ceilings(sections)
        text += (
            f" A floor is the time of bytes at the measured {rates['bytes_per_second'] / 1e12:.2f} TB/s, or of "
            f"operations at {rates['operations_per_second'] / 1e12:.0f} TFLOP/s."
        )
    return text


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, MARGIN, break_long_words=False, break_on_hyphens=False)


_ON_PAGE = (1, 16, 64, 256)  # decodes
_FEW_STEPS: tuple[Callable[[str], bool], ...] = (
    lambda name: name == "2048 prompt tokens behind 0",
    lambda name: name == "64 decodes, 400 prompt tokens",
    lambda name: name.startswith("prompt of 8192"),
)


def _page_rows(sections: Sections, section: dict[str, Any]) -> dict[str, str]:
    rows: dict[str, tuple[dict[str, Any], int]] = {}
    for row in sorted(section.get("decode", ()), key=lambda one: one["sequences"]):
        if row["sequences"] in _ON_PAGE:
            rows[f"decode of {row['sequences']} at {row['context']}"] = row, row["sequences"]
    for name, row in section.get("steps", {}).items():
        if any(is_shown(name) for is_shown in _FEW_STEPS):
            rows[name] = row, row["tokens"]
    cells = {}
    for name, (row, tokens) in rows.items():
        beside: Sequence[str] = [_to_floor(sections, row, "device_ms")[0], _cell(products_ms(section, tokens))]
        cells[name] = f"{number(row['device_ms'])} ({'; '.join(filter(None, beside))})"
    return cells
