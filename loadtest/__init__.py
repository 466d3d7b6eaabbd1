"""Load tests that also check their own client, for any OpenAI-compatible server."""
