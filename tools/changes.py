"""The files that a change touches: those that differ from where the branch left main, and new ones."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAIN_BRANCHES = ("main", "origin/main")


def changed_files(root: Path = ROOT) -> set[str]:
    """Return the paths from the root, also of deleted files. Without a repository of git, return none."""
    if _git(root, "rev-parse", "--git-dir") is None:
        return set()
    bases = (_git(root, "merge-base", "HEAD", branch) for branch in MAIN_BRANCHES)
    base = next((output.strip() for output in bases if output), "HEAD")
    edited = _git(root, "diff", "--name-only", "--no-renames", "-z", "--relative", base)
    added = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return {path for output in (edited, added) if output for path in output.split("\0") if path}


def _git(root: Path, *arguments: str) -> str | None:
    """Return the output of git, or None where it fails or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
