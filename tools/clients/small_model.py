"""Counts how often coding tools write and run a file with a real small model: python -m tools.clients.small_model MODEL

`oaiserve launch` starts each tool in a new git repository, with the right to write, and the tool is asked for hello.py.
openai-agents is a program that runs on a WebSocket. claims.py judges each session: is the file there, has it run (as
Python itself notes), and does the tool's text claim more? The exit code is 1 if one does. --json has the texts, after
each session. On a CPU each session takes a minute or more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from tools.clients import environments
from tools.clients.claims import FALSE_CLAIM, NO_FILE, VERDICTS, Facts, outcome
from tools.clients.sessions import ADDRESS, AGENTS, TASK, run_script
from tools.markdown import as_markdown, number, write_json
from tools.server_process import exit_on_sigterm, running_oaiserve

TOOLS = ("codex", "claude-code", "opencode", "qwen-code", "aider", "openai-agents")
HELLO = "Write a file hello.py that prints hello, and run it."
# aider runs nothing that a model proposes, only the command that its user gives it.
AIDER = "--yes-always --no-check-update --no-analytics --auto-test --test-cmd 'python3 hello.py' --message"
RUN_MARKER = Path(__file__).parent / "run_marker"
START_LIMIT_SECONDS = 3600.0
RUN_LIMIT_SECONDS = 60


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", nargs="?", help="as for `oaiserve serve`")
    add("--only", action="append", choices=TOOLS, metavar="NAME", help=f"repeatable: {', '.join(TOOLS)}")
    add("--times", type=int, default=1, help="sessions of each tool, which take turns; default: %(default)s")
    add("--limit-seconds", type=float, default=3600.0, help="of a session; default: %(default)g")
    add("--task", default=HELLO, help="default: %(default)s")
    add("--json", type=Path, help="write the results to this file")
    add("--show", type=Path, metavar="JSON", help="start nothing; judge the sessions in this file")
    arguments = parser.parse_args(argv)
    if arguments.show is not None:
        return shown(json.loads(arguments.show.read_text())["sessions"])
    if arguments.model is None:
        parser.error("name a model, or give --show")
    exit_on_sigterm()
    sessions: dict[str, list[dict[str, Any]]] = {}
    with running_oaiserve(model=arguments.model, start_limit_seconds=START_LIMIT_SECONDS) as server:
        for name in [*(arguments.only or TOOLS)] * arguments.times:
            print(f"{AGENTS[name].title} ...", file=sys.stderr, flush=True)
            session = tried(name, server.url, arguments.task, arguments.limit_seconds)
            sessions.setdefault(name, []).append(session)
            write_json(arguments.json, {"task": arguments.task, "sessions": sessions})
    return shown(sessions)


def shown(sessions: Mapping[str, Sequence[Mapping[str, Any]]]) -> int:
    """Print the table. Return the exit code, 1 if a tool claims what did not happen."""
    print(page(sessions))
    verdicts = [facts_of(session).verdict for several in sessions.values() for session in several]
    return 1 if FALSE_CLAIM in verdicts else 0


def facts_of(session: Mapping[str, Any]) -> Facts:
    return Facts(session["result"], session["num_runs"], session["said"], session["problem"])


def page(sessions: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the table: a row for each tool, with medians of its sessions."""
    rows = [["tool", "version", "sessions", *VERDICTS, "prompt tokens", "cached", "seconds"]]
    for name, several in sessions.items():
        counts = Counter(facts_of(one).verdict for one in several)
        figures = [
            number(round(median(one[key] for one in several))) for key in ("prompt_tokens", "cached_tokens", "seconds")
        ]
        versions = "/".join(dict.fromkeys(one["version"] for one in several))
        counted = [str(counts[verdict]) for verdict in VERDICTS]
        rows.append([AGENTS[name].title, versions, str(len(several)), *counted, *figures])
    return "\n".join(as_markdown(rows))


def tried(name: str, url: str, task: str, limit_seconds: float) -> dict[str, Any]:
    """Let a tool do the task, and return what there is then."""
    agent = AGENTS[name]
    folder = environments.installed(name, agent)
    command = agent.command.replace(ADDRESS, url).replace(TASK, task)
    if name == "aider":  # its session edits another file
        command = f"{command.partition(' -- ')[0]} -- {AIDER} '{task}' hello.py"
    known = {record["request_id"] for record in _records(url)}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as project:
        runs = Path(home) / "runs"
        lines = "\n".join(["set -e", "git init -q", f'export PYTHONPATH="{RUN_MARKER}:$PYTHONPATH"', command])
        problem, said = run_script(lines, folder, home, project, {**agent.env, "HELLO_RUNS": str(runs)}, limit_seconds)
        seconds = round(time.monotonic() - begun)
        num_runs = len(runs.read_text().splitlines()) if runs.exists() else 0
        file = Path(project) / "hello.py"
        content = file.read_text(errors="replace") if file.exists() else None
        result = NO_FILE if content is None else _run(file)
    new = [record for record in _records(url) if record["request_id"] not in known]
    return {
        "result": result,
        "num_runs": num_runs,
        "file": content,
        "said": said.strip(),
        "problem": problem,
        "version": environments.version(name, agent),
        "seconds": seconds,
        "requests": len(new),
        **{key: sum(record[key] or 0 for record in new) for key in ("prompt_tokens", "cached_tokens")},
    }


def _run(file: Path) -> str:
    try:
        ran = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=RUN_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return outcome(1, "", f"it runs for over {RUN_LIMIT_SECONDS} s")
    return outcome(ran.returncode, ran.stdout, ran.stderr)


def _records(url: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = httpx.get(f"{url}/debug/requests", trust_env=False).json()["requests"]
    return records


if __name__ == "__main__":
    sys.exit(main())
