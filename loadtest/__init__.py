"""A load test that measures itself too: any OpenAI-compatible server over HTTP, or oaiserve's engine in process."""
