"""The clients that are tried: what their scripts report, the table of it, and that all parts name the same clients."""

import ast
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.clients import environments
from tools.clients.clients import CLIENTS, SCRIPTS
from tools.clients.environments import is_pinned, version
from tools.clients.outcomes import FEATURES, OK, InvalidReport, parse, table_of_engine
from tools.clients.sessions import AGENTS

ROOT = Path(__file__).parents[2]
WRITTEN = {  # by a user, and in a script
    '"http://127.0.0.1:8000/v1"': "BASE_URL",
    '"http://127.0.0.1:8000"': "ROOT_URL",
    '"http://127.0.0.1:8001/v1"': "EMBEDDINGS_URL",
    '"http://127.0.0.1:8001"': "EMBEDDER_URL",
    '"none"': "API_KEY",
    '"demo"': "MODEL",
    '"embedder"': "EMBEDDER",
}
HELPERS = {
    "features.py",
    "subjects.py",
    "langchain_standard.py",
    "langchain_standard_tests.py",
    "langchain_anthropic_standard_tests.py",
    "langchain_chat.py",
    "standard_tests.py",
    "features.mjs",
    "ai_sdk.mjs",
    "ai_sdk_cases.mjs",
    "session_tools.py",
}


def report(*lines: dict[str, object]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


@given(st.dictionaries(st.sampled_from(list(FEATURES)), st.text(), min_size=1))
def test_a_report_is_read_as_it_was_written(outcomes: dict[str, str]) -> None:
    lines = [{"feature": name} | ({"error": error} if error else {}) for name, error in outcomes.items()]
    assert parse(report({"features": list(outcomes)}, *lines), "ended") == outcomes


def test_a_table_of_an_engine_tells_its_failures_from_the_gateways() -> None:
    outcomes = {"text": OK, "stream": "cut", "tools_streamed": "none", "embeddings": OK}
    results = {"openai-3": {"version": "3.1", "outcomes": outcomes, "problems": {"stream": "cut"}}}
    assert table_of_engine(results).splitlines()[2] == "| openai (Python) | 3.1 | text | tools streamed | stream |"


def test_features_without_a_line_have_the_end_of_the_script_as_their_outcome() -> None:
    lines = report({"features": ["text", "stream", "tools"]}, {"feature": "text"})
    assert parse(lines, "it crashed") == {"text": OK, "stream": "it crashed", "tools": "it crashed"}


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("", "it reported nothing: ended"),
        ("hello\n", "line 1 of its report is no JSON: 'hello'"),
        (report({"features": ["dance"]}), "line 1 of its report is"),
        (report({"feature": "text"}), "line 1 of its report is"),
        (report({"features": ["text"]}, {"feature": "stream"}), "line 2 of its report is"),
        (report({"features": ["text"]}, {"features": ["stream"]}), "line 2 of its report is"),
    ],
)
def test_a_report_with_anything_else_is_refused(lines: str, reason: str) -> None:
    with pytest.raises(InvalidReport, match=re.escape(reason)):
        parse(lines, "ended")


def test_the_clients_that_are_tried_for_each_change_are_there() -> None:
    (names,) = re.findall(r"^clients=\((.+)\)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert set(names.split()) <= CLIENTS.keys()


def test_every_script_belongs_to_a_client() -> None:
    scripts = {path.name for pattern in ("*.py", "*.mjs") for path in SCRIPTS.glob(pattern)}
    of_agents = {name for agent in AGENTS.values() for name in re.findall(r"session_\w+\.py", agent.command)}
    assert scripts - HELPERS == {client.script for client in CLIENTS.values()} | of_agents


@pytest.mark.parametrize("name", [name for name, client in CLIENTS.items() if client.written])
def test_what_a_user_writes_is_what_the_script_does(name: str) -> None:
    script = (SCRIPTS / CLIENTS[name].script).read_text()
    statements = []
    for line in CLIENTS[name].written.splitlines():
        if line.startswith("from "):
            module, _, names = line.partition(" import ")
            (imported,) = re.findall(rf"^{module} import (\([^)]+\)|.+)$", script, re.MULTILINE)
            assert set(names.split(", ")) <= set(re.findall(r"\w+", imported))
        elif line.startswith("import "):
            assert f"\n{line}\n" in script
        else:
            statements.append(line)
    text = "\n".join(statements)
    for literal, used in WRITTEN.items():
        text = text.replace(literal, used)
    assert _bare(text) in _bare(script)


def _bare(code: str) -> str:
    """Return code without white space, the module of shared names, and arguments that only the examples need."""
    code = code.replace("features.", "")
    code = re.sub(r",(temperature|max_tokens|generation_kwargs|cache)=\w+", "", "".join(code.split()))
    return code.replace(",)", ")")


@pytest.mark.parametrize(("name", "pinned"), [*CLIENTS.items(), *AGENTS.items()], ids=[*CLIENTS, *AGENTS])
def test_versions_are_pinned(name: str, pinned: Any) -> None:
    assert is_pinned(name, pinned)
    assert re.fullmatch(r"\d+(\.\d+)+", version(name, pinned))


@pytest.mark.parametrize("name", [name for name, client in CLIENTS.items() if client.is_javascript])
def test_clients_run_with_the_node_that_they_bring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    client = CLIENTS[name]
    pins = environments.pins_file(name, client).read_text()
    (tmp_path / name).mkdir()
    (tmp_path / name / ".installed").write_text(pins)
    program, script = environments.command(name, client)
    assert Path(script).exists()
    brought = tmp_path / name / "node_modules/.bin/node"
    assert program == (brought if "node" in json.loads(pins)["dependencies"] else "node")


def test_a_program_that_takes_too_long_ends_with_what_it_has_started(tmp_path: Path) -> None:
    number = tmp_path / "number"
    lines = f"sleep 600 & echo $! > {number}; wait"
    ended = environments.call(["sh", "-c", lines], dict(os.environ), str(tmp_path), limit_seconds=1)
    assert ended.returncode == 124
    if number.exists():  # else the machine was too busy to start it
        state = Path(f"/proc/{number.read_text().strip()}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"  # Nobody has waited for it.


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("use_*.py")), ids=lambda path: path.stem)
def test_python_scripts_try_known_features(path: Path) -> None:
    call = ast.parse(path.read_text()).body[-1]
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    tried = [argument.id for argument in call.value.args if isinstance(argument, ast.Name)]
    assert tried
    assert set(tried) <= FEATURES.keys()


def test_the_documentation_has_what_each_client_needs() -> None:
    text = (ROOT / "docs/clients.md").read_text()
    for client in CLIENTS.values():
        assert client.language == "sh" or f"\n{client.setup}\n```" in text
    assert all(f"| {one.title} | " in text for one in (*CLIENTS.values(), *AGENTS.values()))
    for feature, meaning in FEATURES.items():
        assert f"| {feature.replace('_', ' ')} | {meaning} |" in text
