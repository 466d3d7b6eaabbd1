"""The command `oaiserve launch`."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from typing import Annotated

from cyclopts import Parameter

from oaiserve.commands.agents import AGENTS, Agent
from oaiserve.commands.client import client_for
from oaiserve.commands.foreground import run
from oaiserve.errors import StartupError


def command(
    tool: Annotated[str, Parameter(help=f"One of {', '.join(AGENTS)}.")],
    /,
    *arguments: Annotated[str, Parameter(help="The tool's own, behind --, as in: launch codex -- exec 'Fix the test'")],
    url: str | None = None,
    model: str | None = None,
    show: bool = False,
) -> int:
    """Start a coding tool that asks your server, whatever its own settings are: they are not changed.

    Parameters
    ----------
    url
        The server's address. Default: your server that started last on this machine.
    model
        The model's name. Default: the server's.
    show
        Print the commands of a shell that do the same, and start nothing.
    """
    if tool not in AGENTS:
        raise StartupError(f"'{tool}' is no tool that can be launched. It must be one of {', '.join(AGENTS)}.")
    agent, client = AGENTS[tool], client_for(url)
    served = client.model(model)
    values = {"url": client.url, "key": client.key, "model": served.name, "context": str(served.context)}
    values["output"] = str(served.context // 8)
    if show:
        print(script(agent, values, arguments))
        return 0
    program = shutil.which(agent.program)
    if program is None:
        raise StartupError(
            f"{agent.title} is not installed: no program '{agent.program}' was found. This installs it: {agent.install}"
        )
    with TemporaryDirectory(prefix="oaiserve-") as folder:
        environment = {**os.environ, **_filled(agent, values)}
        for variable, content in agent.files.items():
            path = Path(folder) / f"{variable.lower()}.json"
            path.write_text(Template(content).substitute(values))
            environment[variable] = str(path)
        return run([program, *_arguments(agent, values), *arguments], environment)


def script(agent: Agent, values: dict[str, str], arguments: Iterable[str] = ()) -> str:
    """Return the commands of a shell that start the tool in the same way."""
    lines = []
    for variable, content in agent.files.items():
        lines += [f"cat > {agent.program}.json <<'END'", Template(content).substitute(values), "END"]
        lines.append(f"export {variable}=$PWD/{agent.program}.json")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in _filled(agent, values).items()]
    return "\n".join([*lines, shlex.join([agent.program, *_arguments(agent, values), *arguments])])


def _filled(agent: Agent, values: dict[str, str]) -> dict[str, str]:
    return {name: Template(value).substitute(values) for name, value in agent.environment.items()}


def _arguments(agent: Agent, values: dict[str, str]) -> list[str]:
    return [Template(argument).substitute(values) for argument in agent.arguments]
