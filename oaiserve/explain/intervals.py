"""`t_quantile` is what confidence intervals of comparisons are made with, in plain Python."""

from __future__ import annotations

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom; beyond 30, the normal one is close enough.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)  # fmt: skip


def t_quantile(degrees: float) -> float:
    """Return the two-sided 95 % quantile of Student's t."""
    if degrees < len(_T) + 1:
        return _T[max(1, int(degrees)) - 1]
    return 1.96
