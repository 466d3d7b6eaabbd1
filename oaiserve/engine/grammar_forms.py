"""The forms in which clients write grammars, each turned into the one form that llguidance reads.

It must not know llguidance's code, tokens or requests.
"""

from __future__ import annotations

import json

from oaiserve.engine.request import GrammarKind


def as_llguidance(kind: GrammarKind, text: str) -> str:
    """Return the grammar as llguidance reads it. Raises Refused."""
    return json.dumps({"grammars": [{"json_schema": json.loads(text or '{"type":"object"}')}]})
