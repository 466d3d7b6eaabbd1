"""Skips the tests that need a plug-in of oaiserve whose folder is missing: a plug-in can be deleted with its tests."""

from collections.abc import Iterable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "oaiserve" / "plugins"
PATHS = {  # of the routes of each plug-in
    "batches": ("/v1/files", "/v1/batches"),
    "keys": ("/admin/keys",),
    "messages": ("/v1/messages",),
    "pages": ("/dashboard", "/requests", "/docs", "/favicon.ico"),
    "pooling": ("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"),
    "responses": ("/v1/responses", "/v1/conversations"),
}
COMMANDS = {"batches": ("batch",), "gateway": ("route",), "keys": ("keys",), "terminal": ("chat", "launch")}

# Tests of several plug-ins together, by their paths from here, with the plug-ins that they import.
TOGETHER = {"world": ("gateway", "responses"), "e2e/test_prometheus.py": ("gateway",)}


def has_plugin(name: str) -> bool:
    return (FOLDER / name / "__init__.py").exists()


def plugin_of(path: object) -> str | None:
    """Return the plug-in with the route of this path, or None."""
    for name, paths in PATHS.items():
        if isinstance(path, str) and path.startswith(paths):
            return name
    return None


def is_served(path: object) -> bool:
    """Return whether no missing plug-in has the route of this path."""
    plugin = plugin_of(path)
    return plugin is None or has_plugin(plugin)


def has_command(name: str) -> bool:
    """Return whether no missing plug-in has this command."""
    return all(name not in commands or has_plugin(plugin) for plugin, commands in COMMANDS.items())


def reason_to_skip(names: Iterable[str]) -> str | None:
    """Return why tests of these plug-ins are skipped, or None if all are there."""
    missing = sorted(f"oaiserve/plugins/{name}" for name in names if not has_plugin(name))
    return f"restore {', '.join(missing)} to run these tests" if missing else None


def skip_without_plugins(items: list[pytest.Item]) -> None:
    """Skip the tests with the mark `plugin` of a missing one, and cases that have the path of one as a parameter."""
    for item in items:
        needed = {name for mark in item.iter_markers("plugin") for name in mark.args}
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            needed |= {plugin_of(value) for value in item.callspec.params.values()} - {None}
        if reason := reason_to_skip(needed):
            item.add_marker(pytest.mark.skip(reason=reason))


def ignored_without_plugins() -> list[str]:
    """Return the paths of tests that import a missing plug-in."""
    return [path for path, names in TOGETHER.items() if not all(map(has_plugin, names))]
