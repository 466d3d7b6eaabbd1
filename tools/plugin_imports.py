"""A contract for import-linter: plug-ins import the public modules of oaiserve, and themselves, and no others."""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output

from oaiserve.plugin import PUBLIC_MODULES

PLUGINS = "oaiserve.plugins"


class PluginImports(Contract):
    type_name = "plugin_imports"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        plugins = {module for module in graph.modules if module.startswith(f"{PLUGINS}.")}
        wrong = [
            (plugin, imported)
            for plugin in sorted(plugins)
            for imported in sorted(graph.find_modules_directly_imported_by(plugin))
            if imported.startswith("oaiserve") and not _may_import(plugin, imported)
        ]
        return ContractCheck(kept=not wrong, metadata={"wrong": wrong})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for plugin, imported in check.metadata["wrong"]:
            output.print_error(f"{plugin} imports {imported}, which is not in oaiserve.plugin.PUBLIC_MODULES.")


def _may_import(plugin: str, imported: str) -> bool:
    folder = ".".join(plugin.split(".")[:3])
    if imported == "oaiserve":  # which has the version, and nothing else
        return True
    return any(imported == public or imported.startswith(f"{public}.") for public in (*PUBLIC_MODULES, folder))
