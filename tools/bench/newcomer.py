"""Counts a newcomer's first hour, by the commands of README and docs/ alone: python -m tools.bench.newcomer FILE.gguf

A fresh clone of the last commit is set up and serves the demo, and then a file, with an empty home, an empty
environment, and no C++ compiler; and again with one. What tells pip where its index is stays. Each run downloads what
`make serve` installs. The table has the seconds of each step: what is typed, and until when.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tests.pages import snippets
from tools.markdown import add_publishing, as_markdown, number, publish, results_of
from tools.server_process import MOST_LOG_CHARACTERS, POLL_SECONDS, ROOT, exit_on_sigterm, free_port, running_group

COMPILER = re.compile(r"(.+-)?(g\+\+|gcc|c\+\+|cc|c89|c99|clang|clang\+\+)(-[\d.]+)?")
OF_INDEX = re.compile(r"PIP_\w+|SSL_CERT_FILE|(http|https|no)_proxy", re.IGNORECASE)  # variables
ADDRESS = "127.0.0.1:8000"  # in the documentation
REQUEST_ID = re.compile(r"^x-request-id: (\S+)", re.MULTILINE)
COLUMNS = {False: "without a compiler, s", True: "with g++, s"}


class StepFailed(Exception):
    """A command ended, or it took too long. The message has the end of its output."""


class Step(NamedTuple):
    until: str  # what the newcomer has then
    command: str  # as a page has it; empty: the last one goes on
    output: str  # a regular expression for what it prints then
    is_server: bool = False  # It goes on until another server starts.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="a GGUF file of a chat model")
    parser.add_argument("--only", choices=("with", "without"), help="run only with, or only without a compiler")
    parser.add_argument("--limit-seconds", type=float, default=1800, help="time that a step may take (default 1800)")
    add_publishing(parser, "newcomer")
    arguments = parser.parse_args()
    if arguments.file is None and arguments.show is None:
        parser.error("name the GGUF file that the newcomer serves.")
    exit_on_sigterm()
    results = results_of(arguments, measured)
    publish(arguments, "newcomer", results, report(results))


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    wanted = {None: (False, True), "without": (False,), "with": (True,)}[arguments.only]
    model = arguments.file.resolve(strict=True)
    return {"model": model.name, "runs": [_run(model, arguments.limit_seconds, compiler=each) for each in wanted]}


def _run(model: Path, limit_seconds: float, *, compiler: bool) -> dict[str, Any]:
    with TemporaryDirectory(prefix="newcomer-") as name:
        folder = Path(name)
        subprocess.run(["git", "clone", "--quiet", ROOT, folder / "clone"], check=True)
        environment = bare_environment(folder, compiler=compiler)
        steps = list(counted(newcomers_steps(model), folder / "clone", environment, limit_seconds))
    return {"compiler": compiler, "steps": steps}


def newcomers_steps(model: Path) -> list[Step]:
    """Return the steps of a newcomer in their order. Raises ValueError if a page has lost one of the commands."""
    ask = typed("docs/start.md", "curl -i ").replace('"demo"', f'"{model.stem}"')
    serve = typed("docs/start.md", "oaiserve serve path/to/model").replace("path/to/model", shlex.quote(str(model)))
    name = re.escape(model.stem)
    program = typed("docs/start.md", "from openai import OpenAI")
    return [
        Step("it is installed", typed("README.md", "make serve"), "Loading demo", is_server=True),
        Step("the demo is ready", "", "serves demo at http"),
        Step("the first answer", typed("README.md", "curl "), '"finish_reason"'),
        Step("OpenAI's SDK has an answer", f".venv/bin/python -c {shlex.quote(program)}", "Paris"),
        Step("a model of your own is ready", f".venv/bin/{serve}", f"serves {name} at http", is_server=True),
        Step("its first answer", ask, '"finish_reason"'),
        Step("what took its time", typed("docs/slow-requests.md", "curl "), '"explanation"'),
    ]


def typed(page: str, begin: str) -> str:
    """Return the command of a page that begins like this, or the whole program. Raises ValueError if it has none."""
    for snippet in snippets((ROOT / page).read_text(), page):
        found = re.search(rf"^{re.escape(begin)}.*(\n[ \t].*)*", snippet.text, re.MULTILINE)
        if found is not None:
            return snippet.text if snippet.language == "python" else found[0]
    raise ValueError(f"{page} has no command that begins with '{begin}'.")


def bare_environment(folder: Path, *, compiler: bool) -> dict[str, str]:
    """Return an environment with an empty home, and with the programs of this one except its compilers."""
    programs = folder / "bin"
    for path in (programs, folder / "home"):
        path.mkdir()
    (programs / "python3").symlink_to(Path(sys.executable).resolve())
    for directory in os.environ["PATH"].split(os.pathsep):
        for program in Path(directory).glob("*"):
            is_compiler = COMPILER.fullmatch(program.name) is not None
            if (compiler or not is_compiler) and not os.path.lexists(programs / program.name):
                (programs / program.name).symlink_to(program)
    of_index = {name: value for name, value in os.environ.items() if OF_INDEX.fullmatch(name)}
    port = str(free_port())
    return of_index | {"PATH": str(programs), "HOME": str(folder / "home"), "PORT": port, "OAISERVE_PORT": port}


def counted(
    steps: Sequence[Step], folder: Path, environment: Mapping[str, str], limit_seconds: float
) -> Iterator[dict[str, Any]]:
    """Do the steps in the folder, and yield how long each took. Raises StepFailed."""
    address = f"127.0.0.1:{environment['PORT']}"
    request_id = ""
    with ExitStack() as server:
        for step in steps:
            started = time.monotonic()
            command = step.command.replace(ADDRESS, address).replace("REQUEST_ID", request_id)
            with ExitStack() as of_step:
                if command:
                    if step.is_server:
                        server.close()
                    running = running_group(["sh", "-c", command], env=environment, cwd=folder)
                    process, log = (server if step.is_server else of_step).enter_context(running)
                output = _awaited(step, process, log, started + limit_seconds)
            if (found := REQUEST_ID.search(output)) is not None:
                request_id = found[1]
            seconds = time.monotonic() - started
            print(f"{seconds:7.1f} s until {step.until}", file=sys.stderr)
            yield {"until": step.until, "command": step.command, "seconds": seconds}


def _awaited(step: Step, process: subprocess.Popen[bytes], log: Path, give_up: float) -> str:
    """Return the output of a command as soon as it ends the step. Raises StepFailed."""
    while True:
        has_ended = process.poll() is not None  # before its output is read
        output = log.read_text(errors="replace")
        if re.search(step.output, output):
            return output
        if has_ended or time.monotonic() > give_up:
            what = f"ended with exit code {process.returncode}" if has_ended else "took too long"
            raise StepFailed(f"Until {step.until}: {step.command or 'it'} {what}: {output[-MOST_LOG_CHARACTERS:]}")
        time.sleep(POLL_SECONDS)


def report(results: Mapping[str, Any]) -> str:
    runs = results["runs"]
    rows = [["until", "you type", *(COLUMNS[run["compiler"]] for run in runs)]]
    for of_runs in zip(*(run["steps"] for run in runs), strict=True):
        seconds = [number(step["seconds"]) for step in of_runs]
        rows.append([of_runs[0]["until"], _shown(of_runs[0]["command"]), *seconds])
    sums = [number(sum(step["seconds"] for step in run["steps"])) for run in runs]
    num_commands = sum(bool(step["command"]) for step in runs[0]["steps"])
    rows.append([f"all, with {num_commands} commands", "", *(f"**{each}**" for each in sums)])
    about = textwrap.fill(f"{results['machine']}; {results['created']}. Its own model is {results['model']}.", 120)
    return "\n".join([about, "", *as_markdown(rows)])


def _shown(command: str) -> str:
    """Return the first words of a command."""
    words = command.partition("#")[0].split()[:2]
    return f"`{' '.join(words)} …`" if words else ""


if __name__ == "__main__":
    main()
