"""GGUF files: their metadata as settings, and their tensors by roles, without transformers and the package gguf."""
