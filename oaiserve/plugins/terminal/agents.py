"""The tools that `oaiserve launch` starts, and how each is directed to a server here. The user's own files stay
unchanged.

Values are templates: $url is the server's address, $model the model's name, $context its context in tokens, $output the
largest number of tokens in an answer, $key the key. This file knows nothing of how a tool is run.

Most tools send prompts of 6,000 to 20,000 tokens. A CPU takes minutes for that, and small models lose track. With its
`lean` settings a tool has a shell, a few tools for files, and short instructions with an example of a call. Without an
example, small models rarely write a call that works.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from oaiserve.plugins.terminal.rights import Rights


@dataclass(frozen=True, slots=True)
class Lean:
    """Additional settings of a tool that make its prompts short. `environment` replaces variables."""

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Agent:
    title: str
    program: str
    package: str
    environment: Mapping[str, str]
    arguments: tuple[str, ...] = ()  # before the user's own
    # Contents of files, by the variable that has the file's path.
    files: Mapping[str, str] = field(default_factory=dict)
    lean: Lean | None = None  # None: its prompts are already short
    rights: Rights | None = None  # None: codex_exec.py chooses them
    is_javascript: bool = True

    @property
    def install(self) -> str:
        return f"{'npm install -g' if self.is_javascript else 'uv tool install'} {self.package}"

    def made_lean(self) -> Agent:
        lean = self.lean or Lean()
        return replace(
            self,
            environment={**self.environment, **lean.environment},
            arguments=(*self.arguments, *lean.arguments),
            files={**self.files, **lean.files},
        )


def _instructions(shell: str, parameter: str, more: str = "") -> str:
    """Return the system prompt of a tool in which `shell` runs the command in `parameter`.

    Small models copy the example. So it has a result that fails and its repair, and no answer that ends the work.
    """

    def call(command: str) -> str:
        return f"<tool_call>\n{json.dumps({'name': shell, 'arguments': {parameter: command}})}\n</tool_call>"

    write_and_run = call("cat > five.py <<'END'\nprint(5)\nEND\npython five.py")
    return f"""\
You are a coding agent in the folder of the user's project. You work with shell commands: call {shell}, once per \
answer, and wait for its result.{more}

Example: the user asks for a file five.py that prints 5. You answer
{write_and_run}
Its result is: python: command not found. So five.py has not run yet, and you answer
{call("python3 five.py")}
Its result is: 5. So you call no more.

At the end, tell the user in your own words what the results of your calls show, and what failed or was not run."""


# Most tools give up after 300 s without an event or the headers of the answer. Long prompts take longer.
_PATIENCE_MS = 3_600_000
_PROVIDER = (
    'name="oaiserve", base_url="$url/v1", env_key="OPENAI_API_KEY", wire_api="responses", '
    f"stream_idle_timeout_ms={_PATIENCE_MS}"
)
_OPENAI = {"OPENAI_BASE_URL": "$url/v1", "OPENAI_API_KEY": "$key"}
_CODEX_CATALOG = {
    "slug": "$model",
    "display_name": "$model",
    "base_instructions": _instructions("exec_command", "cmd", " Don't call write_stdin."),
    "supported_reasoning_levels": [],
    "shell_type": "unified_exec",
    "visibility": "list",
    "supported_in_api": True,
    "priority": 0,
    "include_skills_usage_instructions": False,
    "include_plugin_usage_instructions": False,
    "include_apps_usage_instructions": False,
    "support_verbosity": False,
    "truncation_policy": {"mode": "tokens", "limit": 2000},
    "supports_parallel_tool_calls": False,
    "context_window": "$context",
    "experimental_supported_tools": [],
    "input_modalities": ["text"],
    "multi_agent_version": "disabled",
}
_CODEX_LEAN = (
    'model_catalog_json="$CODEX_MODEL_CATALOG"',
    'web_search="disabled"',
    *(f"features.{name}=false" for name in ("apps", "goals", "plugins", "view_image")),
    "include_collaboration_mode_instructions=false",
    "include_permissions_instructions=false",
    "skills.include_instructions=false",
    "tools.experimental_request_user_input={enabled=false}",
    "tools.update_plan={enabled=false}",
)
_OPENCODE = """\
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
_OPENCODE_AGENTS = {
    "title": {"disable": True},
    "build": {
        "prompt": _instructions("bash", "command", " Write files to this folder, not to /tmp."),
        "temperature": 0.2,
        "tools": dict.fromkeys(("glob", "grep", "skill", "task", "todowrite", "webfetch"), False),
    },
}
_OPENCODE_LEAN = f'{{\n  "agent": {json.dumps(_OPENCODE_AGENTS)},{_OPENCODE[1:]}'.replace(
    '{"limit"',
    '{"temperature": true, "limit"',  # This says that the model accepts a temperature.
)

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
        lean=Lean(
            arguments=tuple(word for setting in _CODEX_LEAN for word in ("-c", setting)),
            files={
                "CODEX_MODEL_CATALOG": json.dumps({"models": [_CODEX_CATALOG]}, indent=2).replace(
                    '"$context"', "$context"
                )
            },
        ),
    ),
    "claude": Agent(
        "Claude Code",
        "claude",
        "@anthropic-ai/claude-code",
        {
            "ANTHROPIC_BASE_URL": "$url",
            "ANTHROPIC_AUTH_TOKEN": "$key",
            "ANTHROPIC_API_KEY": "",  # Otherwise it would ask whether to use one.
            "ANTHROPIC_MODEL": "$model",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "$model",  # used for titles and similar tasks
            "CLAUDE_CODE_SUBAGENT_MODEL": "$model",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "$context",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "$output",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # The header changes per request and begins the prompt.
            "API_TIMEOUT_MS": f"{_PATIENCE_MS}",
            "API_FORCE_IDLE_TIMEOUT": "0",
            "CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS": f"{_PATIENCE_MS}",
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": f"{_PATIENCE_MS}",
        },
        lean=Lean(
            {f"CLAUDE_CODE_DISABLE_{name}": "1" for name in ("ATTACHMENTS", "BACKGROUND_TASKS", "GIT_INSTRUCTIONS")},
            arguments=(
                *("--system-prompt", _instructions("Bash", "command")),
                *("--tools", "Bash,Edit,Read,Write", "--disable-slash-commands"),
            ),
        ),
        rights=Rights(
            ("-p", "--print"),
            "With -p, nobody answers Claude Code's questions, and it writes and runs only what its settings allow.",
            "To let it write files and run commands",
            ("--allowedTools", "Bash,Write,Edit,Read"),
            decided=("--allowed-tools", "--permission-mode", "--dangerously-skip-permissions", "--settings"),
        ),
    ),
    "opencode": Agent(
        "opencode",
        "opencode",
        "opencode-ai",
        {"OPENCODE_CONFIG_CONTENT": _OPENCODE},
        lean=Lean({"OPENCODE_CONFIG_CONTENT": _OPENCODE_LEAN}),
        rights=Rights(
            ("run",),
            "opencode writes files and runs commands without asking.",
            "To forbid it",
            environment={"OPENCODE_PERMISSION": '{"edit": "ask", "bash": "ask"}'},
            decided=("--auto",),
        ),
    ),
    "qwen-code": Agent(
        "qwen-code",
        "qwen",
        "@qwen-code/qwen-code",
        _OPENAI
        | {
            "OPENAI_MODEL": "$model",
            "QWEN_CODE_API_TIMEOUT_MS": f"{_PATIENCE_MS}",
            "QWEN_CODE_MAX_OUTPUT_TOKENS": "$output",
        },
        ("--auth-type", "openai"),
        lean=Lean(
            arguments=(
                *("--bare", "--exclude-tools", "get_goal,notebook_edit,update_goal"),
                *("--system-prompt", _instructions("run_shell_command", "command")),
            )
        ),
        rights=Rights(
            ("-p", "--prompt"),
            "Without a user at the terminal, qwen-code may not write files or run commands.",
            "To let it do both without asking",
            ("-y",),
            decided=("--yolo", "--approval-mode", "--allowed-tools"),
            takes_bare_task=True,
        ),
    ),
    "cline": Agent(
        "cline",
        "cline",
        "cline",
        {"CLINE_SESSION_BACKEND_MODE": "local"},  # Otherwise a daemon stays, whose settings are in a file that is gone.
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
        rights=Rights(
            ("--json",),
            "cline writes files and runs commands without asking.",
            "To forbid it",
            ("--auto-approve", "false"),
            decided=("-i", "--tui"),
            takes_bare_task=True,
        ),
    ),
    "aider": Agent(
        "aider",
        "aider",
        "aider-chat",
        {"OPENAI_API_BASE": "$url/v1", "OPENAI_API_KEY": "$key"},
        ("--model", "openai/$model", "--no-show-model-warnings", "--timeout", f"{_PATIENCE_MS // 1000}"),
        is_javascript=False,
        rights=Rights(
            ("-m", "--msg", "--message", "-f", "--message-file"),
            "aider writes and commits files. Where it can't ask, it runs the commands that the model proposes.",
            "To forbid commands",
            ("--no-suggest-shell-commands",),
            decided=("--yes-always", "--suggest-shell-commands"),
        ),
    ),
}
