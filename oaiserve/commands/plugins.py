"""The command `oaiserve plugins`."""

from __future__ import annotations

import os

from oaiserve.commands.table import table
from oaiserve.plugin_loading import VARIABLE, load


def command(*, plugin: tuple[str, ...] = ()) -> int:
    """List the plug-ins that a server loads, where each comes from, and what it brings.

    Parameters
    ----------
    plugin
        A module or a file, as for `oaiserve serve`. Repeatable. Default: those in OAISERVE_PLUGIN.
    """
    loaded = load(plugin or os.environ.get(VARIABLE, "").split())
    if not loaded:
        print("There are no plug-ins. docs/plugins.md says how to write one.")
        return 0
    rows = [(each.plugin.name, each.source, ", ".join(each.plugin.parts)) for each in loaded]
    print(table(("NAME", "FROM", "BRINGS"), rows))
    return 0
