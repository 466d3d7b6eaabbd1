"""Writes the files in which a system tells about itself, such as those of /proc and /sys, below another root."""

from pathlib import Path


def write_files(root: Path, contents: dict[str, str]) -> None:
    """Write files with these contents, by their paths below `root`."""
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
