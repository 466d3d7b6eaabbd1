"""All attacks, by family. A family is a file."""

from __future__ import annotations

from tools.attack.attack import Attack
from tools.attack.families import (
    browsers,
    connections,
    crowds,
    extremes,
    forms,
    framing,
    grammars,
    keys,
    prompts,
    readers,
    signals,
)

FAMILIES = (prompts, framing, forms, grammars, extremes, readers, crowds, keys, connections, browsers, signals)
ATTACKS: tuple[Attack, ...] = tuple(attack for family in FAMILIES for attack in family.ATTACKS)
