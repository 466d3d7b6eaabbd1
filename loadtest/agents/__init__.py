"""Runs of agents against any OpenAI-compatible server: how much of each prompt it reads again, and had to."""
