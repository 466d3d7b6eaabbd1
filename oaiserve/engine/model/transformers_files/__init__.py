"""This package reads checkpoints: the formats of weights, and the names that tensors have in them."""
