"""The modules that files import."""

import ast
from pathlib import Path

PUBLIC = ("oaiserve.plugin", "oaiserve.plugin.dialects", "oaiserve.plugin.keys", "oaiserve.plugin.models")


def private_imports(path: Path) -> list[str]:
    """Return the modules of oaiserve that a file imports from, and that promise nothing."""
    imported = {node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
    return sorted(module for module in imported if module.startswith("oaiserve") and module not in PUBLIC)


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
