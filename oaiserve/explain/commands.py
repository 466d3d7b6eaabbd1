"""Runs a command line: a user's mistake gives one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from cyclopts import App, CycloptsError, MissingArgumentError

from oaiserve.config import OptionError
from oaiserve.errors import StartupError


def missing(error: CycloptsError) -> str:
    """Return cyclopts' own message, unless an argument is missing that has no flag."""
    if isinstance(error, MissingArgumentError) and error.argument is not None and error.keyword is None:
        return f"{error.argument.name} is missing; --help has what is needed."
    return str(error)


def run(app: App, argv: Sequence[str], message_for: Callable[[CycloptsError], str] = missing) -> int:
    """Run the command, and return the exit code: 2 if the user can correct the error."""
    try:
        command, bound, _ = app.parse_args(argv, print_error=False, exit_on_error=False, verbose=False)
        return command(*bound.args, **bound.kwargs) or 0
    except (CycloptsError, OptionError, StartupError) as error:
        text = message_for(error) if isinstance(error, CycloptsError) else str(error)
        print(f"{app.name[0]}: {' '.join(text.split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
