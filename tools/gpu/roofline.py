"""What a step must do at least: bytes that it has to read, operations that it has to compute. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Sequence


def decode_bytes(weight_bytes: int, kv_token_bytes: int, sequences: int, context: float) -> float:
    """Every weight once, and the keys and values of every sequence's `context` tokens."""
    return weight_bytes + kv_token_bytes * sequences * context


def prefill_operations(linear_parameters: int, layers: int, query_width: int, start: int, end: int) -> float:
    """Of tokens `start` to before `end` of a prompt: two for each parameter of a projection and token, and four for
    each pair of a query and a key that it sees, times the width of all heads. The logits of one row are left out."""
    pairs = (start + 1 + end) * (end - start) / 2
    return 2.0 * linear_parameters * (end - start) + 4.0 * layers * query_width * pairs


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that `share` of all do not exceed; 0 < share <= 1."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]
