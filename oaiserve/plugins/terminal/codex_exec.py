"""Changes of `launch` for `codex exec`, which does a task without a user at the terminal.

By default it may only read, and small models then claim to have written the file that was asked for.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Sequence
from pathlib import Path

MAY_WRITE = ("-c", 'sandbox_mode="workspace-write"')
NOTE = "Codex may write to this folder. With `exec -s read-only` it may not."
# The user's own flags override MAY_WRITE. A profile may have a sandbox, too.
_FLAGS = (
    *("-s", "--sandbox", "--dangerously-bypass-approvals-and-sandbox", "--yolo", "--full-auto"),
    *("-p", "--profile"),
)
_SETTINGS = ("sandbox_mode", "default_permissions")


def is_wanted(arguments: Sequence[str]) -> bool:
    return "exec" in arguments or "e" in arguments


def has_sandbox(arguments: Sequence[str]) -> bool:
    """Return whether the arguments or the user's settings of Codex say what it may write."""
    if any(argument.startswith((*_FLAGS, *_SETTINGS)) for argument in arguments):
        return True
    folder = Path(os.environ.get("CODEX_HOME") or "~/.codex").expanduser()
    try:
        settings = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # Codex reports a file that cannot be read.
        return False
    return any(name in settings for name in _SETTINGS)


def is_piped() -> bool:
    """Return whether a shell passes a text or a file on standard input. Other programs often leave a socket open there,
    which Codex would read forever."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:  # It is closed.
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
