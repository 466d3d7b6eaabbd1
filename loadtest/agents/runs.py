"""Run the shapes against servers in turns, and count the tokens that each of them reads.

Only the server can report what it had cached. If it doesn't, only the number that it had to read is known.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Literal, get_args

from loadtest.agents.least import AlreadyRead, Needed, ReadText, text_of
from loadtest.agents.shapes import SHAPES, Ask, Run, Sizes
from loadtest.errors import UsageError
from loadtest.http_target import HttpOptions, HttpTarget
from loadtest.prompts import MOST_SEEDS, Call, Workload
from loadtest.sample import Sample

Shape = Literal["grows", "clock", "tools", "picture", "summary", "gives-up", "restart", "two-agents"]

# A client gives up after this share of the time that the server needs for the prompt, unless --give-up-seconds is set.
SHARE_BEFORE_GIVING_UP = 2 / 3
LEAST_WITH_TOOLS = 0.5  # with a lower share of the expected tokens, the chat template has left out the tools
NO_TOOLS = "its template writes no tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRuns:
    """The options that decide which runs are made."""

    shape: tuple[Shape, ...] = get_args(Shape)
    """Shape of the runs. May be repeated. Default: all. grows: each turn only adds. clock: a time ends the system
    prompt. tools: two tools change places. picture: the first question has one. summary: it replaces the old turns.
    gives-up: the client leaves before the first token, and tries again. restart: the agent is stopped in the middle of
    an answer. two-agents: two with the same system prompt take turns."""

    give_up_seconds: float | None = None
    """Time after which the client of the shape gives-up leaves. Default: two thirds of the time that the server needs
    for the prompt by its pace so far."""

    repeats: int = 1
    """Runs of each shape, each with other texts."""

    seed: int | None = None
    """Seed of the texts. Default: a new one, so that no server has them cached."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise UsageError(f"--repeats is {self.repeats}, but must be at least 1.")
        if self.give_up_seconds is not None and not self.give_up_seconds > 0:
            raise UsageError(f"--give-up-seconds is {self.give_up_seconds:g}, but must be more than 0.")


@dataclass(slots=True)
class Turn:
    """A request of a run. Counts are tokens; `cached` is None if the server does not report it."""

    prompt: int
    cached: int | None
    cached_by: str
    new: float
    again_at_least: float
    again_beyond: float | None
    first_token_seconds: float

    @property
    def beyond_seconds(self) -> float | None:
        """Return the part of the time to the first token that was spent on needlessly reading tokens again."""
        if self.again_beyond is None or self.cached is None:
            return None
        return self.first_token_seconds * self.again_beyond / max(1, self.prompt - self.cached)


@dataclass(slots=True)
class ShapeRun:
    """The requests of one run, and what was unusual about it."""

    url: str
    shape: str
    turns: list[Turn] = field(default_factory=list)
    kept_tokens: float = 0.0  # the most tokens that a cache had to keep between two requests
    note: str = ""
    error: str = ""  # why the run ended early


@dataclass(slots=True)
class Server:
    """A server, and how fast it reads prompts that are not cached."""

    url: str
    options: HttpOptions  # with the model's name filled in
    fresh_tokens: int = 0  # tokens of the first prompts, which are not cached
    fresh_characters: int = 0
    fresh_seconds: float = 0.0

    @property
    def seconds_per_token(self) -> float:
        return self.fresh_seconds / max(1, self.fresh_tokens)

    @property
    def tokens_per_character(self) -> float:
        return self.fresh_tokens / max(1, self.fresh_characters)


def measure(
    servers: Sequence[Server],
    options: AgentRuns,
    sizes: Sizes,
    show: Callable[[str], None],
    target_of: Callable[[Server], HttpTarget] | None = None,
) -> list[ShapeRun]:
    """Run all shapes on all servers in turns, and return the runs. `show` gets the name of each run at its start."""
    seed = secrets.randbelow(MOST_SEEDS) if options.seed is None else options.seed
    runs = []
    for repeat in range(options.repeats):
        for shape in options.shape:
            for server in servers[:: -1 if repeat % 2 else 1]:
                show(f"{shape} at {server.url}")
                name = f"{seed}-{repeat}-{shape}"
                run = Run(name, sizes, random.Random(name))
                runs.append(asyncio.run(_run(server, shape, run, options, target_of or _target)))
    return runs


def _target(server: Server) -> HttpTarget:
    return HttpTarget(server.options, Workload(temperature=0.0))


async def _run(
    server: Server, shape: str, run: Run, options: AgentRuns, target_of: Callable[[Server], HttpTarget]
) -> ShapeRun:
    target = target_of(server)
    try:
        client = _Client(server, run, options, target, ShapeRun(server.url, shape))
        await client.run()
        return client.result
    finally:
        target.is_stopped = True
        await target.close()


@dataclass(slots=True)
class _Client:
    """Makes one run."""

    server: Server
    made_from: Run
    options: AgentRuns
    target: HttpTarget
    result: ShapeRun
    read: AlreadyRead = field(default_factory=AlreadyRead)

    async def run(self) -> None:
        asks = SHAPES[self.result.shape](self.made_from)
        ask = next(asks)
        while True:
            answer = await self._ask(ask)
            if answer is None:
                return
            try:
                ask = asks.send(answer)
            except StopIteration:
                return

    async def _ask(self, ask: Ask) -> str | None:
        """Send a request, record it, and return the text of the answer, or None if it failed."""
        text = text_of(ask)
        if ask.gives_up:
            await self._give_up(ask, text)
        sample, answer = await self._send(ask)
        if sample.error is not None:
            self.result.error = f"{sample.error} {sample.error_message}".strip()
            return None
        if sample.is_abandoned:  # The client got the first events, so the whole prompt was read.
            self._note_read(ask, text, "", self._tokens_of(text), 0)
            return ""
        if not sample.prompt_tokens:
            self.result.error = "it reports no usage in streams"
            return None
        self._note(ask, text, answer, sample)
        return answer

    async def _send(self, ask: Ask, limit_seconds: float | None = None) -> tuple[Sample, str]:
        body = {"messages": list(ask.messages)} | ({"tools": list(ask.tools)} if ask.tools else {})
        call = Call("", self.made_from.sizes.answer_tokens, leave_after=ask.leave_after, body=body)
        prepared = self.target.prepare(0, call)
        return await self.target.exchange(prepared, monotonic_ns(), limit_seconds)

    async def _give_up(self, ask: Ask, text: str) -> None:
        """Send a request whose client leaves before the first token, and estimate how much of it was read."""
        prompt_tokens = self._tokens_of(text)
        num_new = self.read.needed(text, prompt_tokens).total
        needed_seconds = num_new * self.server.seconds_per_token
        limit_seconds = self.options.give_up_seconds or SHARE_BEFORE_GIVING_UP * needed_seconds
        sample, answer = await self._send(ask, limit_seconds)
        if sample.error != "timeout" or sample.event_ns:
            self.result.note = f"it began to answer within {limit_seconds:.2f} s, so the client did not give up"
            if sample.error is None:
                self._note(ask, text, answer, sample)
            return
        share = min(1.0, limit_seconds / max(1e-9, needed_seconds))
        num_read = prompt_tokens - num_new * (1 - share)
        part = text[: round(len(text) * num_read / max(1, prompt_tokens))]
        self.result.note = f"gave up after {limit_seconds:.2f} s, when about {num_new * share:,.0f} tokens were read"
        self.read.texts.append(ReadText(part, "", num_read, 0))

    def _tokens_of(self, text: str) -> int:
        """Estimate a prompt's tokens: those of the previous prompt, plus an estimate for the added text."""
        last = self.read.texts[-1] if self.read.texts else ReadText("", "", 0, 0)
        longer = len(text) - len(last.prompt) - len(last.answer)
        return round(last.num_tokens + longer * self.server.tokens_per_character)

    def _note(self, ask: Ask, text: str, answer: str, sample: Sample) -> None:
        prompt = sample.prompt_tokens
        seconds = sample.ttft_ns / 1e9
        if not self.read.texts:
            expected = len(text) * self.server.tokens_per_character
            if ask.tools and prompt < LEAST_WITH_TOOLS * expected:
                self.result.note = NO_TOOLS
            else:
                self.server.fresh_tokens += prompt
                self.server.fresh_characters += len(text)
                self.server.fresh_seconds += seconds
        needed = self.read.needed(text, prompt)
        cached = sample.cached_tokens if sample.cached_by else None
        beyond = None
        if cached is not None:
            # A cache can't have more than this, so a higher estimate was wrong.
            again = min(needed.again, max(0.0, prompt - cached - needed.new))
            needed = Needed(min(needed.new, prompt - cached), again)
            beyond = prompt - cached - needed.total
        self.result.turns.append(Turn(prompt, cached, sample.cached_by, needed.new, needed.again, beyond, seconds))
        self._note_read(ask, text, answer, prompt, sample.completion_tokens or 0)

    def _note_read(self, ask: Ask, text: str, answer: str, prompt_tokens: int, answer_tokens: int) -> None:
        self.read.add(ReadText(text, answer, prompt_tokens, answer_tokens), ask.agent)
        self.result.kept_tokens = max(self.result.kept_tokens, self.read.num_kept)
