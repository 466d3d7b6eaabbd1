"""Tries whether coding tools write a file with a real small model: python -m tools.clients.small_model MODEL

`oaiserve launch` starts each tool as it is, in a new git repository, and the tool is asked for hello.py. openai-agents
is a program that runs on a WebSocket. A tool passes if the file prints hello. The exit code is 1 if one doesn't. On a
CPU each tool takes minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tools.clients import environments
from tools.clients.sessions import ADDRESS, AGENTS, TASK, run_script
from tools.markdown import as_markdown, write_json
from tools.server_process import exit_on_sigterm, running_oaiserve

TOOLS = ("codex", "claude-code", "opencode", "qwen-code", "aider", "openai-agents")
HELLO = "Write a file hello.py that prints hello."
AIDER = "--yes-always --no-check-update --no-analytics --message"
NO_FILE = "no file"
FAILS = "the file fails"
LIMIT_SECONDS = 3600.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="as for `oaiserve serve`")
    add("--only", action="append", choices=TOOLS, metavar="NAME", help=f"repeatable: {', '.join(TOOLS)}")
    add("--task", default=HELLO, help="default: %(default)s")
    add("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args(argv)
    exit_on_sigterm()
    results = {}
    with running_oaiserve(model=arguments.model, start_limit_seconds=LIMIT_SECONDS) as server:
        for name in arguments.only or TOOLS:
            print(f"{AGENTS[name].title} ...", file=sys.stderr, flush=True)
            results[name] = tried(name, server.url, arguments.task)
    rows = [["tool", "version", "prompt tokens", "cached", "seconds", "result"]]
    for name, result in results.items():
        shown = [f"{result[key]}" for key in ("version", "prompt_tokens", "cached_tokens", "seconds", "result")]
        rows.append([AGENTS[name].title, *shown])
    print("\n".join(as_markdown(rows)))
    if arguments.json:
        write_json(arguments.json, {"tools": results})
    return 0 if all(has_passed(result["result"]) for result in results.values()) else 1


def outcome(exit_code: int, output: str, errors: str) -> str:
    """Return the output of hello.py, or the last line of its error."""
    return f"{FAILS}: {errors.strip().rpartition(chr(10))[2]}" if exit_code else output.strip()


def has_passed(result: str) -> bool:
    return "hello" in result.lower() and not result.startswith((NO_FILE, FAILS))


def tried(name: str, url: str, task: str) -> dict[str, Any]:
    """Let a tool do the task. Its result is the output of hello.py, or the end of the tool's own output."""
    agent = AGENTS[name]
    folder = environments.installed(name, agent)
    command = agent.command.replace(ADDRESS, url).replace(TASK, task)
    if name == "aider":  # its session edits another file
        command = f"{command.partition(' -- ')[0]} -- {AIDER} '{task}' hello.py"
    known = {record["request_id"] for record in _records(url)}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as project:
        lines = "\n".join(["set -e", "git init -q", command])
        problem, said = run_script(lines, folder, home, project, agent.env, LIMIT_SECONDS)
        seconds = round(time.monotonic() - begun)
        file = Path(project) / "hello.py"
        if file.exists():
            ran = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=60)
            result = outcome(ran.returncode, ran.stdout, ran.stderr)
        else:
            result = f"{NO_FILE}: {' '.join((problem or said[-200:]).split())}"
    new = [record for record in _records(url) if record["request_id"] not in known]
    tokens = {key: sum(record[key] or 0 for record in new) for key in ("prompt_tokens", "cached_tokens")}
    return {"version": environments.version(name, agent), "seconds": seconds, "result": result, **tokens}


def _records(url: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = httpx.get(f"{url}/debug/requests", trust_env=False).json()["requests"]
    return records


if __name__ == "__main__":
    sys.exit(main())
