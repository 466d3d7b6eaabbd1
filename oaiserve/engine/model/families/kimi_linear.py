"""Kimi Linear: delta nets with a decay of each row, beside latent attention."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family

FAMILIES = (Family(type="kimi_linear", mixer="KimiLinearDeltaAttention"),)
