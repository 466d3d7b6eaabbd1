"""Simulates agents that use an OpenAI-compatible server, and measures how many prompt tokens it recomputes
needlessly."""
