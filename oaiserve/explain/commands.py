"""Runs a command line, where a user's mistake gives one sentence, and knows the formats of config files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cyclopts import App, CycloptsError, MissingArgumentError
from cyclopts.config import Json, Toml, Yaml

from oaiserve.config import OptionError
from oaiserve.errors import StartupError

FILE_FORMATS: dict[str, type[Toml | Yaml | Json]] = {".toml": Toml, ".yaml": Yaml, ".yml": Yaml, ".json": Json}


def settings_in(path: Path) -> dict[str, Any]:
    """Return all that a config file says, by its own keys. Raises OptionError."""
    if path.suffix not in FILE_FORMATS:
        raise OptionError(f"--config is '{path}', but must end in {', '.join(FILE_FORMATS)}.")
    try:
        return dict(FILE_FORMATS[path.suffix](path, must_exist=True).config)
    except OSError as error:
        raise OptionError(f"--config is '{path}', which cannot be read: {error.strerror}.") from error
    except CycloptsError as error:  # raised by the parser of the format, without the file's name
        raise OptionError(f"--config is '{path}', which cannot be read: {error}.") from error


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
