"""Draws token ids from logits, on any device."""
