"""The modules that files import."""

import ast
from pathlib import Path

from oaiserve.plugin import PUBLIC_MODULES


def private_imports(path: Path) -> list[str]:
    """Return the modules of oaiserve that a file imports, and that are not public."""
    public = tuple(f"{module}." for module in PUBLIC_MODULES)
    return [each for each in imports_of(path) if each.startswith("oaiserve") and not f"{each}.".startswith(public)]


def imports_of(path: Path, *, is_top: bool = False) -> list[str]:
    """Return the modules that a file imports, or with `is_top` those that its own import imports."""
    tree = ast.parse(path.read_text())
    modules: list[str] = []
    for node in tree.body if is_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
    return modules
