"""Executors compute steps. Each does so in its own way, for any described decoder or for any model of transformers."""
