"""Makes the text of what `tools.gpu.kernel_check` has found, also of a part of it. Pure."""

from __future__ import annotations

from typing import Any


def as_markdown(report: dict[str, Any]) -> str:
    attention, sampling, masks = (report.get(key, []) for key in ("attention", "sampling", "masks"))
    wrong = [row for row in attention + sampling + masks if not row["equal"]]
    lines = ["### Triton's kernels", ""]
    if report.get("interpreted"):
        lines += ["In Triton's interpreter on a CPU: whether they are right, but no time below means anything.", ""]
    lines += [
        f"{len(attention)} shapes of attention, {len(sampling)} of sampling and {len(masks)} of masks are compared "
        "with the reference: "
        f"{'all equal' if not wrong else f'{len(wrong)} DIFFERENT'}.",
        *(f"DIFFERENT: {row}" for row in wrong),
    ]
    if "write" in report:
        limits, write = report["limits"], report["write"]
        lines += [
            f"Memory moves {limits['bytes_per_second'] / 1e9:,.0f} GB/s, a bfloat16 product does "
            f"{limits['operations_per_second'] / 1e12:,.1f} TFLOP/s. Writing {write['tokens']} tokens takes "
            f"{write['us']:,.1f} us, {write['of_bandwidth']:.0%} of that bandwidth.",
        ]
    if "decode" in report:
        lines += ["", "| decode | sequences | context | items | us | GB/s | of the bandwidth |  |", "|---" * 8 + "|"]
    for row in report.get("decode", []):
        lines += [
            f"| {row['shape']} | {row['sequences']} | {row['context']} | {row['items']} | {row['us']:,.1f} | "
            f"{row['bytes_per_second'] / 1e9:,.0f} | {row['of_bandwidth']:.0%} | {_best(row)} |"
        ]
    if "prefill" in report:
        head = "| prefill | sequences | new | context | us | TFLOP/s | of a product | torch, us |  |"
        lines += ["", head, "|---" * 9 + "|"]
    for row in report.get("prefill", []):
        torch_us = f"{row['torch_us']:,.1f}" if "torch_us" in row else ""
        lines += [
            f"| {row['shape']} | {row['sequences']} | {row['new_tokens']} | {row['context']} | {row['us']:,.1f} | "
            f"{row['operations_per_second'] / 1e12:,.1f} | {row['of_matmul']:.0%} | {torch_us} | {_best(row)} |"
        ]
    if "choose" in report:
        lines += ["", "| choose | rows | spread of logits | Triton, ms | plain, ms |", "|---" * 5 + "|"]
    for row in report.get("choose", []):
        lines += [
            f"| {row['kind']} | {row['rows']} | {row['spread']} | {row['triton_ms']:.3f} | {row['plain_ms']:.3f} |"
        ]
    return "\n".join(lines) + "\n"


def _best(row: dict[str, Any]) -> str:
    return f"{row['best']['us']:,.1f} with {row['best']['choice']}" if "best" in row else ""
