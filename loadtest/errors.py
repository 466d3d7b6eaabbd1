"""The error that a user can fix. The command line prints it as one sentence and exits with code 2. Stdlib only."""

from __future__ import annotations


class UsageError(ValueError):
    """An option or a file is wrong. The message names it, quotes its value, and says what is allowed."""
