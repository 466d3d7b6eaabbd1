"""The mutable state of one sequence: token ids, no text and no tensors. A sequence never leaves the engine thread."""

from __future__ import annotations

from array import array
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import Enum

from oaiserve.engine.grammars.constraint import Constraint
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequences.blocks import BlockHash
from oaiserve.engine.sequences.clients import Client, RequestTurn
from oaiserve.engine.sequences.draw_columns import GREEDY_BELOW, draw_parameters
from oaiserve.engine.sequences.fixed_edits import FixedEdits, TokenCounts
from oaiserve.engine.sequences.lookup import Lookup
from oaiserve.engine.types.media import Encoded, PromptMedia
from oaiserve.engine.types.sampling_rule import SamplingRule
from oaiserve.explain.causes import RequestCauses
from oaiserve.facts.lost_prefix import LostPrefix
from oaiserve.facts.record import WaitReason


class Place(Enum):
    NOWHERE = 0
    WAITING = 1
    PARKED = 2  # waits until another sequence has computed their common prefix
    RUNNING = 3


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One choice of one prompt. Its state follows from two numbers, `num_computed <= num_tokens`.

    It decodes if one token is left to compute. If more are left, it prefills: a prompt, or tokens lost by preemption.
    `num_tokens` includes tokens that the current step draws, whose ids are not in `token_ids` yet. Each group of fields
    has one writer, which its comment names.
    """

    # set at construction, then constant
    request_id: str
    index: int
    prompt: InitVar[list[int]]
    params: SamplingParams
    _: KW_ONLY
    max_len: int  # maximum length of prompt and answer together, in tokens
    stop_ids: frozenset[int] = frozenset()  # end tokens unless they are ignored, and the client's stop ids
    draw_key: int = 0  # 64 bits; draws depend only on this and the position
    priority: int = 0  # lower comes earlier, under `--policy priority`
    cache_salt: str = ""  # only sequences with the same salt share cached blocks
    adapter: int = 0  # number of the adapter, or 0; also part of the salt
    client_name: str = ""  # client under whose name it takes turns, with `--policy fair`
    share: float = 1.0  # the client's share, relative to other clients
    is_background: bool = False  # background work; False after `background_wait_ns`: see `Scheduler`
    background_wait_ns: int | None = None  # None: forever
    bad_words: list[list[int]] = field(default_factory=list)  # sequences of token ids that must not be generated
    constraint: Constraint | None = None  # the grammar's constraint on the answer
    rules: tuple[SamplingRule, ...] = ()  # edits of its logits by plug-ins, at each draw
    shared_edits: InitVar[FixedEdits | None] = None  # edits shared by the request; None: made from the parameters
    device_counts: InitVar[bool] = False  # whether the device can count its tokens
    edits: FixedEdits = field(init=False)
    # All of its tokens are pooled in one step, and nothing is cached.
    is_whole: bool = False
    second_start: int | None = None  # where the second text of a pair begins
    media: PromptMedia | None = None  # images and sounds of its prompt
    encoded: tuple[Encoded, ...] = ()  # the vectors of each medium
    prompt_len: int = 0
    # The host edits its logits by its earlier ids, so all of them must be known when it draws.
    needs_ids: bool = False
    has_edits: bool = False  # whether ids or parameters other than min_tokens edit its logits
    # The device counts its tokens, and penalises its logits by these counts. This isn't possible with a sampling rule,
    # which edits penalised logits on the host.
    is_counted: bool = False
    is_greedy: bool = False
    draw_parameters: array[float] = field(init=False)  # the columns of its draws, as float32
    # written by Scheduler
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0  # includes tokens that the current step draws
    num_computed: int = 0  # tokens whose keys and values are in `blocks` at the end of the launched steps
    num_cached: int = 0  # prompt tokens that were in the prefix cache when it was first admitted
    lost: LostPrefix | None = None  # the next prompt tokens, if the prefix cache has lost them
    has_asked_tier: bool = False  # whether the lower tier was asked since the start or the last preemption
    num_before_tier: int | None = None  # cached tokens before blocks of the lower tier were restored
    blocks: list[int] = field(default_factory=list)
    held_ns: float = 0.0  # blocks times nanoseconds, for released blocks, without the time before it shared them
    state: int | None = None  # index in the pool of states, if the model's layers keep one
    state_ends: list[int] = field(default_factory=list)  # positions after which its state must be cached
    hashes: list[BlockHash] = field(default_factory=list)  # hashes of its first full blocks
    siblings: list[Sequence] = field(default_factory=list)  # the prompt's other choices, until this one has computed it
    place: Place = Place.NOWHERE
    key: tuple[float, ...] = ()
    num_overtaken: int = 0
    num_preemptions: int = 0
    last_turn: int = 0  # when it last decoded, in steps that left out some decodes
    # written by WaitingQueue
    client: Client = field(init=False)  # set when it arrives
    turn: RequestTurn = field(init=False)
    num_due: int = 0  # tokens of its prompt that the client's clock has not counted yet
    num_charged: int = 0  # number of first prompt tokens that were charged as service or cached
    # written by QueueWaits
    waits_ns: dict[WaitReason, int] = field(default_factory=dict)
    own_wait: tuple[WaitReason, int] | None = None  # (reason, start)
    # The totals of common reasons when it began to wait for these.
    wait_totals_ns: dict[WaitReason, int] = field(default_factory=dict)
    # written by the engine loop
    causes: RequestCauses | None = None  # causes of its request's time; None: they are not counted
    wants_prompt_logprobs: bool = False  # True for the first choice of a prompt, until it has reported them
    last_token_ns: int | None = None
    # written by Drafts
    draft: list[int] = field(default_factory=list)  # proposed next tokens, all of which its grammar allows
    lookup: Lookup | None = None  # looks up drafts in the sequence's text
    # written by the sampler if there is a penalty
    token_counts: TokenCounts | None = None
    # written by the sampler if a rule raises: the number of the sequence's tokens at that draw, and the plug-in's name
    failed_rule: tuple[int, str] | None = None

    def __post_init__(self, prompt: list[int], shared_edits: FixedEdits | None, device_counts: bool) -> None:
        if shared_edits is None:
            self.edits = FixedEdits(self.params, self.stop_ids)
        else:
            self.edits = shared_edits
        self.token_ids = list(prompt)
        self.num_tokens = self.prompt_len = len(prompt)
        has_penalty = (
            self.params.repetition_penalty != 1.0
            or self.params.frequency_penalty != 0.0
            or self.params.presence_penalty != 0.0
        )
        self.is_counted = has_penalty and device_counts and not self.rules
        self.needs_ids = (
            self.constraint is not None
            or bool(self.rules)
            or (has_penalty and not self.is_counted)
            or any(len(word) > 1 for word in self.bad_words)
        )
        by_ids = self.params.allowed_token_ids is not None or self.bad_words or self.params.logit_bias
        self.has_edits = self.needs_ids or bool(by_ids)
        self.is_greedy = self.params.temperature < GREEDY_BELOW
        self.draw_parameters = draw_parameters(self.params)

    @property
    def num_pending(self) -> int:
        """Return the number of tokens that launched steps may draw and whose ids are not known yet."""
        return self.num_tokens - len(self.token_ids)

    @property
    def num_restored(self) -> int:
        """Return how many of its cached prompt tokens were restored from the lower tier."""
        if self.num_before_tier is None:
            return 0
        return max(0, self.num_cached - self.num_before_tier)

    @property
    def is_held(self) -> bool:
        """Return whether a launched step may draw several tokens, whose number is known only at its commit."""
        return self.num_tokens > len(self.token_ids) + 1

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def generated_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]
