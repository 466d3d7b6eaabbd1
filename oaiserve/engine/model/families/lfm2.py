"""LFM2 and LFM3: short convolutions in place of attention in most layers."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family

FAMILIES = (
    Family(
        type="lfm2",
        changes=(),
    ),
    Family(type="lfm2_moe", changes=()),
)
