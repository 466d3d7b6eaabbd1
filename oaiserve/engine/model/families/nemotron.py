"""Nemotron, and Nemotron-H: a state, attention, experts or an MLP in each layer."""

from __future__ import annotations

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import NORMS_ADD_ONE

FAMILIES = (Family(type="nemotron", changes=(NORMS_ADD_ONE,)),)
