"""`RecentPrompts` finds the earlier prompt to compare a prompt with, and explains which tokens were computed again.

The event loop calls it once for each prompt, after its tokens are computed. Prompts of different clients are never
compared: an explanation must not reveal what others sent.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TypeVar

from oaiserve.explain.reuse.outline import Change, Outline, Part
from oaiserve.explain.reuse.prefix_hashes import PrefixHashes, num_common
from oaiserve.facts.lost_prefix import LostPrefix
from oaiserve.facts.record import ReadAgain
from oaiserve.facts.turn import AgentRun

Key = TypeVar("Key")

MAX_PROMPTS = 1024
MAX_TOKENS = 2**22  # tokens of all prompts, 4 bytes each
MAX_PARTS = 2**17  # parts of all prompts, about 200 bytes each
MAX_PART_KEYS = 64  # parts by which a prompt looks for others: the latest messages, then system messages and tools
FIRST_CHECKPOINT = 16  # Prompts are found by the hashes of their first 16, 32, 64, ... tokens.
# With these reasons, only tokens of the common beginning were read again, and none after it.
_WITHOUT_CHANGE = (ReadAgain.EVICTED, ReadAgain.STATE, ReadAgain.NOT_YET, ReadAgain.OFF)


@dataclass(eq=False)
class ReadPrompt:
    """A prompt that the engine has read."""

    request_id: str
    response_id: str  # the id of its answer in the API
    client: str
    run: AgentRun  # If it is unnamed, `RecentPrompts` sets it.
    scheduled_ns: int  # when its first tokens entered a step
    at_ns: int  # when it was read
    outline: Outline
    hashes: PrefixHashes
    num_cached: int
    reads_cache: bool = True  # False with prompt_logprobs, which need the logits of every token
    held_elsewhere: float = 0.0  # share of the prompt's beginning that another replica has, as the router estimates

    @cached_property
    def part_keys(self) -> list[tuple[str, Part]]:
        """The keys by which later prompts of the same client find this one through a common part."""
        return [(self.client, part) for part in islice(self.outline.parts, MAX_PART_KEYS)]

    @cached_property
    def checkpoint_keys(self) -> list[tuple[str, int, int]]:
        """The keys by which later prompts find this one: the client, a length of 16, 32, 64, ... tokens, and the
        prefix's hash."""
        found = []
        length = FIRST_CHECKPOINT
        while length <= len(self.hashes):
            found.append((self.client, length, int(self.hashes[length - 1])))
            length *= 2
        return found


@dataclass(frozen=True, slots=True)
class Reuse:
    """The tokens that a prompt reused. `num_cached`, `num_read_again` and `num_new` add up to all of its tokens."""

    num_cached: int
    num_read_again: int  # After a change, this is estimated from the sizes of the unchanged parts.
    num_new: int
    change: Change | None = None  # why it didn't reuse the whole earlier prompt; None if it did
    num_missed: int = 0  # tokens that would have been cached if it had reused the earlier prompt
    compared_with: str = ""  # id of the earlier request; "": no similar prompt was found
    age_ns: int = 0  # time since the earlier prompt was read
    num_common: int = 0  # length of the common prefix in tokens
    lost: LostPrefix | None = None
    at_ns: int = 0  # when its prompt was read

    @property
    def reason(self) -> ReadAgain | None:
        """Return why tokens were read again, or None if none were."""
        return self.change.reason if self.change is not None and self.num_read_again else None


class RecentPrompts:
    """The latest prompts of all clients, within limits of number and size."""

    def __init__(self, block_size: int, *, has_cache: bool) -> None:
        self._block_size = block_size
        self._has_cache = has_cache
        self._prompts: OrderedDict[str, ReadPrompt] = OrderedDict()  # by response id, the oldest first
        self._by_run: dict[tuple[str, AgentRun], str] = {}  # response ids of the latest prompts, by client and run
        self._by_agent: dict[tuple[str, str], str] = {}  # the same, by client and subagent
        self._by_part: dict[tuple[str, Part], str] = {}
        self._by_checkpoint: dict[tuple[str, int, int], str] = {}
        self._num_tokens = 0
        self._num_parts = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def find(self, client: str, response_id: str) -> ReadPrompt | None:
        """Return the client's prompt with this answer, or None if it has been forgotten."""
        prompt = self._prompts.get(response_id)
        return prompt if prompt is not None and prompt.client == client else None

    def before(self, prompt: ReadPrompt, named: str = "") -> ReadPrompt | None:
        """Return the earlier prompt that explains this one best: the one of the `named` answer, else the last one of
        the same run, else the one with the most parts in common, else the one with the longest common text.

        The first prompt of a named run is only compared by its text, because having a message in common with another
        run means little.
        """
        if named:
            return self.find(prompt.client, named)
        if prompt.run.id:
            last = self._by_run.get((prompt.client, prompt.run))
            return self._with_same_text(prompt) if last is None else self._prompts[last]
        return self._with_same_parts(prompt) or self._with_same_text(prompt)

    def _with_same_parts(self, prompt: ReadPrompt) -> ReadPrompt | None:
        shared = Counter(filter(None, map(self._by_part.get, prompt.part_keys)))
        if not shared:
            return None
        most = max(shared.values())
        return max((self._prompts[key] for key, number in shared.items() if number == most), key=_when)

    def _with_same_text(self, prompt: ReadPrompt) -> ReadPrompt | None:
        for checkpoint in reversed(prompt.checkpoint_keys):
            if (response_id := self._by_checkpoint.get(checkpoint)) is not None:
                return self._prompts[response_id]
        return None

    def explain(self, prompt: ReadPrompt, named: str = "", lost: LostPrefix | None = None) -> Reuse:
        """Compare this prompt with that of the `named` answer, or else with the best match, remember it, and return its
        reuse."""
        prompt.run = self._whole_run(prompt)
        earlier = self.before(prompt, named)
        reuse = self._compared(prompt, earlier, lost)
        if not prompt.run.id:
            prompt.run = self._continued(prompt, earlier)
        self._remember(prompt)
        return reuse

    def _whole_run(self, prompt: ReadPrompt) -> AgentRun:
        """Return the prompt's run. A nested subagent may name only its parent agent, so the parent's run is looked
        up."""
        starter = self._by_agent.get((prompt.client, prompt.run.id)) if prompt.run.agent else None
        return prompt.run if starter is None else AgentRun(self._prompts[starter].run.id, prompt.run.agent)

    def _continued(self, prompt: ReadPrompt, earlier: ReadPrompt | None) -> AgentRun:
        """Return the run of the earlier prompt if this one continues it, or else a new run."""
        if earlier is not None and prompt.outline.continues(earlier.outline):
            return earlier.run
        return AgentRun(prompt.response_id)

    def num_written(self, prompt: ReadPrompt) -> int:
        """Return how many of the prompt's tokens are cached now and were not before. Only full blocks are cached."""
        num_full = len(prompt.hashes) // self._block_size * self._block_size
        return max(0, num_full - prompt.num_cached) if self._has_cache else 0

    def _compared(self, prompt: ReadPrompt, earlier: ReadPrompt | None, lost: LostPrefix | None) -> Reuse:
        num_tokens = len(prompt.hashes)
        num_cached = min(prompt.num_cached, num_tokens)
        why = None if lost is None else Change(_reason_of(lost))
        num_again = 0 if lost is None else min(lost.num_tokens, num_tokens - num_cached)
        common = num_missed = 0
        if earlier is not None:
            common = num_common(earlier.hashes, prompt.hashes)
            if prompt.outline.has_other_images(earlier.outline):
                # All images have the same placeholder tokens, so tokens in common prove nothing. Cached tokens are
                # known to be equal.
                common = min(common, num_cached)
            num_missed = max(0, min(len(earlier.hashes), num_tokens) - num_cached)
            why = self._why(prompt, earlier, common, num_missed, lost)
            num_again = 0 if why is None else self._num_again(prompt, earlier, why, common)
        num_elsewhere = int(prompt.held_elsewhere * num_tokens) - num_cached
        if num_elsewhere > max(self._block_size, common - num_cached):
            # The comparison on this replica doesn't matter, because another replica has read a later prompt.
            why = Change(ReadAgain.OTHER_REPLICA)
            num_again = num_elsewhere
        return Reuse(
            num_cached,
            num_again,
            num_tokens - num_cached - num_again,
            why,
            num_missed,
            "" if earlier is None else earlier.request_id,
            0 if earlier is None else max(0, prompt.at_ns - earlier.at_ns),
            common,
            lost,
            prompt.at_ns,
        )

    def _num_again(self, prompt: ReadPrompt, earlier: ReadPrompt, why: Change, common: int) -> int:
        """Return how many tokens were read again, given the length of the common prefix. After a change, the tokens of
        unchanged later parts count, too."""
        num_again = max(0, common - prompt.num_cached)
        if why.reason not in _WITHOUT_CHANGE:
            num_after = len(earlier.hashes) - max(common, prompt.num_cached)
            num_again += round(num_after * earlier.outline.share_kept(prompt.outline, why))
        num_again = min(num_again, len(prompt.hashes) - prompt.num_cached)
        # The last token and those of a partial block are always computed.
        return num_again if num_again > self._block_size else 0

    def _why(
        self, prompt: ReadPrompt, earlier: ReadPrompt, common: int, num_missed: int, lost: LostPrefix | None
    ) -> Change | None:
        """Return why a prompt didn't reuse all of an earlier one. If most of the missed tokens are in the common
        prefix, a change after it is not the reason."""
        if num_missed <= self._block_size:
            return None
        change = prompt.outline.change_since(earlier.outline)
        if change is not None and change.reason in (ReadAgain.MODEL, ReadAgain.SALT):
            return change
        if not (self._has_cache and prompt.reads_cache):
            return Change(ReadAgain.OFF)
        if common - prompt.num_cached > num_missed // 2:
            if lost is not None:
                return Change(_reason_of(lost))
            # Old evictions are no longer on record, but a prompt that had been read before must have been cached.
            return Change(ReadAgain.NOT_YET if prompt.scheduled_ns < earlier.at_ns else ReadAgain.EVICTED)
        return Change(ReadAgain.TEXT) if change is None else change

    def _remember(self, prompt: ReadPrompt) -> None:
        key = prompt.response_id
        if key in self._prompts:  # A gateway has retried the request with the same ids.
            self._forget(key)
        self._prompts[key] = prompt
        self._num_tokens += len(prompt.hashes)
        self._num_parts += prompt.outline.num_parts
        self._by_run[prompt.client, prompt.run] = key
        if prompt.run.agent:
            self._by_agent[prompt.client, prompt.run.agent] = key
        self._by_part.update(dict.fromkeys(prompt.part_keys, key))
        self._by_checkpoint.update(dict.fromkeys(prompt.checkpoint_keys, key))
        while len(self._prompts) > 1 and (
            len(self._prompts) > MAX_PROMPTS or self._num_tokens > MAX_TOKENS or self._num_parts > MAX_PARTS
        ):
            self._forget(next(iter(self._prompts)))

    def _forget(self, key: str) -> None:
        prompt = self._prompts.pop(key)
        self._num_tokens -= len(prompt.hashes)
        self._num_parts -= prompt.outline.num_parts
        _remove(self._by_run, [(prompt.client, prompt.run)], key)
        _remove(self._by_agent, [(prompt.client, prompt.run.agent)], key)
        _remove(self._by_part, prompt.part_keys, key)
        _remove(self._by_checkpoint, prompt.checkpoint_keys, key)


def _when(prompt: ReadPrompt) -> int:
    return prompt.at_ns


def _reason_of(lost: LostPrefix) -> ReadAgain:
    return ReadAgain.STATE if lost.eviction is None else ReadAgain.EVICTED


def _remove(table: dict[Key, str], keys: Iterable[Key], value: str) -> None:
    """Remove the keys that still have this value."""
    for key in keys:
        if table.get(key) == value:
            del table[key]
