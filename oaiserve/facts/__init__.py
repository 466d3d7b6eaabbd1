"""The record of a request, the engine's numbers, and the definition of a metric: plain data that all packages read."""
