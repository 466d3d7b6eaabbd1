"""Runs whole sessions of coding agents and agent frameworks: python -m tools.clients.sessions

The demo model is too weak to finish an agent's loop, so a model with a script plays: it lists files, reads, runs a
test, edits, and three of its calls fail. All else is real: the agent in its default configuration, tokenizer, template,
engine with its prefix cache, routes. A session is good if the agent has ended well and the test passes. Prints the
table of docs/clients.md, which --markdown writes there; the exit code is 1 if a session was not good. --renew pins the
newest versions first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oaiserve.plugins.terminal.agents import AGENTS as AGENT_TABLE
from tests.agents import recorded
from tests.agents.scripted import Turn, next_turn, scripted_server
from tools.clients import environments
from tools.clients.agent import Agent
from tools.clients.clients import SCRIPTS
from tools.markdown import as_markdown, publish
from tools.server_process import exit_on_sigterm

MARKERS = "sessions"
RECORDED = ("codex", "claude-code")
ADDRESS = "http://127.0.0.1:8000"  # as the documentation has it
TASK = "Make the test pass."
END = "The test passes now."
PROJECT = {
    "add.py": "def add(a, b):\n    return a - b\n",
    "test_add.py": "from add import add\n\nassert add(2, 3) == 5, add(2, 3)\n",
}
WRONG = "return a - b"
RIGHT = "return a + b"
MISSING = "return a * b"


def ten_turns(
    shell: Callable[[str], tuple[str, dict[str, Any]]], edit: Callable[[str, str], tuple[str, dict[str, Any]]]
) -> tuple[Turn, ...]:
    """Return the turns of a model with a shell and a tool that edits. The third, fourth and fifth call fail."""
    return (
        Turn("I list the files.", *shell("ls")),
        Turn("I read one.", *shell("cat add.py")),
        Turn("I run the test.", *shell("python3 test_add.py")),
        Turn("I read another one.", *shell("cat missing.py")),
        Turn("I edit.", *edit(MISSING, RIGHT)),
        Turn("I edit again.", *edit(WRONG, RIGHT)),
        Turn("I run the test again.", *shell("python3 test_add.py")),
        Turn("I look at the change.", *shell("git diff --stat")),
        Turn("I write a note.", *shell("echo done > done.txt")),
        Turn(END),
    )


def read_first(turns: tuple[Turn, ...], tool: str, **arguments: str) -> tuple[Turn, ...]:
    """Return turns whose second one reads with a tool of its own: some agents edit only what they have read."""
    return (turns[0], replace(turns[1], tool=tool, arguments=arguments), *turns[2:])


def codex_edit(old: str, new: str) -> tuple[str, dict[str, Any]]:
    patch = f"*** Begin Patch\n*** Update File: add.py\n@@\n-    {old}\n+    {new}\n*** End Patch"
    return "exec_command", {"cmd": f"apply_patch <<'EOF'\n{patch}\nEOF"}


def block(old: str, new: str) -> str:
    """Return an edit in aider's form, which has no tools."""
    return f"\n\nadd.py\n```python\n<<<<<<< SEARCH\n    {old}\n=======\n    {new}\n>>>>>>> REPLACE\n```"


def of_framework(name: str, packages: tuple[str, ...], first: tuple[Turn, ...], last: Turn, note: str) -> Agent:
    """Return a framework whose agent has the tools of scripts/session_tools.py. `first` come before the ten turns."""
    turns = ten_turns(
        lambda command: ("run_command", {"command": command}),
        lambda old, new: ("edit_file", {"path": "add.py", "old": old, "new": new}),
    )
    if last.tool:  # the client forces calls, since its answer is one
        turns = tuple(replace(turn, says="") for turn in turns)
    path = SCRIPTS / f"session_{packages[0].partition('[')[0].removesuffix('-slim').replace('-', '_')}.py"
    return Agent(
        name,
        packages,
        f"python {path} {ADDRESS}/v1 '{TASK}'",
        (*first, *turns[:-1], last),
        "run_command",
        is_javascript=False,
        note=note,
    )


def launched(name: str, task: str, turns: tuple[Turn, ...], marker: str, **more: Any) -> Agent:
    """Return a tool that `oaiserve launch` starts, with the task among its arguments."""
    tool = AGENT_TABLE[name]
    return Agent(
        tool.title,
        # Without @latest, npm takes the last version that is made for the node of this machine.
        (f"{tool.package}@latest" if tool.is_javascript else tool.package,),
        f"{sys.executable} -m oaiserve launch {name} --url {ADDRESS} -- {task}",
        turns,
        marker,
        is_javascript=tool.is_javascript,
        **more,
    )


AGENTS = {
    "codex": launched(
        "codex",
        f"exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox '{TASK}'",
        ten_turns(lambda command: ("exec_command", {"cmd": command}), codex_edit),
        "exec_command",
    ),
    "claude-code": launched(
        "claude",
        f"--dangerously-skip-permissions -p '{TASK}'",
        read_first(
            ten_turns(
                lambda command: ("Bash", {"command": command, "description": "Runs it"}),
                lambda old, new: ("Edit", {"file_path": "{project}/add.py", "old_string": old, "new_string": new}),
            ),
            "Read",
            file_path="{project}/add.py",
        ),
        '"Bash"',
        env={"IS_SANDBOX": "1"},
    ),
    "opencode": launched(
        "opencode",
        f"run '{TASK}'",
        read_first(
            ten_turns(
                lambda command: ("bash", {"command": command, "description": "Runs it"}),
                lambda old, new: ("edit", {"filePath": "add.py", "oldString": old, "newString": new}),
            ),
            "read",
            filePath="add.py",
        ),
        '"bash"',
        env={
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_PERMISSION": '"allow"',
        },
    ),
    "qwen-code": launched(
        "qwen-code",
        f"--yolo -p '{TASK}'",
        read_first(
            ten_turns(
                lambda command: ("run_shell_command", {"command": command, "is_background": False}),
                lambda old, new: ("edit", {"file_path": "{project}/add.py", "old_string": old, "new_string": new}),
            ),
            "read_file",
            file_path="{project}/add.py",
        ),
        "run_shell_command",
    ),
    "cline": launched(
        "cline",
        f"'{TASK}'",
        ten_turns(
            lambda command: ("run_commands", {"commands": [command]}),
            lambda old, new: ("editor", {"path": "{project}/add.py", "old_text": old, "new_text": new}),
        ),
        "run_commands",
    ),
    "aider": launched(
        "aider",
        "--edit-format diff --yes-always --no-check-update --no-analytics"
        f" --auto-test --test-cmd 'python3 test_add.py' --message '{TASK}' add.py",
        (
            Turn("I edit." + block(MISSING, RIGHT)),
            Turn("I edit again." + block(WRONG, MISSING)),
            Turn("I edit once more." + block(MISSING, RIGHT)),
        ),
        "Every *SEARCH/REPLACE block* must use this format",
        note="It has no tools: edits are part of the text, and it ends after three failed ones.",
    ),
    "openai-agents": of_framework(
        "openai-agents",
        ("openai-agents",),
        (Turn("I hand over.", "transfer_to_coder"),),
        Turn(END),
        "On a WebSocket. The first agent hands over to another one, which has the tools.",
    ),
    "langgraph": of_framework(
        "LangGraph", ("langgraph", "langchain", "langchain-openai"), (), Turn(END), "An agent of `create_agent`."
    ),
    "pydantic-ai": of_framework(
        "pydantic-ai",
        ("pydantic-ai-slim[openai]",),
        (),
        Turn("", "final_result", {"passes": True, "summary": END}),
        "Its answer has an output type, which it asks for as one more tool.",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", action="append", choices=list(AGENTS), metavar="NAME", help=f"repeatable: {', '.join(AGENTS)}")
    add("--renew", action="store_true", help="pin the newest versions first")
    add("--record", action="store_true", help="keep the requests of some agents for the tests, without their texts")
    add("--json", type=Path, help="write the results to this file")
    add("--markdown", type=Path, help=f"write the table between the markers '{MARKERS}' of this page")
    arguments = parser.parse_args(argv)
    if arguments.only and arguments.markdown:
        parser.error("--markdown needs all agents: leave out --only")
    exit_on_sigterm()
    names = arguments.only or list(AGENTS)
    results = {}
    for name in names:
        print(f"{AGENTS[name].title} ...", file=sys.stderr, flush=True)
        if arguments.renew:
            environments.renew(name, AGENTS[name])
        file = recorded.FOLDER / f"{name}.json" if arguments.record and name in RECORDED else None
        outcome = session(AGENTS[name], environments.installed(name, AGENTS[name]), file)
        results[name] = outcome | {"version": environments.version(name, AGENTS[name])}
    publish(arguments, MARKERS, results, page(results))
    for name, result in results.items():
        if result["problem"]:
            print(f"{name}: {result['problem']}", file=sys.stderr)
    return 1 if any(result["problem"] for result in results.values()) else 0


def session(agent: Agent, folder: Path, file: Path | None = None) -> dict[str, Any]:
    """Run a session, and return its figures. `problem` says what was wrong, or is empty. Its requests go to the
    file."""
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as project:
        turns = [replace(turn, arguments=_filled(turn.arguments, project)) for turn in agent.turns]
        for path, content in PROJECT.items():
            (Path(project) / path).write_text(content)
        with scripted_server(lambda prompt: next_turn(prompt, turns, agent.marker)) as server:
            command = agent.command.replace(ADDRESS, server.url)
            lines = "\n".join(["set -e", "git init -q", "git add -A", command])
            problem, said = run_script(lines, folder, home, project, agent.env)
            if file is not None:
                content = recorded.record(server.bodies, {project: "/project", home: "/home"})
                file.write_text(json.dumps(content, indent=0, ensure_ascii=False) + "\n")
        telemetry = server.telemetry  # The server has stopped, so it has all records.
        records = [telemetry.next_record() for _ in range(telemetry.records.qsize())]
        sent = [record for record in records if agent.marker in server.prompts.get(record.engine_id or "", "")]
        if END not in said and agent.title != "aider":
            problem = problem or f"its end was not said: {said[-300:]!r}"
        if RIGHT not in (Path(project) / "add.py").read_text():
            problem = problem or "it has not edited the file"
    _, *later = sent if sent else [None]
    return {
        "turns": len(turns),
        "requests": len(records),
        "errors": sum(record.http_status != 200 or record.error_type is not None for record in records),
        "prompt_tokens": max((record.prompt_tokens for record in sent), default=0),
        "cached_percent": round(
            100 * sum(record.cached_tokens for record in later) / max(1, sum(record.prompt_tokens for record in later)),
            1,
        ),
        "cached_by_request": [[record.cached_tokens, record.prompt_tokens] for record in sent],
        "problem": problem,
    }


def _filled(arguments: Mapping[str, Any], project: str) -> dict[str, Any]:
    return {
        name: value.replace("{project}", project) if isinstance(value, str) else value
        for name, value in arguments.items()
    }


def run_script(
    lines: str,
    folder: Path,
    home: str,
    project: str,
    more: Mapping[str, str],
    limit_seconds: float = environments.LIMIT_SECONDS,
) -> tuple[str, str]:
    """Run a script in the project. Return the fault, or "", and the script's output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "ANTHROPIC_"))}
    programs = folder / ("node_modules/.bin" if (folder / "node_modules").exists() else "bin")
    env |= {"HOME": home, "PWD": project, "PATH": f"{programs}:{env['PATH']}", "NO_COLOR": "1", **more}
    done = environments.call(["sh", "-c", lines], env, project, limit_seconds)
    return "" if done.returncode == 0 else f"exit code {done.returncode}: {done.stderr[-500:]}", done.stdout


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table with the notes below it."""
    rows = [["agent", "version", "turns", "requests", "with an error", "longest prompt", "cached", "ends well"]]
    for name, result in results.items():
        numbers = [f"{result[key]}" for key in ("turns", "requests", "errors")]
        figures = [f"{result['prompt_tokens']:,} tokens", f"{result['cached_percent']:g} %"]
        rows.append(
            [AGENTS[name].title, result["version"], *numbers, *figures, "**no**" if result["problem"] else "yes"]
        )
    agents = [AGENTS[name] for name in results]
    notes = [f"- {agent.title}: {agent.note}" for agent in agents if agent.note]
    return "\n\n".join(["\n".join(as_markdown(rows)), "\n".join(notes)])


if __name__ == "__main__":
    sys.exit(main())
