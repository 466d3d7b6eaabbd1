"""`SamplingRule`: an edit of logits by a plug-in, for all sequences of a server. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

# Edits the logits of one draw in place, a float32 tensor [vocab], given the ids of the answer so far.
Rule = Callable[[Any, list[int]], None]


class SamplingRule(NamedTuple):
    plugin: str  # name of the plug-in, for the log
    edit: Rule
