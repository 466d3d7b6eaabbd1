"""Computes what a step must do at least: bytes to read, operations to compute. Arithmetic only."""

from __future__ import annotations


def decode_bytes(weight_bytes: int, kv_token_bytes: int, sequences: int, context: float) -> float:
    """Return the bytes of every weight, and of the keys and values of every sequence's `context` tokens."""
    return weight_bytes + kv_token_bytes * sequences * context


def prefill_operations(linear_parameters: int, layers: int, query_width: int, start: int, end: int) -> float:
    """Return the operations for the tokens from `start` to before `end` of a prompt.

    Each token takes two for each parameter of a projection. Each pair of a query and a key that it sees takes four,
    times the width of all heads. The logits of the one row that samples are left out.
    """
    pairs = (start + 1 + end) * (end - start) / 2
    return 2.0 * linear_parameters * (end - start) + 4.0 * layers * query_width * pairs
