"""Sends histories of all kinds of messages, blocks and items to three APIs: python -m tools.attack.histories

Each is sent to its route, and to the one that counts its tokens, in this process: with each chat template that
llama.cpp's source has, a prompt is rendered and encoded, and a grammar is compiled, but no model computes.

A 500 is a fault, and so is a 400 for which ALLOWED has no reason, because the same history comes back with each later
turn. A text of the user or of a result that is not in the prompt is one, too, unless a header says what was left out.
Faults are made as small as possible, and printed in JSON. Then the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from oaiserve.app import create_app
from oaiserve.checkpoints import demo as demo_files
from oaiserve.config import Config, ServerOptions
from oaiserve.engine.grammars.grammar import Grammars
from oaiserve.engine.request import Prompt, Request
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.http.fair_turns import at_once
from oaiserve.routes.adaptations import HEADER
from tests.routes.doubles import FakeEngine, FakeTelemetry
from tools.attack.history_bodies import MODEL, Bodies, Body

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
MOST_SHRINK_TRIES = 400


class EncodingEngine(FakeEngine):
    """An engine that renders, encodes and compiles as the real one does, and answers by its script."""

    def __init__(self, tokenizer: Tokenizer, grammars: Grammars) -> None:
        super().__init__()
        self.tokenizer: Any = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.max_model_len = 1 << 20
        self._grammars = grammars
        self.prompt = ""  # the text of the last prompt

    def _check(self, request: Request) -> None:
        if request.params.grammar is not None:
            self._grammars.compile(request.params.grammar, request.client)
        for prompt in request.prompts:
            self._read(prompt)
        self.submitted.queue.clear()

    def encode(self, prompt: Prompt, most_tokens: int) -> Any:
        self._read(prompt)
        return super().encode(prompt, most_tokens)

    def _read(self, prompt: Prompt) -> None:
        self.prompt = self.tokenizer.decode(at_once(self.tokenizer.encode_in_pieces(prompt)))


@cache
def demo() -> tuple[Tokenizer, Grammars]:
    tokenizer = Tokenizer.from_pretrained(demo_files.fetched())
    return tokenizer, Grammars(
        tokenizer.backend, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids
    )


def encoding_engine(template: str) -> EncodingEngine:
    """Return an engine with the demo model's tokenizer and another chat template."""
    tokenizer, grammars = demo()
    return EncodingEngine(Tokenizer(tokenizer.stored, template), grammars)


class Target:
    """The server's app around one chat template."""

    def __init__(self, name: str, engine: EncodingEngine, http: httpx.AsyncClient) -> None:
        self.name = name
        self.engine = engine
        self._http = http

    async def fault(self, path: str, body: Body) -> str | None:
        """Send a body, and return what is wrong with the answer, without what differs between bodies."""
        self.engine.prompt = ""
        response = await self._http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        if response.status_code == 200:
            if response.headers.get(HEADER):
                return None
            lost = [word for word in words(body) if word not in self.engine.prompt]
            return "200, but a text is neither in the prompt nor noted" if lost else None
        message = str(response.json()["error"]["message"])
        if response.status_code == 400 and any(part in message for part in ALLOWED):
            return None
        return f"{response.status_code}: {re.sub(r'[0-9]+', 'N', message)[:160]}"


@asynccontextmanager
async def target(name: str, template: str) -> AsyncIterator[Target]:
    engine = encoding_engine(template)
    app = create_app(Config(MODEL, ServerOptions()), engine, FakeTelemetry())  # type: ignore[arg-type]
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            yield Target(name, engine, http)


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


@dataclass
class Fault:
    what: str
    path: str
    body: Body
    templates: Counter[str] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any]:
        templates = dict(self.templates.most_common(3))
        return {
            "what": self.what,
            "route": self.path,
            "templates": len(self.templates),
            "as": templates,
            "body": self.body,
        }


async def shrunk(to: Target, path: str, body: Body, what: str) -> Body:
    """Return the smallest body, of those tried, with the same fault."""
    tries = 0
    while tries < MOST_SHRINK_TRIES:
        for smaller in _smaller(body):
            tries += 1
            if await to.fault(path, smaller) == what:
                body = smaller
                break
            if tries >= MOST_SHRINK_TRIES:
                return body
        else:
            return body
    return body


def _smaller(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield copies of a value that lack one part of it, the large parts first."""
    if depth and isinstance(value, dict | list) and value:
        yield type(value)()
    if isinstance(value, dict):
        for key in value:
            yield {other: value[other] for other in value if other != key}
        for key, inner in value.items():
            for smaller in _smaller(inner, depth + 1):
                yield {**value, key: smaller}
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield value[:number] + value[number + 1 :]
            for smaller in _smaller(inner, depth + 1):
                yield [*value[:number], smaller, *value[number + 1 :]]


def drawn(seed: int, number: int, apis: Sequence[str]) -> list[tuple[str, Body]]:
    """Return a number of bodies for each API, as a function of the seed."""
    bodies = Bodies(seed)
    return [(api, getattr(bodies, api)()) for _ in range(number) for api in apis]


async def attack(
    templates: Mapping[str, str], bodies: Sequence[tuple[str, Body]], *, shrinks: bool = True
) -> tuple[int, list[Fault]]:
    """Send the bodies with each template. Return how many requests that were, and the faults."""
    faults: dict[tuple[str, str], Fault] = {}
    num_sent = 0
    for name, template in templates.items():
        async with target(name, template) as to:
            for api, body in bodies:
                path, counting = ROUTES[api]
                uncounted = {key: value for key, value in body.items() if not key.startswith("max_")}
                for where, sent in ((path, body), (counting, uncounted)):
                    if where is None:
                        continue
                    num_sent += 1
                    what = await to.fault(where, sent)
                    if what is None:
                        continue
                    fault = faults.get((where, what))
                    if fault is None:
                        small = await shrunk(to, where, sent, what) if shrinks else sent
                        fault = faults[where, what] = Fault(what, where, small)
                    fault.templates[name] += 1
                    break
    return num_sent, list(faults.values())


def real_templates() -> dict[str, str]:
    """Return the chat templates in llama.cpp's source by the names of their files."""
    from tests.real.artefacts import LLAMA_CPP, fetched

    folder: Path = fetched(LLAMA_CPP) / "models/templates"
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--number", type=int, default=100, help="bodies for each API")
    parser.add_argument("--api", action="append", choices=ROUTES, default=[], help="repeatable; default: all")
    parser.add_argument("--template", default="", help="only those whose name has this")
    parser.add_argument("--json", type=Path, help="write the faults to this file")
    options = parser.parse_args(argv)
    logging.disable(logging.ERROR)
    seed = int(time.time()) if options.seed is None else options.seed
    templates = {name: text for name, text in real_templates().items() if options.template.lower() in name.lower()}
    bodies = drawn(seed, options.number, options.api or list(ROUTES))
    started = time.monotonic()
    num_sent, faults = asyncio.run(attack(templates, bodies))
    seconds = time.monotonic() - started
    lines = [json.dumps(fault.as_json(), ensure_ascii=False) for fault in faults]
    print("\n".join(lines))
    if options.json:
        options.json.write_text("\n".join(lines) + "\n")
    print(
        f"Seed {seed}: {num_sent:,} requests with {len(templates)} templates in {seconds:.0f} s "
        f"({num_sent / seconds:.0f}/s), {len(faults)} kinds of faults.",
        file=sys.stderr,
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
