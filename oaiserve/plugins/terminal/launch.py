"""The command `oaiserve launch`."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from typing import Annotated

from cyclopts import Parameter

from oaiserve.commands.client import client_for
from oaiserve.commands.servers import running
from oaiserve.commands.table import table
from oaiserve.errors import StartupError
from oaiserve.plugins.terminal import codex_exec
from oaiserve.plugins.terminal.agents import AGENTS, Agent
from oaiserve.plugins.terminal.foreground import run

LEAN = "The server computes on a CPU, so {} gets a short prompt and few tools (all of them with --no-lean)."
CHOSEN = "{title} uses {model} at {url}, the server that started last here. --url takes another."


def command(
    tool: Annotated[str | None, Parameter(help=f"One of {', '.join(AGENTS)}. Without it, list them.")] = None,
    /,
    *arguments: Annotated[
        str,
        Parameter(help="The tool's own, after --, as in: launch codex -- exec 'Fix the test'"),
    ],
    url: str | None = None,
    model: str | None = None,
    lean: Annotated[bool | None, Parameter(negative="--no-lean")] = None,
    show: bool = False,
) -> int:
    """Start a coding tool that uses your server. The tool's own settings are not changed.

    `codex exec` may write to this folder, unless you or your settings give it another sandbox. Other tools get no
    rights: where they do a task without you, a line says what they may do, and which arguments change that.

    Parameters
    ----------
    url
        The server's address. Default: the server that you started last on this machine.
    model
        The model's name. Default: the server's.
    lean
        Give the tool a short prompt and few tools, as small models and slow servers need. Default: if the server
        computes on a CPU.
    show
        Print shell commands that do the same, and start nothing.
    """
    if tool is None:
        print(listing())
        return 0
    tool = {agent.program: name for name, agent in AGENTS.items()}.get(tool, tool)
    if tool not in AGENTS:
        close = get_close_matches(tool, AGENTS, n=1)
        if close:
            hint = f"Did you mean {close[0]}?"
        else:
            hint = f"It must be one of {', '.join(AGENTS)}."
        raise StartupError(f"'{tool}' is not a tool that oaiserve can launch. {hint}")
    agent = AGENTS[tool]
    client = client_for(url)
    served = client.model(model)
    if url is None:
        print(CHOSEN.format(title=agent.title, model=served.name, url=client.url), file=sys.stderr)
    if agent.lean is not None and (served.device == "cpu" if lean is None else lean):
        agent = agent.made_lean()
        if lean is None:
            print(LEAN.format(agent.title), file=sys.stderr)
    is_exec = tool == "codex" and codex_exec.is_wanted(arguments)
    if is_exec and not codex_exec.has_sandbox(arguments):
        agent = replace(agent, arguments=(*agent.arguments, *codex_exec.MAY_WRITE))
        print(codex_exec.NOTE, file=sys.stderr)
    if agent.rights is not None:
        words = ["oaiserve", "launch", tool]
        words += [word for flag, value in (("--url", url), ("--model", model)) if value for word in (flag, value)]
        words += [] if lean is None else ["--lean" if lean else "--no-lean"]
        if note := agent.rights.note([*words, "--"], arguments, os.environ):
            print(note, file=sys.stderr)
    values = {"url": client.url, "key": client.key, "model": served.name, "context": str(served.context)}
    values["output"] = str(served.context // 8)
    if show:
        print(script(agent, values, arguments))
        return 0
    program = shutil.which(agent.program)
    if program is None:
        raise StartupError(
            f"{agent.title} is not installed: there is no program '{agent.program}'. To install it: {agent.install}"
        )
    with TemporaryDirectory(prefix="oaiserve-") as folder:
        for variable, content in agent.files.items():
            path = Path(folder) / f"{variable.lower()}.json"
            path.write_text(Template(content).substitute(values), encoding="utf-8")
            values[variable] = str(path)
        files = {variable: values[variable] for variable in agent.files}
        environment = {**os.environ, **files, **_filled(agent, values)}
        words = [program, *_arguments(agent, values), *arguments]
        return run(words, environment, reads_input=not is_exec or codex_exec.is_piped())


def listing() -> str:
    rows = []
    for name, agent in AGENTS.items():
        is_installed = shutil.which(agent.program) is not None
        rows.append((name, agent.title, "yes" if is_installed else "no", "" if is_installed else agent.install))
    servers = running()
    if servers:
        where = f"To start one with {servers[0].model} at {servers[0].url}: oaiserve launch TOOL"
    else:
        where = "No server is running here. Start one first, as in: oaiserve serve demo"
    return f"{table(('TOOL', 'NAME', 'INSTALLED', 'TO INSTALL IT'), rows)}\n\n{where}"


def script(agent: Agent, values: dict[str, str], arguments: Iterable[str] = ()) -> str:
    lines = []
    for variable, content in agent.files.items():
        lines += [f"cat > {agent.program}.json <<'END'", Template(content).substitute(values), "END"]
        lines.append(f"export {variable}=$PWD/{agent.program}.json")
        values = {**values, variable: f"{agent.program}.json"}
    lines += [f"export {name}={shlex.quote(value)}" for name, value in _filled(agent, values).items()]
    return "\n".join([*lines, shlex.join([agent.program, *_arguments(agent, values), *arguments])])


def _filled(agent: Agent, values: dict[str, str]) -> dict[str, str]:
    return {name: Template(value).substitute(values) for name, value in agent.environment.items()}


def _arguments(agent: Agent, values: dict[str, str]) -> list[str]:
    return [Template(argument).substitute(values) for argument in agent.arguments]
