"""The limits of a step and of the running sequences."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    max_running: int
    max_step_tokens: int
    prefill_max_requests: int | None = None  # sequences that may prefill in one step
    lookahead: int = 8  # waiting sequences to try after one that does not fit

    def __post_init__(self) -> None:
        if self.max_step_tokens < self.max_running:
            # Every running sequence that decodes takes one token of the budget in every step.
            raise ValueError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_running ({self.max_running})"
            )
