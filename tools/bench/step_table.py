"""Makes the tables of what step.py has measured. Pure."""

from __future__ import annotations

from typing import Any

from tools.markdown import as_markdown, number


def report(results: dict[str, Any]) -> str:
    limits = results["ceilings"]
    weights = "" if results["quantize"] == "none" else f" with {results['quantize']} weights"
    cache = "" if results.get("kv_cache_dtype", "auto") == "auto" else f" and an {results['kv_cache_dtype']} KV cache"
    lines = [
        f"{results['machine']}; {results['created']}.",
        f"The demo model in {results['dtype']}{weights}{cache}, {results['threads']} threads.",
        f"Memory was read at {limits['bytes_per_second'] / 1e9:.0f} GB/s, matrices were multiplied at "
        f"{limits['flops_per_second'] / 1e9:.0f} GFLOP/s.",
    ]
    if decode := results["decode"]:
        head = f"A decode step by its sequences, of {decode[0]['context']} tokens each. Times in ms:"
        lines += ["", head, "", *_decode_table(decode)]
    if context := results["context"]:
        columns = {"sequences": "num_sequences", "context": "context"}
        lines += ["", "By context:", "", *_attention_table(context, columns)]
    if prefill := results["prefill"]:
        lines += ["", "A prompt in one step:", "", *_attention_table(prefill, {"tokens": "num_tokens"})]
    if results["left_out"]:
        lines += ["", f"Left out, since the KV cache would not fit into memory: {', '.join(results['left_out'])}."]
    return "\n".join(lines)


def _decode_table(rows: list[dict[str, Any]]) -> list[str]:
    parts = list(rows[0]["parts_ms"])
    lines = [["sequences", "step", "x floor", "tokens/s", *parts, "engine"]]
    for row in rows:
        measured = [f"{row['parts_ms'][name]:.2f}" for name in parts]
        lines.append([str(row["num_sequences"]), *_whole(row), *measured, f"{row['engine_ms']:.2f}"])
    return as_markdown(lines)


def _attention_table(rows: list[dict[str, Any]], keys: dict[str, str]) -> list[str]:
    """Return a row for each step, with attention, the only part that a context changes."""
    lines = [[*keys, "step", "x floor", "tokens/s", "attention"]]
    for row in rows:
        lines.append([*(f"{row[key]:,}" for key in keys.values()), *_whole(row), f"{row['parts_ms']['attention']:.2f}"])
    return as_markdown(lines)


def _whole(row: dict[str, Any]) -> list[str]:
    speed = row["num_sequences"] * row["num_tokens"] / row["step_ms"] * 1e3
    return [f"**{row['step_ms']:.2f}**", f"{row['step_ms'] / row['floor_ms']:.2f}", number(speed)]
