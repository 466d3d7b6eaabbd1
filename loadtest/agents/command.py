"""`oaiserve bench agents`: its options, its servers, and what it prints."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from loadtest.agents.report import as_json, shown
from loadtest.agents.runs import AgentRuns, Server, measure
from loadtest.agents.shapes import Sizes
from loadtest.errors import UsageError
from loadtest.http_target import HttpOptions
from loadtest.server import addressed, client_for, first_model, reaching

WARMING = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentServers:
    """The servers to compare. Their runs alternate."""

    url: tuple[str, ...] = ()
    """Address of a server, with or without /v1. May be repeated. Default: that of the server that started last on this
    machine."""

    model: str | None = None
    """Name of the model. Default: the first that each server lists."""

    api_key: str | None = None
    """Sent as "Authorization: Bearer KEY". Default: $OPENAI_API_KEY."""

    extra_body: str | None = None
    """JSON object to add to each request."""

    timeout_seconds: float = 600.0
    """Time after which a request counts as failed."""

    json: Path | None = None
    """Write every request to this file as JSON."""


def opened(options: AgentServers) -> list[Server]:
    """Return the servers after each has answered once. Raises UsageError, and StartupError if no address is given and
    no server runs on this machine."""
    return [_opened(options, url) for url in options.url or (None,)]


def _opened(options: AgentServers, url: str | None) -> Server:
    http = addressed(
        HttpOptions(
            url=url,
            model=options.model,
            endpoint="chat",
            extra_body=options.extra_body,
            api_key=options.api_key,
            timeout_seconds=options.timeout_seconds,
            # Turns are seconds apart, and servers close idle connections.
            header=("connection: close",),
            trace_share=0,
        )
    )
    with client_for(http) as client, reaching(http.url):
        model = http.model or first_model(client)
        answer = client.post("/v1/chat/completions", json=WARMING | {"model": model}, timeout=http.timeout_seconds)
    if answer.status_code != 200:
        raise UsageError(f"{http.url} answers {answer.status_code} to a first question: {answer.text[:200]}")
    return Server(http.url or "", replace(http, model=model))


def run(options: AgentServers, runs: AgentRuns, sizes: Sizes) -> int:
    """Make the runs, print the report, and return the exit code: 1 if a run was not completed."""
    found = opened(options)
    made = measure(found, runs, sizes, lambda title: print(title, file=sys.stderr, flush=True))
    titles = {server.url: f"{server.url}, {server.options.model}, {sizes.turns} turns" for server in found}
    print(shown(made, titles), end="")
    if options.json is not None:
        try:
            content = {"runs": as_json(made), "sizes": asdict(sizes)}
            options.json.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise UsageError(f"--json is '{options.json}', which cannot be written: {error.strerror}.") from error
    return int(any(run.error for run in made))
