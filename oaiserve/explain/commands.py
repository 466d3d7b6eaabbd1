"""Runs commands on files: a user's mistake gives one sentence."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, MissingArgumentError

from oaiserve.errors import StartupError


def run(app: App, argv: Sequence[str]) -> int:
    """Run the command, and return the exit code: 2 if the user can correct the error."""
    try:
        command, bound, _ = app.parse_args(argv, print_error=False, exit_on_error=False, verbose=False)
        return command(*bound.args, **bound.kwargs) or 0
    except (CycloptsError, StartupError) as error:
        print(f"{app.name[0]}: {' '.join(_message_for(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _message_for(error: CycloptsError | StartupError) -> str:
    if isinstance(error, MissingArgumentError) and error.argument is not None and error.keyword is None:
        return f"{error.argument.name} is missing; --help has what is needed."
    return str(error)
