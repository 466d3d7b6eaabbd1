"""This package draws token ids from logits, on any device."""
