"""Builds the description of a decoder from a model's files."""
