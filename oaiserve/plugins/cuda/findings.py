"""Reports in sentences, for `oaiserve doctor`, what earlier starts found out about this machine's GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from oaiserve.plugins.cuda.start.features import Probed
from oaiserve.plugins.cuda.start.stored import all_found


def findings() -> Iterator[tuple[str, str]]:
    for found in all_found():
        if found.seconds:
            yield products(found)
        yield from unfit(found)


def unfit(found: Probed) -> Iterator[tuple[str, str]]:
    """Report the kernels that an earlier start found unsuitable for the GPU."""
    for part, reason in found.unfit.items():
        text = f"Plain torch computes {part} of {found.about}, because Triton's kernels don't fit there: {reason}"
        yield "kernels", f"{text.rstrip('.')}."


def products(found: Probed) -> tuple[str, str]:
    """Report how long products took in each way that a start measured, and which ways it chose."""
    times = []
    for way, seconds in found.seconds.items():
        listed = ", ".join(f"{taken * 1e6:,.0f} µs with {rows} rows" for rows, taken in sorted(seconds.items()))
        times.append(f"{way}, they take {listed}")
    ways = found.ways
    unpacked = "never" if ways.unpacked_from is None else f"from {ways.unpacked_from} rows on"
    rounded = "never" if ways.rounded_from is None else f"from {ways.rounded_from} rows on"
    chosen = f"Matrices are unpacked {unpacked}, and inputs rounded to FP8 {rounded}."
    if ways.tiles:
        chosen += f" The kernel takes {'; '.join(map(str, ways.tiles))}."
    if ways.expert_tiles:
        chosen += f" Experts take {'; '.join(map(str, ways.expert_tiles))}."
    chosen += f" Choosing took {found.trial_seconds:.1f} s, with the kernels that were compiled for it."
    return "products", f"Products of {found.about}: {'; '.join(times)}. {chosen} --recheck measures again."
