"""Load tests that also check their own client, for any OpenAI-compatible server or for oaiserve's engine in process."""
