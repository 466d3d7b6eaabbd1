"""The command `oaiserve list`."""

from __future__ import annotations

from oaiserve.commands.models import stored_models
from oaiserve.commands.table import size, table


def command() -> int:
    """List the models on this disk.

    These are the demo, those in the hub's cache, and those elsewhere that were served before. REMEMBERED is the day of
    the first start of the model as it is now: later ones know what that found out, and are faster.
    """
    models = stored_models()
    if not models:
        print("There are no models on this disk yet. To download a small one: oaiserve pull demo")
        return 0
    rows = [(model.name, size(model.num_bytes), *model.described(), model.remembered or "no") for model in models]
    print(table(("NAME", "SIZE", "FORMAT", "FAMILY", "REMEMBERED"), rows))
    return 0
