"""The limits that good requests keep, as in ttft:300ms,itl:50ms, for the targets of the server and of the load test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

METRICS = ("ttft", "tpot", "itl", "latency")
GAPS_SHARE = 0.95  # share of the gaps between a request's tokens that must keep the limit `itl`
_UNITS = {"ms": 1e-3, "us": 1e-6, "s": 1.0}

Slos = Mapping[str, float]  # seconds by metric


def parse(text: str) -> dict[str, float]:
    """Return the limits in seconds by metric. Raises ValueError."""
    slos = {}
    for part in filter(None, text.split(",")):
        name, _, limit = part.partition(":")
        unit = next((unit for unit in _UNITS if limit.endswith(unit)), "")
        try:
            slos[name] = float(limit.removesuffix(unit)) * _UNITS[unit]
        except (ValueError, KeyError):
            slos[name] = 0.0
        if name not in METRICS or slos[name] <= 0:
            raise ValueError(
                f"--slo has '{part}', but must be METRIC:TIME with METRIC one of {', '.join(METRICS)} and TIME "
                "in s, ms or us, as in ttft:300ms,tpot:30ms."
            )
    return slos


def kept(slos: Slos, *, ttft: float, latency: float, tpot: float | None, gaps: Sequence[float]) -> bool:
    """Return whether a request with these times in seconds keeps the limits. One token keeps any `tpot` and `itl`."""
    times = {"ttft": ttft, "latency": latency, "tpot": tpot or 0.0}
    if any(time > slos.get(name, time) for name, time in times.items()):
        return False
    limit = slos.get("itl")
    return limit is None or sum(gap <= limit for gap in gaps) >= GAPS_SHARE * len(gaps)
