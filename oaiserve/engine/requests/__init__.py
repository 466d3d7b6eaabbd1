"""Open requests from submission to end: choices, output, streams, and time limits."""
