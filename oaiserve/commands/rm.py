"""The command `oaiserve rm`."""

from __future__ import annotations

import sys
from contextlib import suppress
from difflib import get_close_matches

from oaiserve.commands.models import stored_models
from oaiserve.commands.table import size
from oaiserve.errors import StartupError


def command(name: str, /, *, yes: bool = False) -> int:
    """Remove a downloaded model from this disk, and what earlier starts stored about it.

    The files of a model elsewhere are your own: only what earlier starts stored about it is removed.

    Parameters
    ----------
    name
        The name in `oaiserve list`.
    yes
        Do not ask.
    """
    models = {model.name: model for model in stored_models()}
    if name not in models:
        close = get_close_matches(name, models, n=1, cutoff=0.3)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise StartupError(f"'{name}' is not in 'oaiserve list'.{hint}")
    model = models[name]
    if model.remove is not None:
        what = "its files, with"
    else:
        what = "not its files, but"
    if not yes:
        if not sys.stdin.isatty():
            raise StartupError(f"Nobody can be asked whether to remove '{name}'. Give --yes.")
        try:
            answer = input(f"Remove {name} ({what} what starts remember of it)? [y/N] ")
        except EOFError:  # Ctrl-D
            print()
            return 1
        if not answer.lower().startswith("y"):
            return 1
    try:
        freed = model.remove() if model.remove is not None else 0
    except OSError as error:
        raise StartupError(
            f"Not all files of '{name}' could be removed: {error.strerror} ({error.filename})."
        ) from error
    for record in model.records:
        with suppress(FileNotFoundError):  # A start that ran meanwhile has removed the record.
            freed += record.path.stat().st_size
            record.path.unlink()
    print(f"Removed {name}: {size(freed)} are free again.")
    return 0
