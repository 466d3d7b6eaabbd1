"""The contract for plug-ins finds imports of modules that are not public."""

import pytest
from grimp import ImportGraph

from tools.plugin_imports import PluginImports


@pytest.mark.parametrize(
    ("imported", "is_kept"),
    [
        ("oaiserve.plugin", True),
        ("oaiserve.routes.dialects.family", True),
        ("oaiserve.plugins.mine.words", True),
        ("rich", True),
        ("oaiserve.plugins.yours", False),
        ("oaiserve", True),
        ("oaiserve.app", False),
        ("oaiserve.engine.engine", False),
    ],
)
def test_a_plugin_imports_public_modules_and_its_own(imported: str, is_kept: bool) -> None:
    graph = ImportGraph()
    graph.add_module("oaiserve.plugins.mine.routes")
    graph.add_module(imported)
    graph.add_import(importer="oaiserve.plugins.mine.routes", imported=imported)
    check = PluginImports("", {}, {}).check(graph, verbose=False)
    assert check.kept == is_kept
    assert check.metadata["wrong"] == ([] if is_kept else [("oaiserve.plugins.mine.routes", imported)])
