"""Everything that starts a model: the ways to do it, their checks, and what they record."""
