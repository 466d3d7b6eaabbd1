"""`Turn`: what is recorded about a request that belongs to an agent's run. It has hashes and sizes, but no text. Stdlib
only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class AgentRun(NamedTuple):
    """The run and the agent that a request belongs to. Every id is "" if it is unknown."""

    id: str = ""
    agent: str = ""  # the subagent's id; "" for the main agent, or if the client names no agent


class TurnPrompt(NamedTuple):
    """The prompt of a turn. `digest` and `before` let a gateway find the replica that had the turn before this one."""

    thread: str  # digest of the first message; a run may have several conversations
    after_tools: bool  # whether tool results followed the last answer, and not only a user's message
    digest: str  # digest of all messages
    before: tuple[str, ...]  # digests of the messages up to each of the latest answers
    sizes: Mapping[str, int]  # bytes of the prompt's parts by role


@dataclass(frozen=True, slots=True)
class Turn:
    """The place of a request in an agent's run."""

    run: str  # the same on all replicas if the client names the run
    is_named: bool  # False if the run was recognized because a prompt continues an earlier one
    agent: str  # "" for the main agent
    written_tokens: int  # tokens of its prompts that are cached now and were not before
    # Describes its first prompt. The call takes long for many messages, and the function holds all of their digests.
    prompt: Callable[[], TurnPrompt]
    user_agent: str = ""  # the request's header, truncated
