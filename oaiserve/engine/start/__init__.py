"""Everything that starts a model: the ways to start one, their checks, and what they record."""
