"""Forecasts of requests: how long their answers are, when they begin and end, and how far to trust that."""
