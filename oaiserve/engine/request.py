"""Requests, which enter the engine, and events, which leave it. No tensors, no HTTP.

An accepted request gets any number of `PromptProgress` events, if it asks for them, then `PromptDone` and `TokenChunk`
events, or `Pooled` ones, then exactly one terminal event: `Finished`, `Failed` or `Aborted`. Nothing modifies a
request.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from oaiserve.engine.types.logprobs import TokenLogprobs
from oaiserve.engine.types.loop_rule import LoopRule
from oaiserve.engine.types.media import MediaFile
from oaiserve.errors import APIError
from oaiserve.facts.lost_prefix import LostPrefix
from oaiserve.facts.record import EngineAccount, Origin, ReadAgain
from oaiserve.facts.times import RequestTimes
from oaiserve.wire.continuation import Piece
from oaiserve.wire.prefix_keys import Prompt as RoutedPrompt

if TYPE_CHECKING:
    Floats = array[float]
else:  # like `Integers` in record.py
    Floats = array


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special_tokens: bool = True
    param: str = "prompt"  # the request's field that contained it, for errors
    most_tokens: int | None = None  # maximum tokens including special ones; longer texts are cut. None: never cut


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt of token ids, which are used unchanged."""

    token_ids: Sequence[int]
    param: str = "prompt"  # see TextPrompt
    media: tuple[MediaFile, ...] = ()  # The model's reader finds their places among the ids.


@dataclass(frozen=True, slots=True)
class GapPrompt:
    """A text with a gap, which the answer fills. Control tokens in the text count as plain text."""

    prefix: str | Sequence[int]  # before the gap; token ids are used unchanged
    suffix: str
    add_special_tokens: bool = True
    param: str = "prompt"  # see TextPrompt


@dataclass(frozen=True, slots=True)
class FilledPrompt:
    """A template whose placeholders, such as {query}, are replaced by texts. Control tokens in these count as plain
    text."""

    template: str
    texts: Mapping[str, str]
    param: str = "documents"  # see TextPrompt


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """Two texts for a cross-encoder, with its special tokens around and between them."""

    first: str
    second: str
    param: str = "documents"  # see TextPrompt
    most_tokens: int | None = None  # maximum tokens of both together; the longer text is cut. None: never cut


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt of messages for the model's chat template.

    The `content` of a message is a string or a list of `{"type": "text", "text": str}`, and of `{"type": "image"}` or
    `{"type": "audio"}` for each of the `media`, in their order. The `opening` follows the generation prompt: the
    answer continues from it.
    """

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # the template writes them itself
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()  # the chat template's variable `tools`
    told_tools: Sequence[Mapping[str, Any]] = ()  # tools that a message describes, if the template has no such variable
    opening: str = ""
    param: str = "messages"  # the request's field that contained the messages, for errors
    media: tuple[MediaFile, ...] = ()


Prompt = TextPrompt | TokenPrompt | GapPrompt | FilledPrompt | PairPrompt | ChatPrompt


class TooManyTokens(Exception):
    """A prompt has more tokens than allowed: exactly `num_tokens`, or at least that many if it was only partly
    encoded."""

    def __init__(self, num_tokens: int, *, is_exact: bool) -> None:
        super().__init__(num_tokens, is_exact)
        self.num_tokens = num_tokens
        self.is_exact = is_exact


GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "gbnf", "lark_with_schemas"]


ANSWER_START = "\x02"  # stands for the beginning of an answer in the `leads` of a grammar


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the text of an answer. It is compiled in the tokenize stage."""

    kind: GrammarKind
    # The JSON text of a schema, of a list of choices or of a format; a regex; or a grammar. "" for json_object. For
    # lark_with_schemas, JSON of an object: a grammar as `lark`, and `schemas` by name, which the grammar calls
    # @schema_0 and so on. It may also have the JSON text of one more schema as `answer`, which the grammar calls
    # @answer, and as `lenient` the names of schemas that are obeyed as far as possible.
    text: str
    param: str = "response_format"  # the request's field that contained it, for errors
    prefix: str = ""  # one of the server's own texts that precedes it, in Lark, with special tokens by id
    # If there are any leads, only parts of the answer obey the grammar. A part begins after a match of one of these
    # regexes, and ends as soon as the grammar allows its end. In the grammar, a part starts with the letter of its
    # lead: "A" for the first regex, and so on.
    leads: tuple[str, ...] = ()
    continued: str = ""  # text before the answer; if an allowed text may begin with it, the answer is only the rest
    in_one_line: bool = False  # JSON has no line breaks; otherwise the model may choose
    is_lenient: bool = False  # The client's schema is obeyed as far as possible.


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning before an answer, up to `closing`. Grammar and stop strings begin after it."""

    closing: str
    opening: str = ""  # the answer may begin with it; "": the answer begins within the reasoning
    budget: int | None = None  # maximum tokens of the reasoning, after which its end is forced


# What a pooling model returns for a text: one vector, a weight for each token, or a vector for each token. For a sound:
# its text, or its text with the time of each token.
PooledAs = Literal["text", "token_weights", "token_vectors", "token_times"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of all choices of a request. The values must be valid already: only token ids are checked
    later."""

    n: int = 1  # choices per prompt
    max_tokens: int | None = None  # None, or a too large number: the rest of the context
    min_tokens: int = 0  # until the answer has this many, end-of-sequence and stop tokens are masked
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()  # texts whose tokens must not be generated in sequence
    seed: int | None = None  # None: fresh entropy
    stop: tuple[str, ...] = ()
    reasoning: Reasoning | None = None
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    visible_special_ids: frozenset[int] = frozenset()  # special tokens that are not skipped
    text_lengths: bool = False  # include the number of characters of each token in chunks
    logprobs: int | None = None  # alternatives per generated token; None: no logprobs, 0: the sampled token's only
    prompt_logprobs: int | None = None  # number of alternatives for each prompt token
    prompt_texts: bool = False  # return the part of the prompt's text that each token stands for
    # False: `logprobs` are only for an observer, so chunks and forced tokens are the same as without them.
    shows_logprobs: bool = True
    grammar: Grammar | None = None
    loop_rule: LoopRule | None = None  # end choices that loop by this rule; None: loops are only counted
    pooled_as: PooledAs = "text"


@dataclass(frozen=True, slots=True)
class Request:
    """A request: each of its prompts gets `params.n` choices, and choice `i` belongs to prompt `i // params.n`."""

    request_id: str
    prompts: tuple[Prompt, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0  # lower comes earlier, under the policy `priority`
    cache_salt: str = ""  # only requests with the same salt share the prefix cache
    adapter: int = 0  # number of the adapter that the model uses; 0: none
    # Tokens of a choice per TokenChunk, except the first token, which is sent at once. 0: one chunk when it has
    # finished.
    stream_interval: int = 1
    client: str = ""  # client that sent the request, so that clients can take turns
    share: float = 1.0  # the client's share of the server, relative to other busy clients
    num_bytes: int = 0  # bytes of the body, which count towards the limit of waiting requests
    # Seed from which the draws of each prompt get their own seeds, if the parameters have no seed. None: fresh entropy.
    draw_seed: int | None = None
    received_ns: int | None = None  # when the caller received it; None: at submission
    # The keys and length that a router would use to route the only prompt. None: there are several, or no router needs
    # this.
    routing: RoutedPrompt | None = None
    session: str = ""  # routers keep the requests of a session together; "": no session
    sent: tuple[Piece, ...] = ()  # pieces of the answer that another server has sent; this one continues after them
    is_background: bool = False  # uses only capacity that no other request needs, without the server's timeouts
    background_wait_ns: int | None = None  # how long it stays background work; None: forever
    reports_progress: bool = False  # whether to report the progress of prompts until the first token
    # Deadlines of the first token and of the whole answer, on the clock of `received_ns`. None: no deadline.
    first_token_deadline_ns: int | None = None
    deadline_ns: int | None = None
    origin: Origin = Origin()  # noqa: RUF009 - immutable

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n


class FinishReason(StrEnum):
    """The reason why a choice has ended, spelled as in the API."""

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"  # vLLM's term for a choice that its `loop_rule` has ended


@dataclass(slots=True)
class PromptProgress:
    """The progress of a request's prompts. It is sent when a long one enters a step, and then every second."""

    request_id: str
    num_tokens: int  # tokens of all its prompts
    num_cached: int  # prompt tokens that were in the prefix cache
    num_computed: int  # computed prompt tokens, including cached ones and those of the current step
    elapsed_ns: int  # time since the request entered its first step
    times: RequestTimes  # the stamps so far

    @property
    def rest_ns(self) -> int | None:
        """Return the time that the rest will take at the same rate; None before any token is computed."""
        num_done = self.num_computed - self.num_cached
        if num_done:
            return self.elapsed_ns * (self.num_tokens - self.num_computed) // num_done
        return None


@dataclass(slots=True)
class LeftOut:
    """Keywords of schemas that were left out because they cannot be obeyed together with the others; "" stands for a
    whole schema. This event comes first, and only if there are such keywords."""

    request_id: str
    keywords: Sequence[str]


@dataclass(slots=True)
class PromptDone:
    """The data of a prompt. This event comes once per prompt, before the first chunk of its choices."""

    request_id: str
    prompt_index: int
    token_ids: Sequence[int]
    logprobs: TokenLogprobs | None  # only with SamplingParams.prompt_logprobs
    times: RequestTimes  # the stamps so far, up to the first token
    cached_tokens: int = 0
    lost: LostPrefix | None = None  # the prefix that was cached before and could not be reused
    texts: list[str] | None = None  # only with SamplingParams.prompt_texts: see `Tokenizer.text_parts`


class TokenChunk(msgspec.Struct, array_like=True, gc=False):
    """The new text and tokens of a choice since its last chunk. All texts together are the whole answer.

    The last chunk of a choice has its finish_reason. Streams get one for each token, so it is a struct: making,
    encoding and decoding it takes less than half the time of a dataclass.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None = None
    # The stop string, the id from stop_token_ids, or "repetition_detected".
    stop_reason: str | int | None = None
    # The number of characters of each token in the text, 0 for one that is cut off or not shown. A character that is
    # split over several tokens counts for the last of them. Only with SamplingParams.text_lengths.
    text_lengths: list[int] | None = None
    has_end_token: bool = False  # The last token only ended the choice, so it isn't in the text.
    was_sent: bool = False  # Another server has sent it already.


@dataclass(slots=True)
class Pooled:
    """The result of a whole prompt of a pooling model: a vector, or one number for the task `score`.

    For `token_weights`, the numbers are alternating token ids and weights, sorted by id. For `token_vectors`, they are
    the vectors of all tokens, concatenated. For a sound, they encode its text.

    The prompts of a request may come in any order.
    """

    request_id: str
    index: int  # index of the prompt
    vector: Floats  # 32-bit floats, not normalised


@dataclass(slots=True)
class Usage:
    prompt_tokens: int  # each prompt counted once
    cached_tokens: int
    completion_tokens: int  # every sampled token of every choice
    max_tokens_cut_to: int | None = None  # lower limit, if the context has no room for max_tokens
    account: EngineAccount | None = None  # present if the client requested the cost
    read_again: tuple[int, ReadAgain | None] | None = None  # tokens and reason, if the client requested them
    # Accepted and rejected draft tokens, if the client has sent a prediction.
    predicted_tokens: tuple[int, int] | None = None
    image_tokens: int = 0  # prompt tokens that stand for images
    audio_tokens: int = 0


@dataclass(slots=True)
class Finished:
    """The request has finished: every choice has sent its last chunk.

    Like all terminal events it carries the stamps of the request, to which its caller adds `responded`, and the
    engine's account of it. The engine no longer changes either of them.
    """

    request_id: str
    usage: Usage
    times: RequestTimes
    account: EngineAccount


@dataclass(slots=True)
class Failed:
    request_id: str
    error: APIError
    usage: Usage
    times: RequestTimes
    account: EngineAccount


@dataclass(slots=True)
class Aborted:
    request_id: str
    usage: Usage
    times: RequestTimes
    account: EngineAccount


Terminal = Finished | Failed | Aborted
Event = LeftOut | PromptProgress | PromptDone | TokenChunk | Pooled | Terminal
TERMINAL = (Finished, Failed, Aborted)

# Takes the events of a step for one consumer. It is called on the engine thread, so it must only pass them on.
Deliver = Callable[[list[Event]], None]
