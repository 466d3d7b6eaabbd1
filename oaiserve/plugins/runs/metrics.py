"""The histograms of ended runs."""

from __future__ import annotations

from oaiserve.facts.metric import histogram

TURNS = histogram(
    "oaiserve_run_turns",
    (1, 2, 5, 10, 20, 50, 100, 200, 500),
    "Turns of an agent's run, which has ended when it is silent for ten minutes.",
)
TOOL_SECONDS = histogram(
    "oaiserve_run_tool_seconds",
    (0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600),
    "Time of a run in which only its tools ran.",
)
REUSED_RATIO = histogram(
    "oaiserve_run_reused_ratio",
    (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1),
    "Share of a run's prompt tokens that came from the prefix cache.",
)
METRICS = (TURNS, TOOL_SECONDS, REUSED_RATIO)
