"""The shapes of runs: how agents change their prompts from turn to turn, modelled on recordings of coding agents.

A shape is a generator. It yields the requests of its agents, and receives the text of each answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.agents.texts import Excerpts, picture

Message = dict[str, Any]

NUM_TOOLS = 8
EVENTS_BEFORE_RESTART = 4  # The agent is stopped after this many events of an answer.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The lengths of runs. Lengths of texts are approximate, in tokens."""

    turns: int = 6
    """Turns of each agent."""

    system_tokens: int = 1500
    """Tokens of the system prompt, or of the tools, with which a run begins."""

    added_tokens: int = 150
    """Tokens that a tool's output adds in each turn."""

    pasted_tokens: int = 1500
    """Tokens that are pasted into the conversation before a client gives up."""

    answer_tokens: int = 24
    """Tokens of each answer, at most."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of an agent."""

    messages: Sequence[Message]
    tools: Sequence[Message] = ()
    agent: int = 0  # number of the agent in its run
    gives_up: bool = False  # The client leaves before the first token, and sends the same request again.
    leave_after: int | None = None  # the number of events after which the client leaves


Asks = Generator[Ask, str, None]


@dataclass(slots=True)
class Agent:
    """An agent with its history."""

    system: str
    excerpts: Excerpts
    sizes: Sizes
    history: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history.append({"role": "user", "content": f"Repair this:\n{self.excerpts.take(self.sizes.added_tokens)}"})

    def messages(self, system: str | None = None) -> list[Message]:
        return [{"role": "system", "content": system or self.system}, *self.history]

    def go_on(self, answer: str, pasted_tokens: int | None = None) -> None:
        """Add an answer and the output of the tool that it called to the history."""
        output = self.excerpts.take(pasted_tokens or self.sizes.added_tokens)
        self.history += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"Output:\n{output}"}]


@dataclass(frozen=True, slots=True)
class Run:
    """The input of a shape. Prompts begin with `name`, so that no run finds the prompts of another run in the cache."""

    name: str
    sizes: Sizes
    rng: random.Random

    def agents(self, number: int = 1) -> list[Agent]:
        excerpts = Excerpts(self.rng)
        system = f"Run {self.name}. You write code.\n{excerpts.take(self.sizes.system_tokens)}"
        return [Agent(system, excerpts, self.sizes) for _ in range(number)]


def grows(run: Run) -> Asks:
    """Each turn only appends to the one before."""
    (agent,) = run.agents()
    for _ in range(run.sizes.turns):
        agent.go_on((yield Ask(agent.messages())))


def clock(run: Run) -> Asks:
    """The system prompt ends with the time, so each turn changes all that follows it."""
    (agent,) = run.agents()
    for turn in range(run.sizes.turns):
        now = f"{agent.system}\nIt is 12:{turn:02}:17."
        agent.go_on((yield Ask(agent.messages(now))))


def tools(run: Run) -> Asks:
    """The last two tools swap places in each turn."""
    excerpts = Excerpts(run.rng)
    agent = Agent(f"Run {run.name}. You write code.", excerpts, run.sizes)
    listed: list[Message] = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}_of_run_{run.name}",
                "description": excerpts.take(run.sizes.system_tokens // NUM_TOOLS),
                "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
            },
        }
        for number in range(NUM_TOOLS)
    ]
    for _ in range(run.sizes.turns):
        agent.go_on((yield Ask(agent.messages(), list(listed))))
        listed[-2:] = reversed(listed[-2:])


def with_picture(run: Run) -> Asks:
    """The first question has a picture, which stays in the history."""
    (agent,) = run.agents()
    text = {"type": "text", "text": agent.history[0]["content"]}
    shown = {"type": "image_url", "image_url": {"url": picture(run.rng)}}
    agent.history[0] = {"role": "user", "content": [text, shown]}
    for _ in range(run.sizes.turns):
        agent.go_on((yield Ask(agent.messages())))


def summary(run: Run) -> Asks:
    """Halfway through, a summary replaces all turns but the last."""
    (agent,) = run.agents()
    for turn in range(run.sizes.turns):
        if turn == run.sizes.turns // 2:
            told = f"Summary of the work so far:\n{agent.excerpts.take(run.sizes.added_tokens)}"
            agent.history[:-2] = [{"role": "user", "content": told}]
        agent.go_on((yield Ask(agent.messages())))


def gives_up(run: Run) -> Asks:
    """In the second turn, the user pastes a long text. The client gives up before the first token, and sends the same
    again."""
    (agent,) = run.agents()
    for turn in range(run.sizes.turns):
        answer = yield Ask(agent.messages(), gives_up=turn == 1)
        agent.go_on(answer, run.sizes.pasted_tokens if turn == 0 else None)


def restart(run: Run) -> Asks:
    """Halfway through, the agent is stopped in the middle of an answer, and resumes with its history."""
    (agent,) = run.agents()
    for turn in range(run.sizes.turns):
        if turn == run.sizes.turns // 2:
            yield Ask(agent.messages(), leave_after=EVENTS_BEFORE_RESTART)
            last = agent.history[-1]
            agent.history[-1] = {**last, "content": f"{last['content']}\n\nThis was interrupted. Go on."}
        agent.go_on((yield Ask(agent.messages())))


def two_agents(run: Run) -> Asks:
    """Two agents with the same system prompt take turns."""
    both = run.agents(2)
    for _ in range(run.sizes.turns):
        for number, agent in enumerate(both):
            agent.go_on((yield Ask(agent.messages(), agent=number)))


SHAPES: dict[str, Callable[[Run], Asks]] = {
    "grows": grows,
    "clock": clock,
    "tools": tools,
    "picture": with_picture,
    "summary": summary,
    "gives-up": gives_up,
    "restart": restart,
    "two-agents": two_agents,
}
