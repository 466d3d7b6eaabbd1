"""Executors compute steps, each in its own way, for any described decoder or for any model of transformers."""
