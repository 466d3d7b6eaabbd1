"""Executors: each computes the steps of any described decoder in its own way, or of any model in transformers' code."""
