"""`PromptReuse`: what the prompts of one request reused from earlier ones, for its record, its headers and its
answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from oaiserve.engine.request import PromptDone
from oaiserve.explain.reuse.outline import Outline
from oaiserve.explain.reuse.prefix_hashes import prefix_hashes
from oaiserve.explain.reuse.recent_prompts import ReadPrompt, RecentPrompts, Reuse
from oaiserve.explain.reuse.turns import turn_of
from oaiserve.facts.record import ReadAgain
from oaiserve.facts.turn import AgentRun, Turn

# Headers by which agents say which requests belong to one run, in order of precedence.
RUN_HEADERS = (
    "x-session-id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-session-affinity",
    "x-conversation-id",
)
# Headers with the id of the agent that sends the request, which is the run's own id for its main agent
AGENT_HEADERS = ("x-claude-code-agent-id", "thread-id")
# Headers of subagents that have a session of their own, with the session that started them
PARENT_HEADERS = ("x-parent-session-id", "x-codex-parent-thread-id")
MAX_RUN_CHARACTERS = 256
MAX_USER_AGENT_CHARACTERS = 64  # The program's name comes first.


def run_of(headers: Mapping[str, str]) -> AgentRun:
    """Return the run and the agent in the headers of a request."""
    session = _first_of(RUN_HEADERS, headers)
    agent = _first_of(AGENT_HEADERS, headers) if session else ""
    parent = _first_of(PARENT_HEADERS, headers)
    if session and agent in ("", session) and parent not in ("", session):
        return AgentRun(parent, session)
    return AgentRun(session, "" if agent == session else agent)


def _first_of(names: Sequence[str], headers: Mapping[str, str]) -> str:
    for name in names:
        if value := headers.get(name, ""):
            return value[:MAX_RUN_CHARACTERS]
    return ""


def session_in(metadata: object) -> str:
    """Return the `session_id` in the metadata of a body; "" if it has none."""
    session = metadata.get("session_id") if isinstance(metadata, Mapping) else None
    return session[:MAX_RUN_CHARACTERS] if isinstance(session, str) else ""


@dataclass(slots=True)
class PromptReuse:
    run: AgentRun = AgentRun()  # noqa: RUF009 - it is immutable
    is_named: bool = False  # The client has named the run.
    user_agent: str = ""
    compare_with: str = ""  # id of the answer with whose prompt the client wants this one compared
    is_known: bool = True  # This server knows the prompt of that answer.
    continues: str = ""  # the id of the stored answer that the prompt continues
    is_one_of_several: bool = False  # There may be other replicas, which have answered requests that are unknown here.
    outlines: list[Outline] = field(default_factory=list)
    by_prompt: dict[int, Reuse] = field(default_factory=dict)
    written_tokens: int = 0  # tokens of all prompts that are cached now and were not before

    def name_run(self, session: str) -> None:
        """Take the id of a run in the body of a request, unless its headers name the run."""
        if not self.run.id:
            self.run = AgentRun(session)
        self.is_named = bool(self.run.id)

    def read(
        self,
        done: PromptDone,
        response_id: str,
        request_id: str,
        client: str,
        recent: RecentPrompts,
        now_ns: int,
        held_elsewhere: float = 0.0,
    ) -> None:
        """Explain a prompt that the engine has read. The first one is known by the id of its answer in the API.
        `held_elsewhere` is the share of it that another replica has."""
        index = done.prompt_index
        if index in self.by_prompt or index >= len(self.outlines):
            return
        prompt = ReadPrompt(
            request_id,
            response_id if index == 0 else f"{response_id} {index}",
            client,
            self.run,
            done.times.scheduled or 0,
            now_ns,
            self.outlines[index],
            prefix_hashes(done.token_ids),
            done.cached_tokens,
            reads_cache=done.logprobs is None,
            held_elsewhere=held_elsewhere,
        )
        named = ""
        if index == 0 and (self.compare_with or self.continues):
            self.is_known = recent.find(client, self.compare_with) is not None
            named = self.compare_with if self.is_known else self.continues
            named = named if recent.find(client, named) is not None else ""
        self.by_prompt[index] = recent.explain(prompt, named, done.lost)
        if index == 0:
            self.run = prompt.run
        self.written_tokens += recent.num_written(prompt)

    @property
    def tokens(self) -> int:
        """Return how many tokens of all prompts were read again."""
        return sum(each.num_read_again for each in self.by_prompt.values())

    @property
    def reason(self) -> ReadAgain | None:
        """Return the reason why most tokens were read again."""
        again = max(self.by_prompt.values(), key=lambda each: each.num_read_again, default=None)
        return None if again is None else again.reason

    def turn(self, key_name: str) -> Turn | None:
        """Return the first prompt's position in its run, or None while its run is unknown."""
        if not self.outlines or not self.run.id:
            return None
        return turn_of(
            self.outlines[0],
            self.run,
            key_name,
            is_named=self.is_named,
            written_tokens=self.written_tokens,
            user_agent=self.user_agent,
        )

    @property
    def facts(self) -> dict[str, str | int]:
        """Return the comparison of the first prompt, as in the record; empty if there is no earlier prompt."""
        reuse = self.by_prompt.get(0)
        if reuse is None:
            return {}
        facts: dict[str, str | int] = {}
        if reuse.compared_with:
            facts = {"compared_with": reuse.compared_with, "age_ns": reuse.age_ns, "common_tokens": reuse.num_common}
        if (change := reuse.change) is not None:
            facts |= {} if change.place is None else {"place": change.place}
            facts |= {"option": change.option} if change.option else {}
        if reuse.lost is not None:
            facts["lost_tokens"] = reuse.lost.num_tokens
            if (eviction := reuse.lost.eviction) is not None:
                facts |= {"evicted_ns": reuse.at_ns - eviction.at_ns, "evicted_for": eviction.request_id}
        return facts
