"""The command `oaiserve list`."""

from __future__ import annotations

from oaiserve.commands.models import stored_models
from oaiserve.commands.table import size, table


def command() -> int:
    """List the models on this disk.

    These are the demo, those in the hub's cache, and those elsewhere that were served before. CHECKED is the day on
    which a start has checked the model as it is now: the next one takes its word, and is faster.
    """
    models = stored_models()
    if not models:
        print("There is no model on this disk yet. oaiserve pull demo fetches a small one.")
        return 0
    rows = [(model.name, size(model.num_bytes), *model.described(), model.checked or "-") for model in models]
    print(table(("NAME", "SIZE", "FORMAT", "FAMILY", "CHECKED"), rows))
    return 0
