"""Mamba 2, without attention; and beside attention: Bamba and Falcon-H1."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import RATES

FAMILIES = (Family(type="mamba2", changes=(RATES,)),)
