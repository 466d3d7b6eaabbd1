"""The command `oaiserve list`."""

from __future__ import annotations

from oaiserve.commands.models import stored_models
from oaiserve.commands.table import size, table


def command() -> int:
    """List the models on this disk.

    The list shows the demo, the models in the Hugging Face hub's cache, and files elsewhere that you have served.
    REMEMBERED is the day of the model's first start, which stored what makes later starts faster.
    """
    models = stored_models()
    if not models:
        print("There are no models on this disk yet. To download a small one: oaiserve pull demo")
        return 0
    rows = [(model.name, size(model.num_bytes), *model.described(), model.remembered or "no") for model in models]
    print(table(("NAME", "SIZE", "FORMAT", "FAMILY", "REMEMBERED"), rows))
    return 0
