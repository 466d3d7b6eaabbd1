"""Finds the tensors of a model by their roles, independently of the names in its files."""
