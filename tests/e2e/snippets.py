"""Runs the snippets of the docs as their readers do, or checks the form of those that cannot run here.

A snippet that is not run has a comment above its fence, such as `<!-- not run: needs a GPU -->`, with one of REASONS.
Its shell syntax, the flags of its commands, its Python and its data are checked all the same.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from cyclopts import App

from oaiserve import cli
from tests.pages import ROOT, Snippet

REASONS = {
    "needs a GPU",
    "needs another model",
    "needs Docker",
    "needs Kubernetes",
    "needs nginx",
    "needs Ray",
    "needs another program",
    "needs a file or an id of yours",
    "needs a release",
    "needs anthropic",
    "needs a server with --inspect, and the id of a request",
    "needs openai[realtime]",
    "`make clients`",
    "takes minutes",
    "waits for you to type",
}
ADDRESS = "127.0.0.1:8000"  # address of the server in the docs
LIMIT_SECONDS = 120
# Writes the words of a command that the shell does not have, and its OAISERVE_ variables, each with their number.
RECORD = """command_not_found_handle() {
    local name settings=()
    for name in "${!OAISERVE_@}"; do settings+=("$name=${!name}"); done
    printf '%s\\0' "$#" "$@" "${#settings[@]}" "${settings[@]}" >&3
}
"""


class Session:
    """The work of one reader with one page: a folder, and the names that its Python has defined so far."""

    def __init__(self, folder: Path, adapters: Path, address: str, environment: dict[str, str]) -> None:
        self.folder = folder
        self.address = address
        self.environment = environment
        self.names: dict[str, Any] = {"__name__": "__main__"}
        (folder / "adapters").symlink_to(adapters)  # the server's adapters
        (folder / "deploy").symlink_to(ROOT / "deploy")  # for commands that are typed in a checkout

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the clients that a reader's Python leaves open until it ends."""
        for value in self.names.values():
            close = getattr(value, "close", None)
            if inspect.ismethod(close) and not inspect.iscoroutinefunction(close):
                close()

    def check(self, snippet: Snippet) -> None:
        """Check the form of a snippet, and run it unless it has a reason. Raises AssertionError with what failed."""
        match snippet.language:
            case "sh" | "console":
                commands = typed(snippet)
                check_commands(commands, self.folder)
                if snippet.reason is None:
                    succeed(shell(self._here(commands), self.folder, self.environment))
            case "python":
                code = compile(self._here(snippet.text), str(snippet), "exec")
                if snippet.reason is None:
                    with chdir(self.folder), warnings.catch_warnings():
                        warnings.simplefilter("default")  # those of other packages fail nothing
                        exec(code, self.names)
            case "js":
                if node := shutil.which("node"):
                    check = [node, "--input-type=module", "--check", "-"]
                    succeed(subprocess.run(check, input=snippet.text, capture_output=True, text=True))
            case "json":
                for document in documents(snippet.text):
                    json.loads(document)
            case "yaml":
                list(yaml.safe_load_all(snippet.text))
            case "toml":
                tomllib.loads(snippet.text)
                file = self.folder / "models.toml"
                file.write_text(snippet.text)
                check_command(["oaiserve", "serve", "--config", str(file)])
            case "promql" | "text":
                pass  # all queries are checked at once, and text is what a command prints
            case other:
                assert snippet.reason is not None, f"nothing here checks {other}, so say above it why it is not run"

    def _here(self, text: str) -> str:
        """Return a snippet that reaches the server of the test, and whose own servers take any free port."""
        return re.sub(r"--port \d+", "--port 0", text.replace(ADDRESS, self.address))


def typed(snippet: Snippet) -> str:
    """Return the commands of a shell snippet; of a console, those after its prompts."""
    if snippet.language == "sh":
        return snippet.text
    return "\n".join(re.findall(r"^\$ ((?:.*\\\n)*.*)$", snippet.text, re.MULTILINE)) + "\n"


def documents(text: str) -> list[str]:
    """Return a JSON snippet as one document, or as one a line."""
    lines = text.strip().split("\n")
    return lines if len(lines) > 1 and all(line.startswith("{") and line.endswith("}") for line in lines) else [text]


def check_commands(commands: str, folder: Path) -> None:
    """Check the syntax of commands for a shell, and the flags of those that are of this repository."""
    for words, settings in recorded(commands, folder):
        with mock.patch.dict(os.environ, settings), chdir(folder):
            check_command(words)


def recorded(commands: str, folder: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield the words and the settings of each command, as a shell reads them that finds no program."""
    record = folder / "commands"
    text = f"exec 3>>'{record}'\n{RECORD}{commands.replace('.venv/bin/python', 'python')}\nwait"
    environment = {"PATH": "/nonexistent", "HOME": str(folder)}
    succeed(shell(text, folder, environment, "-u"))  # nothing reads from a pipe here, so its writers may fail
    fields = iter(record.read_text().split("\0")[:-1])
    record.unlink()
    for number in fields:
        words = [next(fields) for _ in range(int(number))]
        yield words, dict(next(fields).split("=", 1) for _ in range(int(next(fields))))


def shell(
    text: str, folder: Path, environment: dict[str, str], strictness: str = "-euo pipefail"
) -> subprocess.CompletedProcess[str]:
    """Run commands, by default until one fails."""
    return subprocess.run(
        [shutil.which("bash") or "bash", *strictness.split(), "-c", text],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )


def check_command(words: list[str]) -> None:
    """Check the flags of a command, where it is one of this repository. Raises AssertionError."""
    match words:
        case ["oaiserve", *arguments]:
            with mock.patch.object(App, "parse_args", parsed_only(App.parse_args)):
                assert cli.main(arguments) == 0, f"oaiserve refuses {arguments}"
        case ["python", "-m", module, *arguments]:
            check_module(module, arguments)
        case ["make", *arguments]:
            succeed(subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True))


def parsed_only(parse: Any) -> Any:
    """Return a `parse_args` of cyclopts whose command does nothing."""

    def parse_args(app: App, *arguments: Any, **options: Any) -> Any:
        _, bound, ignored = parse(app, *arguments, **options)
        return lambda *_, **__: 0, bound, ignored

    return parse_args


class Parsed(Exception):
    """The command line was read without an error."""


def check_module(module: str, arguments: list[str]) -> None:
    """Let a module read its command line, and nothing else."""
    parse = argparse.ArgumentParser.parse_args

    def parse_args(parser: Any, *given: Any) -> Any:
        parse(parser, *given)
        raise Parsed

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_args),
        mock.patch.object(sys, "argv", [module, *arguments]),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)  # other tests import the module
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except Parsed:
            return
        except SystemExit as end:
            raise AssertionError(f"python -m {module} refuses {arguments}") from end
    raise AssertionError(f"python -m {module} reads no command line")


def succeed(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def programs(folder: Path, fork_server: Path | None) -> str:
    """Return a PATH for readers, where `oaiserve` starts no server for long and `make` only says what it would do.

    `oaiserve` is forked by the fork server with this address, if there is one.
    """
    folder.mkdir()
    start = "checked_start.py'" if fork_server is None else f"forked_start.py' '{fork_server}'"
    for name, command in {
        "oaiserve": f"'{sys.executable}' '{ROOT}/tests/e2e/{start}",
        "make": f"'{shutil.which('make')}' --dry-run -C '{ROOT}'",
    }.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)
    return os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
