"""The tables of results for people, from the JSON file, which may be put together from several runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.markdown import as_markdown, number

HEAD = (
    "attack", "sent", "came back", "CPU s", "cores busy, quiet / attack", "RSS before / peak / after, MiB",
    "ITL p99 ms, quiet / attack (ratio)", "ITL max ms", "TTFT max ms", "afterwards", "verdict",
)  # fmt: skip
FAMILY_HEAD = (
    "family", "attacks", "sent", "ITL p99, times quiet", "ITL p99 ms", "RSS grows by, MiB", "verdict",
)  # fmt: skip
MOST_SHOWN = 3  # sentences of a verdict


def row(found: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells for one attack of the JSON file."""
    failed = found["failures"]
    came_back = ", ".join(f"{outcome} x {times}" for outcome, times in found["answers"].items())
    memory = " / ".join(f"{found[f'rss_{when}_mib']:,.0f}" for when in ("before", "peak", "after"))
    cores = found["cpu_seconds"] / found["took_seconds"] if found["took_seconds"] else 0.0
    verdict = f"**fails**: {'; '.join(failed[:MOST_SHOWN])}" if failed else "holds"
    return tuple(
        cell.replace("|", "\\|").replace("\n", " ")
        for cell in (
            found["name"],
            f"{found['sends']} ({found['num_sent']:,})",
            came_back or "nothing",
            number(found["cpu_seconds"]),
            f"{found['quiet_cpu_cores']:.2f} / {cores:.2f}",
            memory,
            itl(found),
            largest(found["itl_attack"]),
            largest(found["ttft_attack"]),
            found["state"],
            verdict,
        )
    )


def itl(found: dict[str, Any]) -> str:
    if found["itl_ratio"] is None:
        return "no tokens"
    quiet, attack = (1000 * found[name]["p99"] for name in ("itl_quiet", "itl_attack"))
    return f"{number(quiet)} / {number(attack)} ({found['itl_ratio']:.2f})"


def largest(seconds: dict[str, Any]) -> str:
    return number(1000 * seconds["max"]) if "max" in seconds else "none"


def markdown(attacks: Sequence[dict[str, Any]]) -> str:
    """Return a row for each family of attacks, with the worst of each figure."""
    families: dict[str, list[dict[str, Any]]] = {}
    for found in attacks:
        families.setdefault(found["family"], []).append(found)
    return "\n".join(as_markdown([FAMILY_HEAD, *(family_row(name, ones) for name, ones in families.items())]))


def family_row(name: str, attacks: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    ratios = [found["itl_ratio"] for found in attacks if found["itl_ratio"] is not None]
    slowest = [1000 * found["itl_attack"]["p99"] for found in attacks if "p99" in found["itl_attack"]]
    growth = max(found["rss_peak_mib"] - found["rss_before_mib"] for found in attacks)
    failed = [f"{found['name']}: {failure}" for found in attacks for failure in found["failures"][:MOST_SHOWN]]
    return (
        name,
        str(len(attacks)),
        f"{sum(found['num_sent'] for found in attacks):,}",
        f"{max(ratios):.2f}" if ratios else "no tokens",
        number(max(slowest)) if slowest else "no tokens",
        f"{growth:,.0f}",
        f"**fails**: {'; '.join(failed)}" if failed else "holds",
    )
