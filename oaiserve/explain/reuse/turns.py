"""Makes the `Turn` of a request from its first prompt: the agent's run that it belongs to, and the prompt's digests and
sizes."""

from __future__ import annotations

from collections import Counter
from functools import partial
from hashlib import blake2b

from oaiserve.explain.reuse.outline import ASSISTANT, DIGEST_BYTES, Outline
from oaiserve.facts.turn import AgentRun, Turn, TurnPrompt

TOOL_ROLES = ("tool", "function")
MAX_BEFORE = 4  # number of latest answers by which a replica with an earlier turn can be found
# Parts of a prompt by the roles of their messages. Any other role counts as "other".
_PARTS = {"system": "system", "developer": "system", "user": "user", ASSISTANT: "answers"} | dict.fromkeys(
    TOOL_ROLES, "tool_results"
)


def turn_of(
    outline: Outline, run: AgentRun, key_name: str, *, is_named: bool, written_tokens: int, user_agent: str = ""
) -> Turn:
    """Return the turn of a prompt. Its ids are hashes that include the API key's name, so that clients can't share
    ids."""
    return Turn(
        f"run_{_id_of(key_name, run.id)}",
        is_named,
        run.agent and f"agent_{_id_of(key_name, run.agent)}",
        written_tokens,
        partial(_prompt_of, outline),
        user_agent,
    )


def _prompt_of(outline: Outline) -> TurnPrompt:
    messages = outline.messages
    answers = [number for number, message in enumerate(messages) if message.role == ASSISTANT]
    hashed = blake2b(digest_size=DIGEST_BYTES)
    before = []
    start = 0
    for end in answers[-MAX_BEFORE:]:
        hashed.update(b"".join(message.digest for message in messages[start:end]))
        before.append(hashed.hexdigest())
        start = end
    since_answer = messages[start:]
    hashed.update(b"".join(message.digest for message in since_answer))
    sizes = Counter({"tools": sum(part.size for part in outline.tools)})
    for message in (*outline.system, *messages):
        sizes[_PARTS.get(message.role, "other")] += message.size
    return TurnPrompt(
        messages[0].digest.hex() if messages else "",
        any(message.role in TOOL_ROLES for message in since_answer),
        hashed.hexdigest(),
        tuple(before),
        {name: size for name, size in sizes.items() if size},
    )


def _id_of(key_name: str, name: str) -> str:
    return blake2b(f"{key_name} {name}".encode(), digest_size=DIGEST_BYTES).hexdigest()
