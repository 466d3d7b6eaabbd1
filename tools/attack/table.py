"""The table of what was found, for people."""

from __future__ import annotations

from tools.attack.attack import Attack, counted
from tools.attack.measure import Result
from tools.attack.neighbour import quantile
from tools.attack.verdict import failures
from tools.markdown import as_markdown, number

HEAD = (
    "attack", "sent", "came back", "CPU s", "cores busy, quiet / attack", "RSS before / peak / after, MiB",
    "ITL p99 ms, quiet / attack (ratio)", "ITL max ms", "TTFT max ms", "afterwards", "verdict",
)  # fmt: skip
MOST_SHOWN = 3  # sentences of a verdict


def row(attack: Attack, result: Result) -> tuple[str, ...]:
    failed = failures(attack, result)
    came_back = ", ".join(f"{outcome} x {times}" for outcome, times in counted(result.answers).items())
    memory = " / ".join(f"{mib:,.0f}" for mib in (result.rss_before_mib, result.rss_peak_mib, result.rss_after_mib))
    verdict = f"**fails**: {'; '.join(failed[:MOST_SHOWN])}" if failed else "holds"
    return tuple(
        cell.replace("|", "\\|").replace("\n", " ")
        for cell in (
            attack.name,
            f"{attack.sends} ({result.num_sent:,})",
            came_back or "nothing",
            number(result.cpu_seconds),
            f"{result.quiet_cpu_cores:.2f} / {result.cpu_cores:.2f}",
            memory,
            itl(result),
            largest(result.itl_attack),
            largest(result.ttft_attack),
            result.state,
            verdict,
        )
    )


def itl(result: Result) -> str:
    if result.itl_ratio is None:
        return "no tokens"
    quiet, attack = (1000 * quantile(values, 0.99) for values in (result.itl_quiet, result.itl_attack))
    return f"{number(quiet)} / {number(attack)} ({result.itl_ratio:.2f})"


def largest(seconds: list[float]) -> str:
    return number(1000 * max(seconds)) if seconds else "none"


def markdown(results: list[tuple[Attack, Result]]) -> str:
    return "\n".join(as_markdown([HEAD, *(row(attack, result) for attack, result in results)]))
