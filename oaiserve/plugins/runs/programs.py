"""The program that sends a run's requests, by its user-agent header."""

from __future__ import annotations

import re

# The name by what the header begins with, in lower case. The first row that fits counts. aider, LangChain and other
# programs that use an SDK send the SDK's header.
_NAMES = {
    "codex": "Codex",
    "claude-cli": "Claude Code",
    "opencode": "opencode",
    "qwencode": "qwen-code",
    "cline": "cline",
    "agents/python": "openai-agents",
    "pydantic-ai": "pydantic-ai",
    "openai/": "OpenAI SDK",
    "asyncopenai/": "OpenAI SDK",
    "anthropic/": "Anthropic SDK",
    "asyncanthropic/": "Anthropic SDK",
    "ai-sdk": "Vercel's ai",
    "mozilla/": "browser",
}
_PRODUCT = re.compile(r"[A-Za-z0-9._-]{1,32}")


def program_of(user_agent: str) -> str:
    """Return the program's name, else the first word of the header, which names its product; "" if it has none."""
    lower = user_agent.lower()
    for start, name in _NAMES.items():
        if lower.startswith(start):
            return name
    product = _PRODUCT.match(user_agent)
    return "" if product is None else product[0]
