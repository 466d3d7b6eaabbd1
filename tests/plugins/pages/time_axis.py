"""The time axis of requests as the pages are to draw it."""

from itertools import pairwise


def reference_axis(spans: list[tuple[int, int]]) -> dict[int, float]:
    """Return the position of each start and end on the axis, from 0 to 1. The axis is linear in time, but an idle time
    takes at most a twentieth of the sum of all busy times."""
    moments = sorted({moment for span in spans for moment in span})
    pairs = list(pairwise(moments))
    is_busy = [any(start <= a and b <= end for start, end in spans) for a, b in pairs]
    busy = sum(b - a for (a, b), busy in zip(pairs, is_busy, strict=True) if busy)
    at = [0.0]
    for (a, b), busy_now in zip(pairs, is_busy, strict=True):
        at.append(at[-1] + (b - a if busy_now else min(b - a, busy / 20)))
    return {moment: place / at[-1] for moment, place in zip(moments, at, strict=True)}
