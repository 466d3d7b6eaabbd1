"""The record of an ended request. All telemetry about the request is derived from it.

The engine thread fills in the account of a request while it runs, and telemetry reads it afterwards. Each fact is
declared once, with its row (`fact.py`). Stdlib only.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from oaiserve.facts.fact import fact, facts_within
from oaiserve.facts.media import MediaAccount
from oaiserve.facts.times import RequestTimes
from oaiserve.facts.trace import TraceContext
from oaiserve.facts.turn import Turn

if TYPE_CHECKING:
    Integers = array[int]
else:  # msgspec reads these types to decode an account from an engine process, and doesn't support a generic array.
    Integers = array

# A request keeps only its first events, because it may have a thousand prefill chunks, or be preempted over and over.
MOST_EVENTS = 64
# Operations whose answers are vectors, scores, or the text of a whole recording. The engine doesn't generate these
# token by token, so no times of tokens are measured.
POOLING_OPERATIONS = frozenset({"embeddings", "score", "rerank", "transcription", "translation"})


class Outcome(StrEnum):
    """The ways in which a request can end."""

    FINISHED = "finished"  # the client got its whole answer
    CANCELLED = "cancelled"  # the client left, or did not read
    REJECTED = "rejected"  # answered with a 4xx or a 503
    FAILED = "failed"  # a fault of the server


class ToolCallOutcome(StrEnum):
    """What became of text in an answer that looks like a tool call."""

    CALLED = "called"  # the client got a call whose arguments are a JSON object
    UNPARSED = "unparsed"  # it could not be parsed, or named no tool of the request, so it stayed text
    LEFT_OUT = "left_out"  # not a call: a tool that only OpenAI hosts was left out, so the model did not see it


class DeadlineOutcome(StrEnum):
    """The ways in which a request with a deadline can end, unless its client leaves."""

    MET = "met"  # the whole answer was written in time, and so was its first token
    MISSED = "missed"  # it was too late, failed or was rejected


class WaitReason(StrEnum):
    """The reasons why a tokenized request had to wait before its first step."""

    STEP_UNDER_WAY = "step_under_way"  # it arrived during a step, and the engine admits requests only between steps
    BATCH_FULL = "batch_full"  # --max-running sequences were running
    TOKEN_BUDGET = "token_budget"  # other sequences used up the step (--max-step-tokens, prefill limits)
    NO_BLOCKS = "no_blocks"  # the KV cache had no room for it
    BEHIND_OTHERS = "behind_others"  # the KV cache had no room for requests before it
    SAME_PREFIX = "same_prefix"  # another request was computing the same prefix
    PREFIX_READ = "prefix_read"  # its prefix was read from --prefix-cache-dir
    PREFIX_RESTORED = "prefix_restored"  # its prefix was restored from the host memory of --kv-offload
    FOREGROUND = "foreground"  # background work, while other requests needed the whole machine
    NOT_KNOWN = "not_known"  # the engine process that knew the reasons has ended


class ReadAgain(StrEnum):
    """The reasons why tokens of a prompt were computed although an earlier prompt had computed them."""

    MODEL = "model"  # The earlier prompt was for another model or adapter.
    SALT = "salt"  # The earlier prompt has another cache_salt or API key, and so another part of the cache.
    TOOLS = "tools"  # A tool was added, removed, changed or moved.
    SYSTEM = "system"  # The system message changed.
    OPTIONS = "options"  # A variable of the chat template changed, such as that for thinking.
    MESSAGE = "message"  # An earlier message changed, was removed or added.
    IMAGE = "image"  # An image or a sound changed.
    TEXT = "text"  # All parts are equal, but the template renders them differently.
    EVICTED = "evicted"  # Its blocks were cached, but were evicted for other requests.
    STATE = "state"  # Its blocks are cached, but not the state that the model's layers need after them.
    OTHER_REPLICA = "other_replica"  # Another replica has them cached, but the router chose this one.
    NOT_YET = "not_yet"  # The earlier prompt was still being computed, or less than a block is in common.
    OFF = "off"  # There is no prefix cache, or the request can't use it (prompt_logprobs).


class Cause(StrEnum):
    """The causes of the time that a request spends in the phases `prefill` and `decode`. They add up to the phase.

    The first three are estimated from the learnt cost of steps (`oaiserve.explain.step_cost`), and the next eight are
    measured. Some occur in other phases: `engine_restart` also in `tokenize_wait`, `model_load` in `receive` if a
    server has several models, and `refusal_delay` in the last phase. If a gateway passes a request to another kind of
    engine, the phase `first_byte` has estimates of some causes, and `inside_engine`.
    """

    ALONE = "alone"  # time that its own tokens would have taken without other requests
    NEIGHBOUR_DECODES = "neighbour_decodes"  # time that other requests' decodes added to its steps
    NEIGHBOUR_PROMPTS = "neighbour_prompts"  # time that other requests' prompts added
    PREEMPTION = "preemption"  # The request was preempted: it waited, or its tokens were computed again.
    NEIGHBOUR_MEDIA = "neighbour_media"  # images and sounds of other requests were encoded between its steps
    OWN_MEDIA = "own_media"  # its own images and sounds, for later prompts, were encoded between its steps
    CONSTRAINT = "constraint"  # its steps waited for the masks of grammars
    HOST = "host"  # time between steps, and after the last one
    MACHINE = "machine"  # The engine was ready to run, but other programs had the machine.
    STANDSTILL = "standstill"  # The whole process or machine was stopped.
    ENGINE_RESTART = "engine_restart"  # Its engine process ended, and a new one was started.
    NOT_KNOWN_YET = "not_known_yet"  # steps of a kind that the server had not measured yet
    UNEXPLAINED = "unexplained"  # Its steps took this much longer than expected.
    MODEL_LOAD = "model_load"  # The model had to be loaded first.
    INSIDE_ENGINE = "inside_engine"  # Another kind of engine took this time, and the gateway can't see why.
    REFUSAL_DELAY = "refusal_delay"  # The rejection was delayed, because many requests of the client had been rejected.


OF_NEIGHBOURS = (Cause.NEIGHBOUR_PROMPTS, Cause.NEIGHBOUR_DECODES, Cause.NEIGHBOUR_MEDIA)


class Whose(StrEnum):
    """The kinds of requests for which another request waits."""

    SAME_CLIENT = "same_client"  # other requests of its own client
    OTHER_CLIENT = "other_client"


# Listed among the programs that used the machine.
SLOW_CLOCK = "a lower clock frequency of the cores"


# Stands, in accounts, lists and metrics, for all clients with a key that have no row or series of their own.
FURTHER_CLIENTS = "other"


class OthersTime(NamedTuple):
    """The part of a request's phase that was spent on requests of one client, by what was computed for them.

    `client` is the name of the API key, FURTHER_CLIENTS for all clients after the first few, or None for clients
    without a key.
    """

    whose: Whose
    client: str | None
    prompts_ns: int
    decodes_ns: int
    media_ns: int

    @property
    def total_ns(self) -> int:
        return self.prompts_ns + self.decodes_ns + self.media_ns


class AccessRefusal(StrEnum):
    """The reasons to reject a request before it reaches a route. Such a request leaves no record."""

    MISSING_KEY = "missing_key"
    UNKNOWN_KEY = "unknown_key"
    ROLE = "role"  # Its key's role doesn't allow it.
    HOST = "host"  # It addresses the server by a name that is not allowed.
    ORIGIN = "origin"  # It comes from another site's web page.


class EventKind(StrEnum):
    """The kinds of events of a request in the engine. The comments list the details of each kind."""

    GRAMMAR_COMPILED = "grammar_compiled"  # compile_ns, cache (hit or miss), kind
    MEDIA_ENCODED = "media_encoded"  # encode_ns, cached (media), tokens
    PREFIX_CACHE_HIT = "prefix_cache_hit"  # tokens
    # tokens (to compute again), evicted_ns (time since then) and evicted_for (which request); the last two are absent
    # if only a state is missing
    PREFIX_CACHE_LOST = "prefix_cache_lost"
    PREFILL_CHUNK = "prefill_chunk"  # start, tokens, batch (the sequences in the step)
    FIRST_TOKEN = "first_token"  # batch
    PREEMPTED = "preempted"  # tokens (to compute again, unless they stay cached)
    RESUMED = "resumed"  # cached_tokens, stalled_ns
    FINISHED = "finished"  # reason, batch


class RequestEvent(NamedTuple):
    """An event of a request. `choice` is the index of the sequence, and `kind` determines which `details` exist."""

    kind: EventKind
    at_ns: int
    choice: int | None  # None if it concerns all choices
    details: Mapping[str, int | str]


def _cost(name: str, meaning: str) -> Any:
    """Declare a part of a request's cost, which is omitted if it is unknown."""
    return fact(meaning, None, json=f"cost.{name}", log=True, span=f"oaiserve.cost.{name}", log_when=name)


def _deadline(name: str, meaning: str) -> Any:
    """Declare the time of a deadline, which is omitted if a request has none."""
    return fact(meaning, None, json=True, log=True, span=f"oaiserve.{name}", log_when=name)


@dataclass(slots=True)
class EngineAccount:
    """The facts that the engine thread notes about a request in addition to its stamps.

    The account is complete when the terminal event is sent.
    """

    events: list[RequestEvent] = field(default_factory=list)
    num_events_dropped: int = fact(
        "Events after the first MOST_EVENTS.", span="oaiserve.events_dropped", span_when="num_events_dropped"
    )
    waits_ns: dict[WaitReason, int] = field(default_factory=dict)  # the parts of the phase `queue`
    client_requests: int = 1  # open requests of its client when it began to wait, itself included
    # The times between tokens of a choice in the engine, over all choices; 0 for two tokens from the same step.
    inter_token_ns: Integers = field(default_factory=lambda: array("q"))
    # The token ids of each prompt, which must only be hashed, never stored. Empty if they were never known.
    prompts: list[list[int]] = field(default_factory=list)
    # Makes the span attributes with text, and is called only if the operator allows such attributes.
    span_texts: Callable[[], Mapping[str, str]] | None = None
    cache_salt: str = ""
    num_restored_tokens: int = fact(
        "Cached prompt tokens that came back from the host memory of --kv-offload, or from --prefix-cache-dir.",
        json=True,
        log=True,
        span="oaiserve.restored_tokens",
        when="num_restored_tokens",
    )
    num_continued_tokens: int = fact(
        "Answer tokens that another server generated before this one continued the stream.",
        json=True,
        log=True,
        span="oaiserve.continued_tokens",
        when="num_continued_tokens",
    )
    num_choices: int = fact("Choices that the request asked for, over all its prompts.")
    longest_choice_tokens: int = fact("Generated tokens of the longest choice.")
    num_preemptions: int = fact(
        "Preemptions, over all its sequences.",
        json=True,
        log=True,
        span="oaiserve.preemptions",
        span_when="num_preemptions",
    )
    stalled_ns: int = fact(
        "Time from preemption until a sequence is computed again, added up over its sequences.",
        json=True,
        log=True,
        span="oaiserve.preemption_stall_ns",
        span_when="num_preemptions",
    )
    engine_restart_ns: int = fact(
        "Time without an engine process that computed it, because one had ended.",
        json=True,
        log=True,
        log_when="engine_restart_ns",
    )
    replica: str | None = fact(
        "The replica of --replicas that has computed the end of its answer. None: there is one engine.",
        None,
        json=True,
        log=True,
        span="oaiserve.replica",
        when="replica",
    )
    # These numbers describe the steps from its first to its last, including the sequences of other requests.
    first_step: int | None = None  # steps are numbered from 0
    num_steps: int = 0
    # Time of these steps. The remaining time passed between steps, or in the step that was running when it was
    # scheduled.
    model_ns: int = 0
    num_step_sequences: int = 0  # added up over the steps, like num_step_tokens
    num_step_tokens: int = 0
    # Parts of the phases `prefill` and `decode`, up to the last step. They are empty with --no-explain.
    prefill_causes_ns: dict[Cause, int] = field(default_factory=dict)
    decode_causes_ns: dict[Cause, int] = field(default_factory=dict)
    # The programs that used the machine's cores while the engine had to wait for them, as far as known, the longest
    # first.
    machine_users_ns: dict[str, int] = field(default_factory=dict)
    # For each phase (`queue`, `prefill`, `decode`), the time that was spent on other requests, by client, the largest
    # part first. In `prefill` and `decode`, it is the time that neighbours added, as in the causes, or their part of
    # the steps while the cost of steps is unknown. Empty with --no-explain.
    others_ns: dict[str, list[OthersTime]] = field(default_factory=dict)
    num_prefill_steps: int = 0  # steps up to the first token
    # Its shares of what the server used. The shares of all requests, and the time that belongs to no request, add up to
    # the server's meters. None with --no-explain.
    core_ns: int | None = _cost(
        "core_ns", "Time of the process's cores that is its share of its steps, and of the work between them."
    )
    machine_ns: int | None = _cost("machine_ns", "Time of the engine that is its share: of a step with others, a part.")
    alone_ns: int | None = _cost("alone_ns", "Time of the engine that it would have taken without others, as learnt.")
    alone_core_ns: int | None = _cost("alone_core_ns", "Time of cores that it would have taken without others.")
    kv_byte_seconds: float | None = _cost(
        "kv_byte_seconds",
        "Bytes of the KV cache times the seconds that it held them; those of a shared prefix divided.",
    )
    weight_bytes: int | None = _cost("weight_bytes", "Bytes of weights that its steps have read: its rows' part.")
    joules: float | None = _cost("joules", "Energy of its shares. None: no meter can be read.")
    price: float | None = _cost("price", "Its part of --cost-per-hour. None without that.")
    media: MediaAccount = facts_within(MediaAccount)
    # The next five describe the grammar that constrains the answer, if there is one.
    grammar_kind: str | None = fact(
        "The kind of the grammar, as in oaiserve.engine.request.GrammarKind.",
        None,
        json="grammar.kind",
        log=True,
        span="oaiserve.grammar.kind",
        when="grammar_kind",
    )
    grammar_cache: str | None = fact(
        "Whether the grammar had been compiled before: hit or miss. None: it was not compiled.",
        None,
        json="grammar.cache",
        log=True,
        log_when="grammar_cache",
    )
    grammar_compile_ns: int | None = fact(
        "Time to compile the grammar, in the phase `tokenize`.",
        None,
        json="grammar.compile_ns",
        log=True,
        log_when="grammar_cache",
    )
    num_masked_draws: int = fact(
        "Draws of a token among those that the grammar let come next, of all choices.",
        json="grammar.num_masked_draws",
        log=True,
        span="oaiserve.grammar.masked_draws",
        when="grammar_kind",
    )
    num_forced_tokens: int = fact(
        "Tokens that were not drawn, because the grammar left no other, of all choices.",
        json="grammar.num_forced_tokens",
        log=True,
        span="oaiserve.grammar.forced_tokens",
        when="grammar_kind",
    )
    num_draft_tokens: int = fact(
        "Tokens of drafts that were verified, of all choices.",
        json=True,
        log=True,
        span="oaiserve.draft.tokens",
        when="num_draft_tokens",
    )
    num_accepted_tokens: int = fact(
        "Tokens of drafts that came true, so that the answer has them.",
        json=True,
        log=True,
        span="oaiserve.draft.accepted_tokens",
        when="num_draft_tokens",
    )

    num_loops: int = fact(
        "Choices that end in a loop: the same tokens again and again.",
        json="loop.choices",
        log=True,
        span="oaiserve.loop.choices",
        when="num_loops",
    )
    loop_tokens: int = fact(
        "Last tokens of such a choice that are in its loop, of the choice with the longest one.",
        json="loop.tokens",
        log=True,
        span="oaiserve.loop.tokens",
        when="num_loops",
    )
    loop_period_tokens: int = fact(
        "Tokens that this loop repeats.",
        json="loop.period_tokens",
        log=True,
        span="oaiserve.loop.period_tokens",
        when="num_loops",
    )

    @property
    def causes_ns(self) -> dict[str, dict[Cause, int]]:
        """The causes of each phase that has any."""
        known = {}
        if self.engine_restart_ns and Cause.ENGINE_RESTART not in self.decode_causes_ns:
            known["tokenize_wait"] = {Cause.ENGINE_RESTART: self.engine_restart_ns}
        if self.prefill_causes_ns:
            known |= {"prefill": self.prefill_causes_ns, "decode": self.decode_causes_ns}
        return known

    @property
    def knows_others(self) -> bool:
        """Whether it is known which other requests it waited for."""
        return self.machine_ns is not None

    def said_of(self, phase: str) -> Sequence[str]:
        """Return sentences that the operator sees for a phase instead of its causes."""
        return ()

    @property
    def other_clients_ns(self) -> dict[str, int]:
        """The time in all phases that was spent on requests of other clients, by name, the largest first. Clients
        without a name share the name ""."""
        sums: dict[str, int] = {}
        for others in (one for phase in self.others_ns.values() for one in phase):
            if others.whose is Whose.OTHER_CLIENT:
                name = others.client or ""
                sums[name] = sums.get(name, 0) + others.total_ns
        return dict(sorted(sums.items(), key=lambda client: -client[1]))

    @property
    def client_waited_ns(self) -> dict[str, int]:
        """The part of its client's waiting time that was spent on other clients, by name. Requests of the client that
        wait for the same steps share that time, so that it counts once."""
        return {client: ns // self.client_requests for client, ns in self.other_clients_ns.items()}

    @property
    def whose_ns(self) -> dict[str, dict[Whose, int]]:
        """The time in each phase that was spent on others' requests, by whose they were."""
        sums: dict[str, dict[Whose, int]] = {}
        for phase, found in self.others_ns.items():
            sums[phase] = {}
            for others in found:
                sums[phase][others.whose] = sums[phase].get(others.whose, 0) + others.total_ns
        return sums

    @property
    def steps(self) -> range:
        """The numbers of the steps from its first to its last; empty if it was in no step."""
        first = self.first_step or 0
        return range(first, first if self.first_step is None else first + self.num_steps)

    def note_length(self, num_tokens: int) -> None:
        self.longest_choice_tokens = max(self.longest_choice_tokens, num_tokens)

    def note_loop(self, period_tokens: int, num_tokens: int) -> None:
        """Note that a choice ended in a loop: its last `num_tokens` repeat the same `period_tokens` tokens."""
        self.num_loops += 1
        if num_tokens > self.loop_tokens:
            self.loop_tokens = num_tokens
            self.loop_period_tokens = period_tokens

    def note(self, kind: EventKind, at_ns: int, choice: int | None, /, **details: int | str) -> None:
        if len(self.events) < MOST_EVENTS:
            self.events.append(RequestEvent(kind, at_ns, choice, details))
        else:
            self.num_events_dropped += 1


class Origin(NamedTuple):
    """The part of a record that is known when a request arrives. The engine keeps it for its open requests."""

    request_id: str = "unknown"
    operation: str = "unknown"
    http_route: str = "unknown"
    model: str = "unknown"
    adapter: str | None = None
    client: str | None = None  # see RequestRecord


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The record of one ended request. All telemetry about the request is derived from it."""

    trace: TraceContext
    times: RequestTimes
    http_method: str = fact("The method of the request.", ..., server_span="http.request.method")
    http_route: str = fact("The pattern of the route, never the raw path.", ..., json="route", server_span="http.route")
    request_id: str = fact("The id in the header x-request-id.", ..., json=True, log=True, spans="oaiserve.request.id")
    outcome: Outcome = fact("The way in which it ended.", ..., json=True, log=True, spans="oaiserve.outcome")
    # "chat", "text_completion" and "embeddings" as in the OpenTelemetry GenAI conventions, or another.
    operation: str = fact("The kind of request.", ..., json=True, log=True, span="gen_ai.operation.name")
    http_status: int | None = fact(
        "The status, or None if the client left before the status line was sent.",
        ...,
        json="status",
        log="status",
        server_span="http.response.status_code",
    )
    model: str = fact("The served name, never a name that a client sent.", ..., json=True, log=True)
    requested_model: str | None = fact(
        "The name that the client sent instead: an alias, or no model's. None: it is `model`, or there was none.",
        None,
        json=True,
        log=True,
        log_when="requested_model",
    )
    adapter: str | None = None  # the adapter's name, if `model` names a loaded one
    client: str | None = fact(
        "The name of its API key; never its address, which is personal data.",
        None,
        json=True,
        log=True,
        spans="oaiserve.client",
    )
    http_scheme: str = fact("http or https.", "http", server_span="url.scheme")
    server_address: str | None = fact(
        "The address that this server listens on, if it is known.", None, spans="server.address"
    )
    server_port: int | None = fact("Its port.", None, spans="server.port", span_when="server_address")
    model_load_ns: int = fact(
        "Time that it waited for its model to be loaded, in the phase `receive`.",
        json=True,
        log=True,
        log_when="model_load_ns",
    )
    refusal_delay_ns: int = fact(
        "Time for which its refusal was held back, at the end of its last phase: its client had many.",
        json=True,
        log=True,
        log_when="refusal_delay_ns",
    )
    response_id: str | None = fact("The `id` of the answer.", None, json=True, span="gen_ai.response.id")
    engine_id: str | None = None  # the engine's id of the request
    conversation_id: str | None = fact(
        "The `id` of the first answer of a conversation over several requests.",
        None,
        json=True,
        log=True,
        span="gen_ai.conversation.id",
    )
    error_type: str | None = fact(
        "The class name of the error it ended with.", None, json=True, log=True, spans="error.type"
    )
    error_param: str | None = fact("The parameter that was wrong, by its name in the API.", None, log=True)
    stream: bool = fact("Whether the answer was streamed.", False, json=True, log=True, span="gen_ai.request.stream")
    background: bool = fact(
        "Whether it could wait, and got only what nobody else needed: the histograms of times are without it.",
        False,
        json=True,
        log=True,
        when="background",
        span="oaiserve.background",
    )
    prompt_tokens: int = fact("Tokens of all prompts.", json=True, log=True, span="gen_ai.usage.input_tokens")
    cached_tokens: int = fact(
        "Prompt tokens that were found in the prefix cache.",
        json=True,
        log=True,
        span="gen_ai.usage.cache_read.input_tokens",
    )
    read_again_tokens: int = fact(
        "Prompt tokens that were computed although an earlier prompt had computed them.",
        json=True,
        log=True,
        span="oaiserve.read_again.tokens",
        when="read_again_tokens",
    )
    read_again_reason: ReadAgain | None = fact(
        "Why most of them were computed again.",
        None,
        json=True,
        log=True,
        span="oaiserve.read_again.reason",
        when="read_again_reason",
    )
    reuse: Mapping[str, str | int] = fact(
        "The earlier prompt that was compared with its first one, and what changed or was lost since.",
        new=dict,
        json=True,
    )
    turn: Turn | None = None  # its position in an agent's run, if known
    completion_tokens: int = fact(
        "Tokens of the answer, over all choices.", json=True, log=True, span="gen_ai.usage.output_tokens"
    )
    reasoning_tokens: int | None = fact(
        "Those of them that are reasoning. None: reasoning is not separated from the answer.",
        None,
        json=True,
        log=True,
        log_when="reasoning_tokens",
        span="gen_ai.usage.reasoning.output_tokens",
    )
    finish_reasons: tuple[str, ...] = ()  # the engine's stop, length or repetition, for each choice that ended
    answer_reasons: tuple[str, ...] = fact(
        "The reason why each choice ended, as the answer states it.",
        (),
        json="finish_reasons",
        log="finish_reasons",
        span="gen_ai.response.finish_reasons",
        span_when="answer_reasons",
    )
    stop_sequences: tuple[str, ...] = fact(
        "The texts before which the client lets the answer end.",
        (),
        span="gen_ai.request.stop_sequences",
        span_when="stop_sequences",
    )
    reasoning_level: str | None = fact(
        "The effort of reasoning that the client wants.", None, json=True, span="gen_ai.request.reasoning.level"
    )
    previous_response_id: str | None = fact(
        "The stored response that it continues.", None, json=True, span="gen_ai.request.previous_response.id"
    )
    tool_calls: Mapping[ToolCallOutcome, int] = fact("Calls of tools in the answer, by outcome.", new=dict, json=True)
    deadline: DeadlineOutcome | None = fact(
        "Whether it kept its deadlines: met or missed. None: it had none, or its client left.",
        None,
        json=True,
        log=True,
        span="oaiserve.deadline",
        when="deadline",
    )
    deadline_ns: int | None = _deadline("deadline_ns", "Time from its receipt to the deadline of its end.")
    ttft_deadline_ns: int | None = _deadline(
        "ttft_deadline_ns", "Time from its receipt to the deadline of its first token."
    )
    adapted: tuple[str, ...] = fact(
        "The parts of its body that were left out or read differently, and how.",
        (),
        json=True,
        log=True,
        span="oaiserve.adapted",
        when="adapted",
    )
    params: Mapping[str, str | int | float | bool] = fact("The client's parameters, without text.", new=dict, json=True)
    sampling: Mapping[str, int | float] = fact(
        "The sampling parameters that applied, with the server's defaults.", new=dict, json=True
    )
    routing: Mapping[str, str | int | float] = fact(
        "The decision of the router that chose this replica, if there is one.", new=dict, json=True
    )
    # What the client of a stream sees: the tokens of each event, and the times between two events of a choice.
    event_tokens: Integers = field(default_factory=lambda: array("q"))
    event_gaps_ns: Integers = field(default_factory=lambda: array("q"))
    account: EngineAccount = field(default_factory=EngineAccount)

    @property
    def read_again_ns(self) -> int:
        """Return the part of the phase `prefill` that was spent on tokens that were read again, by their share of all
        computed tokens."""
        num_computed = self.prompt_tokens - self.cached_tokens
        prefill_ns = sum(phase.duration_ns for phase in self.times.phases() if phase.name == "prefill")
        return prefill_ns * self.read_again_tokens // max(1, num_computed)

    @property
    def generated_tokens(self) -> int:
        """Return the number of tokens in the answer, without those that another server had generated before its stream
        broke off."""
        return self.completion_tokens - self.account.num_continued_tokens

    @property
    def tokens_per_choice(self) -> int:
        """Return the mean number of generated tokens per choice. TPOT divides by it, because choices are generated
        concurrently."""
        return self.generated_tokens // max(1, self.account.num_choices)

    @property
    def causes_ns(self) -> dict[str, dict[Cause, int]]:
        """Return the causes of each phase that has any: `prefill` and `decode`, a `receive` that waited for the model,
        and a phase that ended with a delayed rejection. They add up to the phase, and the largest comes first.

        If a request ended early, the time after its last step counts as `host`. A request that ended before its first
        step had ended has no causes, and with --no-explain, no request has any.
        """
        if self.model_load_ns:
            known = {"receive": {Cause.MODEL_LOAD: self.model_load_ns}}
        else:
            known = {}
        known |= self.account.causes_ns
        causes = {}
        phases = self.times.phases()
        if self.refusal_delay_ns:
            last = phases[-1].name
            known[last] = {**known.get(last, {}), Cause.REFUSAL_DELAY: self.refusal_delay_ns}
        for phase in phases:
            if phase.name in known:
                causes_ns = dict(known[phase.name])
                if rest_ns := phase.duration_ns - sum(causes_ns.values()):
                    causes_ns[Cause.HOST] = causes_ns.get(Cause.HOST, 0) + rest_ns
                causes[phase.name] = dict(sorted(causes_ns.items(), key=lambda cause: -cause[1]))
        return causes
