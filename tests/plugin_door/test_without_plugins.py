"""oaiserve goes on without the folder of any of its plug-ins, and so do its tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oaiserve.plugin_loading import OURS, OWN_SOURCE, load
from tests.missing_plugins import TOGETHER, tree_without
from tests.plugin_door.imports import imports_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("parts", [("plugins",), *(("plugins", name) for name in OURS)], ids="/".join)
def test_oaiserve_goes_on_without_the_folder_of_a_plugin(parts: tuple[str, ...], tmp_path: Path) -> None:
    code = """
import logging, sys
from starlette.testclient import TestClient
from oaiserve import app, cli, plugin_loading, run
from oaiserve.config import Config
from tests.routes.doubles import FakeEngine, FakeTelemetry
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
assert cli.main(["--help"]) == 0
assert cli.main(["plugins"]) == 0
server = app.create_app(Config("demo"), FakeEngine(), FakeTelemetry())
with TestClient(server, base_url="http://127.0.0.1") as client:
    answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
assert answer.json()["choices"][0]["message"]["content"] == "Hello world", answer.text
"""
    path = os.pathsep.join([str(tree_without(tmp_path, *parts)), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    missing = parts[1:] or OURS
    for name in missing:
        assert f"Plug-in '{name}' of oaiserve is left out, because its folder is missing" in done.stdout
    assert "Serve one model, or several." in done.stdout


def test_tests_of_other_subjects_import_no_plugin() -> None:
    """Otherwise they could not be collected after the plug-in was deleted with its tests."""
    imported = {file: imports_of(file, is_top=True) for file in (ROOT / "tests").rglob("*.py")}
    for file in imported:
        allowed = plugins_beside(file)
        reached = [file]
        for each in reached:  # It grows by the modules of tests that these import.
            for module in imported[each]:
                top, room, *rest = [*module.split("."), "", ""]
                is_of_plugin = top in ("oaiserve", "tests") and room == "plugins" and rest[0] in OURS
                assert not is_of_plugin or rest[0] in allowed, f"{file} needs {each}, which imports {module}"
                path = ROOT / f"{module.replace('.', '/')}.py"
                if path in imported and path not in reached:
                    reached.append(path)


def plugins_beside(file: Path) -> set[str]:
    """Return the plug-ins that a file of tests goes with."""
    folders = file.relative_to(ROOT / "tests").parts
    together = [names for path, names in TOGETHER.items() if file.is_relative_to(ROOT / "tests" / path)]
    own = {folders[1]} if folders[0] == "plugins" else set()
    return own.union(*together)


def test_oaiserve_has_its_plugins() -> None:
    folders = {path.parent.name for path in (ROOT / "oaiserve/plugins").glob("*/__init__.py")}
    assert folders <= {*OURS, "shared"}
    loaded = [each.plugin.name for each in load() if each.source == OWN_SOURCE]
    assert loaded == [name for name in OURS if name in folders]
