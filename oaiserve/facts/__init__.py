"""The record of a request, the engine's numbers, and what a metric is: plain data that all rooms read."""
