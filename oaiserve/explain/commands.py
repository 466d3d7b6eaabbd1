"""Runs a command line, reports a user's mistake in one sentence, and reads config files."""

from __future__ import annotations

import errno
import os
import re
import select
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TextIO

from cyclopts import (
    App,
    CycloptsError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)
from cyclopts.config import Json, Toml, Yaml

from oaiserve.config import OptionError
from oaiserve.errors import StartupError

# Least similarity, from 0 to 1, of a suggested name, and of each word of the unknown name to one of its words.
LEAST_LIKENESS = 0.7
LEAST_WORD_LIKENESS = 0.6
MOST_COMPARED = 5  # the number of nearest names that are compared
# Errors of a path that the user has given and can correct: no permission, or too long a name.
OF_PATHS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
FILE_FORMATS: dict[str, type[Toml | Yaml | Json]] = {".toml": Toml, ".yaml": Yaml, ".yml": Yaml, ".json": Json}


def settings_in(path: Path) -> dict[str, Any]:
    """Return all settings in a config file, under the keys used there. Raises OptionError."""
    if path.suffix not in FILE_FORMATS:
        raise OptionError(f"--config is '{path}', but must end in {', '.join(FILE_FORMATS)}.")
    try:
        settings: object = FILE_FORMATS[path.suffix](path, must_exist=True).config
    except OSError as error:
        raise OptionError(f"--config is '{path}', which cannot be read: {error.strerror}.") from error
    except CycloptsError as error:  # raised by the parser of the format, without the file's name
        raise OptionError(f"--config is '{path}', which cannot be read: {error}.") from error
    if not isinstance(settings, dict):
        raise OptionError(f"--config is '{path}', which must have names of settings with their values.")
    return settings


def message_of(error: CycloptsError, name: str) -> str:
    """Return a message for the user of the program `name`. For an unknown name, it suggests the nearest known one."""
    command = " ".join([name, *(error.command_chain or ())])
    see = f"See '{command} --help'."
    if isinstance(error, MissingArgumentError) and error.argument is not None and error.keyword is None:
        return f"{error.argument.name} is missing. {see}"
    if isinstance(error, UnusedCliTokensError):
        return f"Unexpected argument '{' '.join(error.unused_tokens or ())}'. {see}"
    if isinstance(error, UnknownCommandError) and error.app is not None and error.unused_tokens:
        unknown = error.unused_tokens[0]
        commands = [name for name in error.app if not name.startswith("-")]
        return f"Unknown command '{unknown}'. {suggestion(unknown, commands) or see}"
    if isinstance(error, UnknownOptionError):
        unknown = unknown_option(error)
        names = [name for argument in error.argument_collection if argument.parse for name in argument.names]
        if error.token.source == "cli":
            return f"Unknown option {unknown}. {suggestion(unknown, names) or see}"
        return f"Unknown option '{unknown}' in {error.token.source}. {suggestion(f'--{unknown}', names) or see}"
    return str(error)


def unknown_option(error: UnknownOptionError) -> str:
    """Return the option without its value, as the user wrote it."""
    return (error.token.keyword or error.token.value).partition("=")[0].strip("[]").replace("][", ".")


def suggestion(unknown: str, names: Iterable[str]) -> str:
    """Return a sentence that suggests the most similar name; "" if none is similar.

    Each word of the unknown name must be like a word of the suggested one: --step-target-seconds isn't a misspelt
    --itl-target-seconds, although most of their letters are the same.
    """
    for name in get_close_matches(unknown, names, n=MOST_COMPARED, cutoff=LEAST_LIKENESS):
        words = _words(name)
        if all(_is_like_one(word, words) for word in _words(unknown)):
            return f"Did you mean {name}?"
    return ""


def _words(name: str) -> list[str]:
    return re.findall(r"[A-Za-z0-9]+", name)


def _is_like_one(word: str, words: Sequence[str]) -> bool:
    is_beginning = any(each.startswith(word) for each in words)
    return is_beginning or bool(get_close_matches(word, words, cutoff=LEAST_WORD_LIKENESS))


def run(app: App, argv: Sequence[str], message_for: Callable[[CycloptsError, str], str] = message_of) -> int:
    """Run the command, and return the exit code: 2 if the user can correct the error."""
    try:
        command, bound, _ = app.parse_args(argv, print_error=False, exit_on_error=False, verbose=False)
        return command(*bound.args, **bound.kwargs) or 0
    except (CycloptsError, OptionError, StartupError) as error:
        if isinstance(error, CycloptsError):
            text = message_for(error, app.name[0])
        else:
            text = str(error)
        print(f"{app.name[0]}: {' '.join(text.split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        if not _is_unread(sys.stdout):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again when it ends.
        return 141  # as shells report SIGPIPE
    except OSError as error:
        if error.filename is None or error.errno not in OF_PATHS:
            raise
        print(f"{app.name[0]}: '{error.filename}' cannot be used: {error.strerror}.", file=sys.stderr)
        return 2


def _is_unread(output: TextIO) -> bool:
    """Return whether the output is a pipe whose reader has gone, as in `oaiserve list | true`."""
    polled = select.poll()
    polled.register(output, 0)
    return any(event & select.POLLERR for _, event in polled.poll(0))
