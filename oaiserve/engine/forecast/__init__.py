"""Forecasts of requests: the lengths of their answers, when these begin and end, and how far to trust that."""
