"""Paths of other servers' APIs, each with ours for the same task, for the answer to a client of such a server."""

from __future__ import annotations

import re
from collections.abc import Collection

_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
_MODELS = "/v1/models"
_EMBEDDINGS = "/v1/embeddings"
_AT_THE_END = "(/chat/completions|/completions|/embeddings|/models|/messages|/responses)"
# A row: whose path it is, its pattern, and our path
_ROWS = (
    ("Ollama", r"/api/chat", _CHAT),
    ("Ollama", r"/api/generate", _COMPLETIONS),
    ("Ollama", r"/api/(tags|ps|show|pull)", _MODELS),
    ("Ollama", r"/api/embed(dings)?", _EMBEDDINGS),
    ("Ollama", r"/api/version", "/version"),
    ("llama.cpp", r"/(completion|infill)", _COMPLETIONS),
    ("llama.cpp", r"/(props|slots)", _MODELS),
    ("llama.cpp", r"/embedding", _EMBEDDINGS),
    ("Text Generation Inference", r"/generate(_stream)?", _COMPLETIONS),
    ("Text Generation Inference", r"/info", _MODELS),
    ("KoboldCpp", r"/api/v1/generate", _COMPLETIONS),
    ("Gemini", r"/v1(beta|alpha)?/models/[^/]+:(streamG|g)enerateContent", _CHAT),
    ("Anthropic's first API", r"/v1/complete", "/v1/messages"),
    ("Azure", r"/openai/deployments/[^/]+(/chat/completions|/completions|/embeddings)", r"/v1\1"),
    ("", r"/(healthz|livez|ping)", "/health"),
    ("", r"/readyz", "/ready"),
    # A base URL with another prefix than /v1, as those of LM Studio, OpenRouter, Groq and Open WebUI
    ("", r"(?!/chat/)(?:/[\w.-]+){1,3}?" + _AT_THE_END, r"/v1\1"),
)


def ours_for(path: str, served: Collection[str]) -> tuple[str, str] | None:
    """Return the owner of a path ("" if it has none) and the served path for the same task, or None if it is
    unknown."""
    for whose, pattern, ours in _ROWS:
        match = re.fullmatch(pattern, path)
        if match is not None and (here := match.expand(ours)) in served:
            return whose, here
    return None
