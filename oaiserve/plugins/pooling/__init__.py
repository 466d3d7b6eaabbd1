"""Embeddings and scores."""
