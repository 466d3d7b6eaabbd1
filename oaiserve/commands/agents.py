"""The tools that `oaiserve launch` starts, and by what each asks a server here. The user's own files stay as they are.

Values are templates: $url is the server's address, $model the model's name, $context its context in tokens, $output the
largest number of tokens in an answer, $key the key. It knows nothing of how a tool is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Agent:
    """A tool."""

    title: str
    program: str
    package: str
    environment: Mapping[str, str]
    arguments: tuple[str, ...] = ()  # before the user's own
    files: Mapping[str, str] = field(default_factory=dict)  # their contents, by the variable that has the file's path
    is_javascript: bool = True

    @property
    def install(self) -> str:
        """Return the command that installs it."""
        return f"{'npm install -g' if self.is_javascript else 'uv tool install'} {self.package}"


# Most tools give up after 300 s without an event or the headers of the answer. Long prompts take longer.
_PATIENCE_MS = 3_600_000
_PROVIDER = (
    'name="oaiserve", base_url="$url/v1", env_key="OPENAI_API_KEY", wire_api="responses", '
    f"stream_idle_timeout_ms={_PATIENCE_MS}"
)
_OPENAI = {"OPENAI_BASE_URL": "$url/v1", "OPENAI_API_KEY": "$key"}

AGENTS = {
    "codex": Agent(
        "Codex",
        "codex",
        "@openai/codex",
        {"OPENAI_API_KEY": "$key"},
        (
            *("-c", "model=$model", "-c", "model_context_window=$context"),
            *("-c", "model_provider=oaiserve", "-c", f"model_providers.oaiserve={{{_PROVIDER}}}"),
        ),
    ),
    "claude": Agent(
        "Claude Code",
        "claude",
        "@anthropic-ai/claude-code",
        {
            "ANTHROPIC_BASE_URL": "$url",
            "ANTHROPIC_AUTH_TOKEN": "$key",
            "ANTHROPIC_API_KEY": "",  # it would ask whether to use one
            "ANTHROPIC_MODEL": "$model",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "$model",  # for titles and the like
            "CLAUDE_CODE_SUBAGENT_MODEL": "$model",
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "$context",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "$output",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it changes with each request, at the beginning of the prompt
            "API_TIMEOUT_MS": f"{_PATIENCE_MS}",
            "API_FORCE_IDLE_TIMEOUT": "0",
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": f"{_PATIENCE_MS}",
        },
    ),
    "opencode": Agent(
        "opencode",
        "opencode",
        "opencode-ai",
        {
            "OPENCODE_CONFIG_CONTENT": """\
{
  "model": "oaiserve/$model",
  "provider": {
    "oaiserve": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {
        "baseURL": "$url/v1", "apiKey": "$key", "timeout": false, "headerTimeout": false, "chunkTimeout": false
      },
      "models": {"$model": {"limit": {"context": $context, "output": $output}}}
    }
  }
}"""
        },
    ),
    "qwen-code": Agent(
        "qwen-code",
        "qwen",
        "@qwen-code/qwen-code",
        _OPENAI | {"OPENAI_MODEL": "$model"},
        ("--auth-type", "openai"),
    ),
    "cline": Agent(
        "cline",
        "cline",
        "cline",
        {"CLINE_SESSION_BACKEND_MODE": "local"},  # else a daemon stays, whose settings are in a file that is gone
        ("-P", "openai-compatible"),
        files={
            "CLINE_PROVIDER_SETTINGS_PATH": """\
{
  "version": 1,
  "providers": {
    "openai-compatible": {
      "settings": {"provider": "openai-compatible", "apiKey": "$key", "model": "$model", "baseUrl": "$url/v1"},
      "updatedAt": "2026-01-01T00:00:00.000Z",
      "tokenSource": "manual"
    }
  }
}"""
        },
    ),
    "aider": Agent(
        "aider",
        "aider",
        "aider-chat",
        {"OPENAI_API_BASE": "$url/v1", "OPENAI_API_KEY": "$key"},
        ("--model", "openai/$model", "--no-show-model-warnings", "--timeout", f"{_PATIENCE_MS // 1000}"),
        is_javascript=False,
    ),
}
