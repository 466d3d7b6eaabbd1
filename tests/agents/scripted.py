"""A server whose model speaks from a script. All else is real: tokenizer, chat template, engine, prefix cache, routes.

A turn of the script is a text, a call of a tool in the form of Hermes, or both. Texts name their number, and so the
history in a prompt says which turn is next, by these or by the results of calls, whatever else a client asks.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oaiserve.app import create_app
from oaiserve.checkpoints import demo
from oaiserve.config import Config, ServerOptions
from oaiserve.engine.request import TextPrompt
from oaiserve.engine.sequences.sequence import Sequence as Choice
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.facts.record import RequestRecord
from oaiserve.runtime import THREADS
from tests.engine.doubles import ScriptedRunner, make_engine
from tests.routes.doubles import FakeTelemetry
from tests.serving import running_server

CONTEXT = 65_536  # tokens
BLOCK = 16  # tokens
ASIDE = "A short title"  # what the model answers where no tools are offered
_NUMBERED = re.compile(r"Turn (\d+):")


@dataclass(frozen=True)
class Turn:
    """What the model does in one turn."""

    says: str  # "": nothing, as where a client forces calls
    tool: str = ""  # name of the tool to call; "": none, and the session ends
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def text(self, number: int) -> str:
        call = json.dumps({"name": self.tool, "arguments": self.arguments})
        said = f"Turn {number}: {self.says}" if self.says else ""
        return "\n".join(filter(None, [said, f"<tool_call>\n{call}\n</tool_call>" if self.tool else ""]))


@dataclass
class ScriptedServer:
    """A server that runs, and the records of its requests."""

    url: str
    telemetry: FakeTelemetry
    tokenizer: Tokenizer
    prompts: dict[str, str] = field(default_factory=dict)  # by the id of the request, as the model gets them
    bodies: list[tuple[str, bytes]] = field(default_factory=list)  # paths and bodies of all requests that were sent

    def records(self, number: int) -> list[RequestRecord]:
        """Return the records of the next requests, in the order in which they end. That may be after the answers."""
        return [self.telemetry.next_record() for _ in range(number)]


def next_turn(prompt: str, turns: Sequence[Turn], marker: str) -> str:
    """Return the model's text. A prompt without the `marker`, which the tools have, is not a part of the
    session."""
    if marker not in prompt:
        return ASIDE
    done = max(prompt.count("<tool_response>"), *map(int, _NUMBERED.findall(prompt)), 0)
    return turns[min(done, len(turns) - 1)].text(done + 1)


class Recording:
    """Keeps the bodies of requests."""

    def __init__(self, app: ASGIApp, bodies: list[tuple[str, bytes]]) -> None:
        self.app = app
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""

        async def recorded_receive() -> Message:
            nonlocal body
            message = await receive()
            if message["type"] == "http.request":
                body += message["body"]
                if body and not message.get("more_body"):
                    self._bodies.append((scope["path"], body))
            return message

        await self.app(scope, recorded_receive, send)


@contextmanager
def scripted_server(answer: Callable[[str], str]) -> Iterator[ScriptedServer]:
    """Serve a model that writes `answer(prompt)`, which is called with the text of a prompt."""
    options = ServerOptions(drain_timeout_seconds=5)
    tokenizer = Tokenizer.from_pretrained(demo.fetched())
    end = tokenizer.eos_token_id
    answers: dict[str, list[int]] = {}
    prompts: dict[str, str] = {}

    def token_of(choice: Choice) -> list[int]:
        if choice.request_id not in answers:
            prompts[choice.request_id] = prompt = tokenizer.decode(choice.token_ids[: choice.prompt_len])
            text = TextPrompt(answer(prompt), add_special_tokens=False)
            answers[choice.request_id] = [*tokenizer.encode(text), end]
        return [answers[choice.request_id][choice.num_generated]]

    engine = make_engine(
        ScriptedRunner(token_of),
        kv_blocks=4 * CONTEXT // BLOCK,
        block_size=BLOCK,
        max_step_tokens=2048,
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=frozenset([end]),
        max_model_len=CONTEXT,
        runtime=THREADS,
    )
    telemetry = FakeTelemetry()
    app = create_app(Config("demo", options), engine, telemetry)
    server = ScriptedServer("", telemetry, tokenizer, prompts)
    app.add_middleware(Recording, bodies=server.bodies)
    with running_server(app, options) as (server.url, _):
        yield server
