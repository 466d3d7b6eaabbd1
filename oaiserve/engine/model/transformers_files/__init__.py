"""Reads checkpoints: the formats of weights, and the names of their tensors."""
