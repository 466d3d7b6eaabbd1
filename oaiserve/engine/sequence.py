"""The mutable state of one sequence: token ids, no text and no tensors. A sequence never leaves the engine thread."""

from __future__ import annotations

from array import array
from enum import Enum

from oaiserve.engine.blocks import BlockHash
from oaiserve.engine.drafting.lookup import Lookup
from oaiserve.engine.grammars.constraint import Constraint
from oaiserve.engine.request import SamplingParams
from oaiserve.explain.causes import RequestCauses
from oaiserve.facts.record import WaitReason


class Place(Enum):
    """The place where the scheduler has a sequence."""

    NOWHERE = 0
    WAITING = 1
    PARKED = 2  # until another sequence has computed their common prefix
    RUNNING = 3


class TokenCounts:
    """The distinct `ids` of a prompt and its answer, and how many `times` each was generated, in arrays for NumPy."""

    def __init__(self, prompt: list[int]) -> None:
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt))}
        self.ids = array("q", self._places)
        self.times = array("q", bytes(8 * len(self.ids)))
        self.num_added = 0

    def add(self, generated: list[int]) -> None:
        """Count the next tokens of the answer."""
        for token_id in generated:
            place = self._places.setdefault(token_id, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token_id)
                self.times.append(0)
            self.times[place] += 1
        self.num_added += len(generated)

    def copy(self) -> TokenCounts:
        """Return an independent copy of the counts."""
        copied = TokenCounts([])
        copied._places, copied.ids, copied.times = self._places.copy(), self.ids[:], self.times[:]
        copied.num_added = self.num_added
        return copied


class Client:
    """A client with waiting or running sequences, and its service. Written by WaitingQueue."""

    __slots__ = ("has_turn", "name", "num_running", "num_waiting", "service", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.service = 0  # prompt tokens and generated tokens, weighted
        self.waiting: list[tuple[tuple[int, ...], Sequence]] = []  # a heap by key
        self.num_waiting = 0
        self.has_turn = False  # in the order of clients
        self.num_running = 0  # written by Scheduler

    @property
    def is_present(self) -> bool:
        return self.num_waiting + self.num_running > 0


class Sequence:
    """One choice of one prompt. Its state follows from two numbers, `num_computed <= num_tokens`.

    It decodes if one token is left to compute. With more it prefills: a prompt, or tokens lost by preemption.
    `num_tokens` includes tokens that a step under way draws, whose ids are not in `token_ids` yet. Each group of fields
    has one writer, which its comment names.
    """

    __slots__ = (
        "adapter",
        "bad_words",
        "blocks",
        "cache_salt",
        "causes",
        "client",
        "client_name",
        "constraint",
        "draft",
        "draft_is_models",
        "draw_key",
        "hashes",
        "index",
        "is_whole",
        "key",
        "last_token_ns",
        "lookup",
        "max_len",
        "needs_ids",
        "num_cached",
        "num_charged",
        "num_computed",
        "num_overtaken",
        "num_preemptions",
        "num_tokens",
        "own_wait",
        "params",
        "place",
        "priority",
        "prompt_len",
        "request_id",
        "second_start",
        "siblings",
        "state",
        "state_ends",
        "stop_ids",
        "token_counts",
        "token_ids",
        "wait_totals_ns",
        "waits_ns",
        "wants_prompt_logprobs",
    )

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        *,
        max_len: int,
        stop_ids: frozenset[int] = frozenset(),
        draw_key: int = 0,
        priority: int = 0,
        cache_salt: str = "",
        adapter: int = 0,
        client_name: str = "",
        bad_words: list[list[int]] | None = None,
        constraint: Constraint | None = None,
        is_whole: bool = False,
        second_start: int | None = None,
    ) -> None:
        # written here, then fixed
        self.request_id = request_id
        self.index = index
        self.params = params
        self.prompt_len = len(prompt)
        self.max_len = max_len  # prompt and answer together, in tokens
        self.stop_ids = stop_ids  # ids that end it: end-of-sequence unless ignored, and the client's stop_token_ids
        self.draw_key = draw_key  # 64 bits: with the position, all the randomness there is
        self.priority = priority  # lower is earlier, where the policy asks for it
        self.cache_salt = cache_salt  # only sequences with the same salt share cached blocks
        self.adapter = adapter  # its number, or 0; the salt has it, too
        self.client_name = client_name  # clients take turns, where the policy asks for it
        self.bad_words = bad_words or []  # token ids that must not be generated in this order
        self.constraint = constraint  # by a grammar, on its answer
        # Computed in one step, from its first to its last token, and nothing is kept of it: it is pooled.
        self.is_whole = is_whole
        self.second_start = second_start  # where the second text of a pair begins
        # Whether its logits are edited by the ids before, on the host, so that all of them must be known when it draws.
        self.needs_ids = (
            constraint is not None
            or params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
            or any(len(word) > 1 for word in self.bad_words)
        )
        # written by Scheduler
        self.token_ids = list(prompt)
        self.num_tokens = len(prompt)  # including those that a step under way draws
        self.num_computed = 0  # tokens whose keys and values are in `blocks` when the steps under way have ended
        self.num_cached = 0  # prompt tokens that were in the prefix cache when it was first admitted
        self.blocks: list[int] = []
        self.state: int | None = None  # its place in the pool of states, where the model's layers keep one
        self.state_ends: list[int] = []  # the numbers of tokens of which its state is to be kept for other sequences
        self.hashes: list[BlockHash] = []  # of its first full blocks
        self.siblings: list[Sequence] = []  # other choices, which wait until this one has computed the prompt
        self.place = Place.NOWHERE
        self.key: tuple[int, ...] = ()
        self.num_overtaken = 0
        self.num_preemptions = 0
        # written by WaitingQueue
        self.client: Client  # since it waits
        self.num_charged = 0  # first tokens of the prompt that count as service, or did not need to be computed
        # written by QueueWaits
        self.waits_ns: dict[WaitReason, int] = {}
        self.own_wait: tuple[WaitReason, int] | None = None  # the reason, and since when
        self.wait_totals_ns: dict[WaitReason, int] = {}  # the common totals when it began to wait for common reasons
        # written by the engine loop
        self.causes: RequestCauses | None = None  # of its request's time; None: nobody asks for them
        self.wants_prompt_logprobs = False  # the first choice of a prompt reports them, once
        self.last_token_ns: int | None = None
        # written by Drafts
        self.draft: list[int] = []  # a guess at its next tokens, all of which its grammar lets come in this order
        self.draft_is_models = False  # the draft model has made it, or is about to
        self.lookup: Lookup | None = None  # in its own text
        # written by the sampler, if there is a penalty
        self.token_counts: TokenCounts | None = None

    @property
    def num_pending(self) -> int:
        """Return the number of possible draws of a step under way, whose ids are not known yet."""
        return self.num_tokens - len(self.token_ids)

    @property
    def is_held(self) -> bool:
        """Return whether a step under way may draw several tokens: their number is not known before its commit."""
        return self.num_tokens > len(self.token_ids) + 1

    @property
    def num_uncomputed(self) -> int:
        """Return the number of tokens left to compute."""
        return self.num_tokens - self.num_computed

    @property
    def num_generated(self) -> int:
        """Return the number of known tokens of the answer."""
        return len(self.token_ids) - self.prompt_len

    @property
    def generated_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]
