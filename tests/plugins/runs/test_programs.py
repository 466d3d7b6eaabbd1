"""The name of a run's program, by its user-agent header."""

import pytest

from oaiserve.plugins.runs.programs import program_of


@pytest.mark.parametrize(
    ("user_agent", "program"),
    [
        ("codex_exec/0.171.0 (Debian 12.0.0; x86_64) xterm (codex_exec; 0.171.0)", "Codex"),
        ("codex_cli_rs/0.171.0", "Codex"),
        ("claude-cli/2.1.332 (external, sdk-cli)", "Claude Code"),
        ("opencode/1.18.33 ai-sdk/provider-utils/4.0.23 runtime/bun/1.3.14", "opencode"),
        ("QwenCode/0.24.4 (linux; x64)", "qwen-code"),
        ("ai-sdk/openai-compatible/3.0.37 ai-sdk/provider-utils/5.0.30", "Vercel's ai"),
        ("Agents/Python 0.24.0", "openai-agents"),
        ("OpenAI/Python 2.20.0", "OpenAI SDK"),
        ("AsyncOpenAI/Python 2.20.0", "OpenAI SDK"),
        ("Mozilla/5.0 (X11; Linux x86_64)", "browser"),
        ("my-agent/1.0", "my-agent"),
        ("<b>bold</b>", ""),
        ("x" * 64, "x" * 32),
        ("", ""),
    ],
)
def test_program_is_a_row_of_the_table_or_the_headers_product(user_agent: str, program: str) -> None:
    assert program_of(user_agent) == program
