"""Compares the answers of a model with those of its weights in float32: python -m tools.quality FILE"""
