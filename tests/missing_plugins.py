"""Skips the tests that need a plug-in of oaiserve whose folder is missing: a plug-in can be deleted with its tests."""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from oaiserve.errors import OLLAMA_PATHS

FOLDER = Path(__file__).parents[1] / "oaiserve" / "plugins"
PATHS = {  # paths of the routes of each plug-in
    "batches": ("/v1/files", "/v1/batches", "/v1/messages/batches"),
    "inspector": ("/debug/requests/{request_id}/tokens",),
    "keys": ("/admin/keys",),
    "messages": ("/v1/messages",),
    "ollama": tuple(OLLAMA_PATHS),
    "pages": ("/dashboard", "/requests", "/clients", "/runs", "/docs", "/favicon.ico"),
    "pooling": (
        "/v1/embeddings",
        "/v2/embed",
        "/embed",
        "/embed_sparse",
        "/embed_all",
        "/v1/score",
        "/score",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
    ),
    "responses": ("/v1/responses", "/v1/conversations"),
    "runs": ("/debug/runs", "/runs"),
    "speech": ("/v1/audio/transcriptions", "/v1/audio/translations"),
}
COMMANDS = {"batches": ("batch",), "gateway": ("route",), "keys": ("keys",), "terminal": ("chat", "launch")}

# Tests of several plug-ins together, by their paths from here, with the plug-ins that they import.
TOGETHER = {
    "world": ("gateway", "responses"),
    "commands/test_exposure.py": ("gateway",),
    "deploy/test_keda.py": ("gateway",),
    "e2e/test_front_processes.py": ("batches", "keys", "messages", "responses"),
    "e2e/test_prometheus.py": ("gateway", "media", "responses"),
    "fronts/test_messages.py": ("keys",),
    "plugins/batches/test_message_batches.py": ("messages",),
    "tools/test_clients.py": ("terminal",),
    "tools/test_described_types.py": ("cuda",),
    "tools/test_gpu_answers.py": ("cuda",),
    "tools/test_gpu_dry_run.py": ("cuda",),
    "tools/test_gpu_figures.py": ("cuda",),
    "tools/test_gpu_measured.py": ("cuda",),
    "tools/test_gpu_models.py": ("cuda",),
    "tools/test_gpu_run.py": ("cuda",),
    "tools/test_gpu_sections.py": ("cuda",),
    "tools/test_gpu_side_by_side.py": ("cuda",),
    "plugins/gateway/engines/test_plugins.py": ("batches", "keys"),
    "plugins/gateway/test_background.py": ("responses",),
    "plugins/gateway/test_runs.py": ("runs",),
    "plugins/gateway/test_sockets.py": ("responses",),
    "plugins/ollama/test_gateway.py": ("gateway",),
    "real/test_histories.py": ("dialects",),
    "real/test_speech.py": ("speech",),
    "real/test_templates.py": ("dialects",),
    "plugins/responses/test_ways_in.py": ("batches", "gateway", "messages"),
}


def has_plugin(name: str) -> bool:
    return (FOLDER / name / "__init__.py").exists()


def plugins_of(path: object) -> frozenset[str]:
    """Return the plug-ins that the route of this path needs: those that have the longest part of it."""
    return _plugins_of(path) if isinstance(path, str) else frozenset()


@cache
def _plugins_of(path: str) -> frozenset[str]:
    found = [(len(start), name) for name, starts in PATHS.items() for start in starts if path.startswith(start)]
    return frozenset(name for length, name in found if length == max(found)[0])


def is_served(path: object) -> bool:
    """Return whether no missing plug-in has the route of this path."""
    return all(map(has_plugin, plugins_of(path)))


def plugins_of_commands(text: str) -> frozenset[str]:
    """Return the plug-ins whose commands a text for the shell has."""
    names = set(re.findall(r"\boaiserve (\w+)", text))
    return frozenset(plugin for plugin, commands in COMMANDS.items() if names.intersection(commands))


def has_command(name: str) -> bool:
    """Return whether no missing plug-in has this command."""
    return all(name not in commands or has_plugin(plugin) for plugin, commands in COMMANDS.items())


def reason_to_skip(names: Iterable[str]) -> str | None:
    """Return why tests of these plug-ins are skipped, or None if all are there."""
    missing = sorted(f"oaiserve/plugins/{name}" for name in names if not has_plugin(name))
    return f"restore {', '.join(missing)} to run these tests" if missing else None


def tree_without(folder: Path, *parts: str) -> Path:
    """Return a copy of oaiserve, of links, in which a folder is missing."""
    package = folder / "oaiserve"
    source = FOLDER.parent
    for part in parts:
        package.mkdir()
        for entry in source.iterdir():
            if entry.name != part:
                (package / entry.name).symlink_to(entry)
        package /= part
        source /= part
    return folder


def skip_without_plugins(items: list[pytest.Item]) -> None:
    """Skip the tests with the mark `plugin` of a missing one, and cases that have the path of one as a parameter."""
    for item in items:
        needed = {name for mark in item.iter_markers("plugin") for name in mark.args}
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            needed = needed.union(*map(plugins_of, item.callspec.params.values()))
        if reason := reason_to_skip(needed):
            item.add_marker(pytest.mark.skip(reason=reason))


def ignored_without_plugins() -> list[str]:
    """Return the paths of tests that import a missing plug-in."""
    return [path for path, names in TOGETHER.items() if not all(map(has_plugin, names))]
