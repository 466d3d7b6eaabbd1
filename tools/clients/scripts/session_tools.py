"""The tools of the frameworks' agents: a shell and an editor, which fail as such tools do."""

import subprocess
import sys
from pathlib import Path

BASE_URL, TASK = sys.argv[1:]


def run_command(command: str) -> str:
    """Run a command of the shell."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    return f"exit code {done.returncode}\n{done.stdout}{done.stderr}"


def edit_file(path: str, old: str, new: str) -> str:
    """Replace a text in a file."""
    text = Path(path).read_text()
    if old not in text:
        return f"Error: '{old}' is not in {path}"
    Path(path).write_text(text.replace(old, new))
    return "The file has been edited."
