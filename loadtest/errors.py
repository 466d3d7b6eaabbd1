"""What the user can put right: printed as one sentence, exit code 2. Stdlib only."""

from __future__ import annotations


class UsageError(ValueError):
    """Says what was wrong, which value, and what is allowed."""
