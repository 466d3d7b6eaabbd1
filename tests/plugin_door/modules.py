"""Modules and packages with plug-ins, which tests write."""

from pathlib import Path

from oaiserve.plugin_loading import OURS, load

GREETING = """
from oaiserve.plugin import Command, Plugin

def command(name: str = "you", /) -> int:
    '''Greet somebody.'''
    print(f"Hello, {name}")
    return 3

plugin = Plugin(name="greeting", commands={"greet": Command("Greet somebody.", __name__)})
"""


def write_module(folder: Path, name: str, source: str) -> None:
    (folder / f"{name}.py").write_text(source)


def install(folder: Path, name: str, source: str) -> None:
    """Write a module, and metadata with an entry point for its `plugin`, as pip would."""
    write_module(folder, name, source)
    metadata = folder / f"{name}-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (metadata / "entry_points.txt").write_text(f"[oaiserve.plugins]\n{name} = {name}:plugin\n")


def names_of_others(*modules: str) -> dict[str, str]:
    """Return the sources of the plug-ins that aren't oaiserve's, by name."""
    return {each.plugin.name: each.source for each in load(modules) if each.plugin.name not in OURS}
