"""Reads settings and tensors from GGUF files, without transformers and the package gguf."""
