"""Anthropic's Messages API: the route for answers, and the one that counts the tokens of a prompt."""
