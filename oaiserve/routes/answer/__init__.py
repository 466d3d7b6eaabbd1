"""How an answer is written: shapes, server-sent events, log-probabilities, continued streams."""
