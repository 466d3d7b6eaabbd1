"""Runs a description on a GPU with few launches per layer, without transformers."""
