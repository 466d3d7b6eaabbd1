"""The results as docs/clients.md shows them: clients and features, what each client needs, and what fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.clients.clients import CLIENTS, Client
from tools.clients.outcomes import FEATURES, OK
from tools.markdown import as_markdown


def page(results: Mapping[str, Any]) -> str:
    """Return the table with the notes below it, and a section on each client."""
    rows, notes = [["client", "version", *map(_spaced, FEATURES)]], []
    for name, result in results.items():
        client = CLIENTS[name]
        rows.append(
            [client.title, result["version"], *(_cell(result["outcomes"].get(feature)) for feature in FEATURES)]
        )
        notes += [f"- {client.title}: {sentence}" for sentence in _sentences(client, result["problems"])]
    by_setup: dict[str, Client] = {}
    for name in results:
        by_setup.setdefault(CLIENTS[name].setup, CLIENTS[name])  # versions of one client have the same
    parts = ["\n".join(as_markdown(rows)), "\n".join(notes), *map(_section, by_setup.values())]
    return "\n\n".join(filter(None, parts))


def _section(client: Client) -> str:
    return f"### {client.title}\n\n```{client.language}\n{client.setup}\n```"


def _cell(outcome: str | None) -> str:
    if outcome is None:
        return ""
    return "yes" if outcome == OK else "**no**"


def _sentences(client: Client, problems: Mapping[str, str]) -> list[str]:
    reasons = [f"{_spaced(feature)}: {reason}" for feature, reason in (client.faults | problems).items()]
    return [*filter(None, [client.note]), *reasons]


def _spaced(feature: str) -> str:
    return feature.replace("_", " ")
