"""What a script reports, and how docs/clients.md shows it.

A script writes a JSON line with the features that it tries, then one for each, with an error if it failed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tools.clients.clients import CLIENTS, Client
from tools.markdown import as_markdown

# In the order of the table.
FEATURES = {
    "text": "an answer",
    "stream": "the same, streamed",
    "tools": "a required call, whose arguments fit the schema, and its result",
    "tools_streamed": "the same call, streamed",
    "auto": "the model may call a tool",
    "structured": "an answer of a user-defined type, which always validates",
    "responses": "`/v1/responses`: whole, streamed, and continued",
    "websocket": "two turns on the WebSocket of `/v1/responses`",
    "embeddings": "vectors, which equal the server's plain numbers",
    "speech": "the text of a sound: whole, streamed, with the time of each word, and translated",
    "load": "a load generator's run, without errors or missing tokens",
    "standard": "the client's standard tests",
    "documented": "what else its documentation shows: settings, steps, errors, options of its providers",
    "loglikelihood": "log-probabilities, which equal transformers' to 0.001 in float32",
}
OF_OTHER_SERVERS = ("embeddings", "speech")  # their servers are not behind the gateway in front of an engine
RUN_HERE = "<!-- not run: `make clients` -->"  # above a snippet, for the test that runs the docs' snippets
OK = ""  # an outcome is a sentence that says what went wrong


class InvalidReport(Exception):
    """A script wrote something else to stdout than its lines. The message says what."""


def parse(report: str, end: str) -> dict[str, str]:
    """Return the outcome of each feature that a script tries. `end` says how the script ended, for those that have
    none. Raises InvalidReport."""
    outcomes: dict[str, str] = {}
    for number, line in enumerate(report.splitlines()):
        try:
            match json.loads(line):
                case {"features": [*features]} if number == 0 and set(features) <= FEATURES.keys():
                    outcomes = dict.fromkeys(features, end)
                case {"feature": str(feature), **others} if feature in outcomes:
                    outcomes[feature] = str(others.get("error", OK))
                case _:
                    raise InvalidReport(f"line {number + 1} of its report is {line[:200]!r}")
        except json.JSONDecodeError:
            raise InvalidReport(f"line {number + 1} of its report is no JSON: {line[:200]!r}") from None
    if not outcomes:
        raise InvalidReport(f"it reported nothing: {end}")
    return outcomes


def page(results: Mapping[str, Any]) -> str:
    """Return the table with the notes below it, and a section on each client."""
    rows = [["client", "version", "examples"]]
    notes = []
    for name, result in results.items():
        client = CLIENTS[name]
        examples = [
            _cell(feature, result["outcomes"][feature]) for feature in FEATURES if feature in result["outcomes"]
        ]
        rows.append([client.title, result["version"], ", ".join(examples)])
        failed = [f"{_spaced(feature)}: {problem}" for feature, problem in result["problems"].items()]
        notes += [f"- {client.title}: {sentence}" for sentence in filter(None, [client.note, *failed])]
    by_setup: dict[str, Client] = {}
    for name in results:
        by_setup.setdefault(CLIENTS[name].setup, CLIENTS[name])  # versions of one client have the same
    libraries = [one for one in by_setup.values() if one.language != "sh"]  # the others have scripts to read
    sections = [f"### {one.title}\n\n{RUN_HERE}\n```{one.language}\n{one.setup}\n```" for one in libraries]
    parts = ["\n".join(as_markdown(rows)), "\n".join(notes), "## What you write", *sections]
    return "\n\n".join(filter(None, parts))


def table_of_engine(results: Mapping[str, Any]) -> str:
    """Return a table of what works through a gateway in front of an engine, and of what fails without it as well."""
    rows = [["client", "version", "works", "fails past the gateway, too", "fails only through it"]]
    for name, result in results.items():
        problems = result["problems"]
        outcomes = {one: outcome for one, outcome in result["outcomes"].items() if one not in OF_OTHER_SERVERS}
        works = [feature for feature in outcomes if outcomes[feature] == OK]
        fails = [feature for feature in outcomes if outcomes[feature] != OK and feature not in problems]
        cells = [", ".join(map(_spaced, features)) for features in (works, fails, problems)]
        rows.append([CLIENTS[name].title, result["version"], *cells])
    return "\n".join(as_markdown(rows))


def _cell(feature: str, outcome: str) -> str:
    return _spaced(feature) if outcome == OK else f"**not** {_spaced(feature)}"


def _spaced(feature: str) -> str:
    return feature.replace("_", " ")
