"""Makes the environments of the clients in a folder of the user's cache, with the versions that are pinned in pins/.

The folder is $CLIENTS_DIR, else ~/.cache/oaiclients. An environment whose pins have changed is made again. Python's are
made by uv where it is installed, else by venv and pip, with a version of each package. Those of JavaScript need node
and npm. Their pins are the versions of the client's own packages, and the time `before` which all others appeared.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from tools.bench import prepare
from tools.bench.prepare import run
from tools.clients.agent import Agent
from tools.clients.clients import SCRIPTS, Client
from tools.server_process import KILL_LIMIT_SECONDS, stop_group

FOLDER = Path(os.environ.get("CLIENTS_DIR") or "~/.cache/oaiclients").expanduser()
LIMIT_SECONDS = 600  # limit of a script or a session
PINS = Path(__file__).parent / "pins"


def command(name: str, client: Client) -> list[str | Path]:
    """Return the command that runs the client's script, in its environment. Raises NotInstalled."""
    folder = installed(name, client)
    if not client.is_javascript:
        return [folder / "bin/python", SCRIPTS / client.script]
    for script in SCRIPTS.glob("*.mjs"):  # node looks for packages next to the script
        shutil.copy(script, folder)
    return [folder / "node_modules/.bin/node" if client.brings_node else "node", folder / client.script]


def installed(name: str, client: Client | Agent) -> Path:
    """Return the folder of an environment, which is made if it is not there. Raises NotInstalled."""
    if client.made_by is not None:
        return client.made_by()
    folder = FOLDER / name
    done = folder / ".installed"
    pins = pins_file(name, client)
    if not (done.exists() and done.read_text() == pins.read_text()):
        shutil.rmtree(folder, ignore_errors=True)
        _install_javascript(folder, pins) if client.is_javascript else _install_python(folder, client, "-r", str(pins))
        done.write_text(pins.read_text())
    return folder


def call(
    words: Sequence[str | Path], env: Mapping[str, str], cwd: str, limit_seconds: float = LIMIT_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run a client's program. One that takes too long is ended with all that it has started, and has the exit code that
    `timeout` has."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=env, cwd=cwd, process_group=0
    ) as process:
        try:
            report, errors = process.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            stop_group(process, signal.SIGKILL, KILL_LIMIT_SECONDS)
            report, _ = process.communicate()
            return subprocess.CompletedProcess(words, 124, report, f"it took over {limit_seconds:g} s")
        except BaseException:
            stop_group(process, signal.SIGKILL, KILL_LIMIT_SECONDS)
            raise
    return subprocess.CompletedProcess(words, process.returncode, report, errors)


def renew(name: str, client: Client | Agent) -> None:
    """Install the newest versions that the client's packages allow, and pin them. The benchmarks' environments have
    their pins in tools/bench/prepare.py. Raises NotInstalled."""
    if client.made_by is not None:
        return
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    pins = pins_file(name, client)
    if client.is_javascript:
        folder.mkdir(parents=True)
        before = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        package = folder / "package.json"
        package.write_text(json.dumps({"name": name, "private": True, "before": before}, indent=2))
        run("npm", "install", "--silent", "--save-exact", "--before", before, "--prefix", folder, *client.packages)
        shutil.copy(package, pins)
    else:
        _install_python(folder, client, *client.packages)
        pins.write_text(run(*_pip(folder, "freeze")).replace("+cpu", ""))
    (folder / ".installed").write_text(pins.read_text())


def is_pinned(name: str, client: Client | Agent) -> bool:
    return client.made_by is not None or pins_file(name, client).exists()


def version(name: str, client: Client | Agent) -> str:
    """Return the pinned version of the client's first package."""
    if client.made_by is not None:
        return client.packages[0].partition("==")[2]
    package = re.split(r"(?!^)[<\[@]", client.packages[0])[0]  # an @ at the start belongs to a package's name
    pins = pins_file(name, client).read_text()
    if client.is_javascript:
        pinned_version: str = json.loads(pins)["dependencies"][package]
        return pinned_version
    pinned = (line.split("==") for line in pins.splitlines() if "==" in line)
    return {name.replace("_", "-"): number for name, number in pinned}[package]


def pins_file(name: str, client: Client | Agent) -> Path:
    return PINS / f"{name}.{'json' if client.is_javascript else 'txt'}"


def _install_javascript(folder: Path, pins: Path) -> None:
    folder.mkdir(parents=True)
    shutil.copy(pins, folder / "package.json")
    run("npm", "install", "--silent", "--before", json.loads(pins.read_text())["before"], "--prefix", folder)


def _install_python(folder: Path, client: Client | Agent, *requirements: str) -> None:
    if client.needs_torch:
        prepare.make_venv(folder, prepare.TORCH, *requirements)
        return
    if uv := shutil.which("uv"):
        run(uv, "venv", "--quiet", "--python", sys.executable, folder)
        options = ["--quiet"]
    else:
        run(sys.executable, "-m", "venv", "--without-pip", folder)  # The pip of this environment serves all.
        options = ["--quiet", "--no-compile"]  # A script imports few of the modules, which are compiled then.
    run(*_pip(folder, "install"), *options, *requirements)


def _pip(folder: Path, verb: str) -> list[str | Path]:
    python = folder / "bin/python"
    if uv := shutil.which("uv"):
        return [uv, "pip", verb, "--python", python]
    return [sys.executable, "-m", "pip", "--python", python, verb]
