"""Sends histories of all kinds of messages, blocks and items to three APIs, in this process.

A chat template renders each prompt, which is encoded, and a grammar is compiled, but no model computes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

from oaiserve.routes.adaptations import HEADER
from tests.histories.bodies import Bodies, Body
from tools.attack.in_process import App, encoding_engine

ROUTES = {
    "chat": ("/v1/chat/completions", None),
    "responses": ("/v1/responses", "/v1/responses/input_tokens"),
    "messages": ("/v1/messages", "/v1/messages/count_tokens"),
}
ALLOWED = {  # parts of messages, and why no lenient reading exists
    "reads text alone": "a picture or a sound cannot be read",
    "images and sounds are in messages": "a picture or a sound cannot be read",
    "needs either 'image_url' or 'file_id'": "there is no picture",
    "no video and no other files": "a file cannot be read",
    "there is no file": "a file cannot be read",
    "settings cannot change within a conversation": "the answer would not keep to them",
}


class Fault(Exception):
    """A history was not read. The message has the template, the route, what came back, and the body."""


class Target:
    """The server's app around one chat template."""

    def __init__(self, name: str, template: str) -> None:
        self.name = name
        self.num_sent = 0
        self._engine = encoding_engine(template)
        self._app = App(self._engine)
        self.close = self._app.close

    def check(self, api: str, body: Body) -> None:
        """Send a history to the routes of an API. Raises Fault."""
        path, counting = ROUTES[api]
        self._check(path, body)
        if counting is not None:
            self._check(counting, {key: value for key, value in body.items() if not key.startswith("max_")})

    def _check(self, path: str, body: Body) -> None:
        self.num_sent += 1
        self._engine.prompt = ""
        response = self._app.post(path, json.dumps(body).encode())
        if response.status_code == 200:
            if response.headers.get(HEADER) or all(word in self._engine.prompt for word in words(body)):
                return
            what = "200, but a text is neither in the prompt nor noted"
        else:
            message = str(response.json()["error"]["message"])
            if response.status_code == 400 and any(part in message for part in ALLOWED):
                return
            what = f"{response.status_code}: {message[:160]}"
        raise Fault(f"{self.name}, {path}: {what}: {json.dumps(body, ensure_ascii=False)}")


def words(body: Body) -> Iterator[str]:
    """Yield the words in texts that the model has to read: those of users, and of results of functions."""
    for entry in body.get("messages") or body.get("input") or ():
        if entry.get("role") == "user":
            yield from _words(entry.get("content"), ("text", "input_text", "tool_result"))
        elif entry.get("role") in ("tool", "function"):
            yield from _words(entry.get("content"), ("text",))
        elif str(entry.get("type")).endswith("_output"):
            yield from _words(entry.get("output"), ("input_text",))


def _words(content: Any, of: Sequence[str]) -> Iterator[str]:
    if isinstance(content, str):
        yield from re.findall(r"word\d+end", content)
    for part in content if isinstance(content, list) else ():
        if part.get("type") in of:
            yield from _words(part.get("text") or part.get("content") or "", of)


def drawn(seed: int, number: int, apis: Sequence[str]) -> list[tuple[str, Body]]:
    """Return a number of bodies for each API, as a function of the seed, in less time than Hypothesis takes."""
    bodies = Bodies(Random(seed))
    return [(api, getattr(bodies, api)()) for _ in range(number) for api in apis]


def attack(templates: Mapping[str, str], bodies: Sequence[tuple[str, Body]]) -> tuple[int, list[str]]:
    """Send the bodies with each template. Return how many requests that were, and the faults."""
    faults = []
    num_sent = 0
    for name, template in templates.items():
        with closing(Target(name, template)) as target:
            for api, body in bodies:
                try:
                    target.check(api, body)
                except Fault as fault:
                    faults.append(str(fault))
            num_sent += target.num_sent
    return num_sent, faults


def real_templates() -> dict[str, str]:
    """Return the chat templates in llama.cpp's source by the names of their files."""
    from tests.real.artefacts import LLAMA_CPP, fetched

    folder: Path = fetched(LLAMA_CPP) / "models/templates"
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}
