"""A coding agent or agent framework whose sessions run against the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.agents.scripted import Turn


@dataclass(frozen=True)
class Agent:
    """An agent, how it is started so that it asks this server, and what the model does."""

    title: str
    packages: tuple[str, ...]  # the version of the first is shown
    command: str  # shell command, run in the folder of the project
    turns: tuple[Turn, ...]
    marker: str  # Prompts of the tool's loop have this text, and others don't.
    is_javascript: bool = True
    needs_torch: bool = False
    made_by: None = None
    note: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
