"""Open requests from submit to their ends: choices, output, streams, and time limits."""
