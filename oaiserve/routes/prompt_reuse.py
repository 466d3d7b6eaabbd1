"""`PromptReuse`: what the prompts of one request reused of earlier ones, for its record, its headers and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from oaiserve.engine.request import PromptDone
from oaiserve.explain.reuse.outline import Outline
from oaiserve.explain.reuse.prefix_hashes import prefix_hashes
from oaiserve.explain.reuse.recent_prompts import ReadPrompt, RecentPrompts, Reuse
from oaiserve.facts.record import ReadAgain
from oaiserve.facts.times import monotonic_ns

# Headers by which agents say which requests belong to one run, in the order in which they are believed.
RUN_HEADERS = (
    "x-session-id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-session-affinity",
    "x-conversation-id",
)
MAX_RUN_CHARACTERS = 256


def run_of(headers: Mapping[str, str]) -> str:
    """Return the id of the agent's run in the headers of a request; "" if it names none."""
    for name in RUN_HEADERS:
        if value := headers.get(name, ""):
            return value[:MAX_RUN_CHARACTERS]
    return ""


@dataclass(slots=True)
class PromptReuse:
    run: str = ""  # as `run_of` returns it
    compare_with: str = ""  # the id of the answer whose prompt the client wants to be compared
    is_known: bool = True  # whether the prompt of that answer is known
    outlines: list[Outline] = field(default_factory=list)
    by_prompt: dict[int, Reuse] = field(default_factory=dict)
    written_tokens: int = 0  # tokens of all prompts that are cached now and were not before

    def read(self, done: PromptDone, response_id: str, request_id: str, client: str, recent: RecentPrompts) -> None:
        """Explain a prompt that the engine has read. The first one is known by the id of its answer in the API."""
        index = done.prompt_index
        if index in self.by_prompt or index >= len(self.outlines):
            return
        prompt = ReadPrompt(
            request_id,
            response_id if index == 0 else f"{response_id} {index}",
            client,
            self.run,
            monotonic_ns(),
            self.outlines[index],
            prefix_hashes(done.token_ids),
            done.cached_tokens,
            reads_cache=done.logprobs is None,
        )
        if index == 0 and self.compare_with:
            self.is_known = recent.find(client, self.compare_with) is not None
        named = self.compare_with if index == 0 and self.is_known else ""
        self.by_prompt[index] = recent.explain(prompt, named, done.lost)
        self.written_tokens += recent.num_written(prompt)

    @property
    def tokens(self) -> int:
        """Return how many tokens of all prompts were read again."""
        return sum(each.num_read_again for each in self.by_prompt.values())

    @property
    def reason(self) -> ReadAgain | None:
        """Return why most of them were read again."""
        again = max(self.by_prompt.values(), key=lambda each: each.num_read_again, default=None)
        return None if again is None else again.reason

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
