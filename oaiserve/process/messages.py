"""The messages between the front and an engine process, as plain data.

The front sends `Start` once, then one `Submit` for each request, one `Abort` for each that ends early, questions, and
`Stop`. The engine process sends `Ready` or `NotStarted` once, then one `Step` for each step with all its events and the
engine's numbers, one more each second, and one `Answer` for each question. Timestamps are in nanoseconds of the
machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from oaiserve.checkpoints.recommended_sampling import Recommendation
from oaiserve.config import EngineOptions, LogFormat, LogLevel
from oaiserve.engine.boundary import AnyEngine, AnyTokenizer
from oaiserve.engine.request import (
    Aborted,
    Event,
    Failed,
    Finished,
    GapPrompt,
    LeftOut,
    Pooled,
    Prompt,
    PromptDone,
    PromptProgress,
    Request,
    Terminal,
    TokenChunk,
    TokenPrompt,
)
from oaiserve.engine.types.adapters import ServedAdapter
from oaiserve.engine.types.media import MediaKind
from oaiserve.engine.types.pooling import Pooling
from oaiserve.explain.step_cost import StepCost
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.open_row import OpenRow
from oaiserve.facts.step_record import StepRecord
from oaiserve.process.plain_data import convert
from oaiserve.process.remote_tokenizer import Method, TokenizerFacts
from oaiserve.wire.report import ReplicaReport

_PROMPT_KINDS = {kind.__name__: kind for kind in get_args(Prompt)}
_REQUEST_FIELDS = tuple(each.name for each in fields(Request) if each.name != "prompts")
_hints = get_type_hints(Request)
# The fields of a request except its prompts, each of which has a kind of its own.
_RequestFields = msgspec.defstruct("_RequestFields", [(name, _hints[name]) for name in _REQUEST_FIELDS])


def _named(prompt: Prompt) -> tuple[str, Prompt]:
    """Return a prompt with the name of its kind. Token ids become a list, even if they were an array."""
    if isinstance(prompt, TokenPrompt):
        prompt = replace(prompt, token_ids=[*prompt.token_ids])
    elif isinstance(prompt, GapPrompt) and not isinstance(prompt.prefix, str):
        prompt = replace(prompt, prefix=[*prompt.prefix])
    return type(prompt).__name__, prompt


def _prompt(named: tuple[str, Any]) -> Prompt:
    """Return a prompt from its kind and its encoded form. Raises msgspec.MsgspecError."""
    kind, form = named
    prompt: Prompt = convert(form, _PROMPT_KINDS[kind])
    return prompt


class Start(msgspec.Struct, tag=True, kw_only=True):
    """Load a model. This is the first message to an engine process."""

    model: str  # the name or path that the user gave
    name: str  # the model's name in log lines
    options: EngineOptions
    plugins: tuple[str, ...]  # modules and files of plug-ins, as the user gave them
    settings: Path | None  # the file of settings, with those of plug-ins
    log_level: LogLevel
    log_format: LogFormat
    replica: str | None = None  # its name in log lines, if there are several
    cpus: tuple[int, ...] = ()  # CPUs that it may run on; (): all


class Submit(msgspec.Struct, tag=True):
    """A request, with the time at which the front accepted it."""

    fields: _RequestFields  # type: ignore[valid-type]
    prompts: tuple[tuple[str, Any], ...]  # prompts, each with the name of its kind
    submitted_ns: int

    @classmethod
    def of(cls, request: Request, submitted_ns: int) -> Submit:
        named = _RequestFields(*(getattr(request, name) for name in _REQUEST_FIELDS))
        return cls(named, tuple(map(_named, request.prompts)), submitted_ns)

    def request(self) -> Request:
        """Return the request. Raises msgspec.MsgspecError for invalid prompts."""
        prompts = tuple(map(_prompt, self.prompts))
        return Request(prompts=prompts, **{name: getattr(self.fields, name) for name in _REQUEST_FIELDS})


class Abort(msgspec.Struct, tag=True):
    request_id: str  # The request may have ended.


class Stop(msgspec.Struct, tag=True):
    """End the process, after the open requests if they end within some seconds."""

    drain_timeout_seconds: float


class AskReport(msgspec.Struct, tag=True):
    """Make a report for routers."""

    number: int  # number of the question, for its answer
    replica: str


class AskOpenRows(msgspec.Struct, tag=True):
    """Describe the newest open requests, or only the one with this id."""

    number: int
    epoch_offset_ns: int
    request_id: str | None


class AskTokens(msgspec.Struct, tag=True):
    """Encode a prompt."""

    number: int
    prompt: tuple[str, Any]  # with the name of its kind
    most_tokens: int | None

    @classmethod
    def of(cls, number: int, prompt: Prompt, most_tokens: int | None) -> AskTokens:
        return cls(number, _named(prompt), most_tokens)

    def the_prompt(self) -> Prompt:
        return _prompt(self.prompt)


class AskTokenizer(msgspec.Struct, tag=True):
    """Call a method of the tokenizer."""

    number: int
    method: Method
    prompt: tuple[str, Any] | None  # its first argument, with the name of its kind
    arguments: list[Any]  # the other arguments

    @classmethod
    def of(cls, number: int, method: Method, prompt: Prompt | None, arguments: Iterable[Any]) -> AskTokenizer:
        return cls(number, method, None if prompt is None else _named(prompt), [*arguments])

    def call(self, tokenizer: AnyTokenizer) -> Any:
        """Return the result as plain data. Raises InvalidRequest."""
        prompts = [] if self.prompt is None else [_prompt(self.prompt)]
        result = getattr(tokenizer, self.method)(*prompts, *self.arguments)
        return [*result] if isinstance(result, Iterator) else result


class LoadAdapter(msgspec.Struct, tag=True):
    number: int
    name: str
    path: Path
    in_place: bool


class UnloadAdapter(msgspec.Struct, tag=True):
    number: int
    name: str


Question = AskReport | AskOpenRows | AskTokens | AskTokenizer | LoadAdapter | UnloadAdapter
ToEngine = Start | Submit | Abort | Stop | Question


class Ready(msgspec.Struct, tag=True, kw_only=True):
    """The engine can take requests. These facts about it never change."""

    path: Path | None
    tokenizer: TokenizerFacts
    max_model_len: int
    vocab_size: int
    default_params: dict[str, Any]
    recommendation: Recommendation | None
    pooling: Pooling | None
    media: frozenset[MediaKind]
    adapters: list[ServedAdapter]  # adapters that were loaded at the start
    model_info: dict[str, str]
    capacity: dict[str, Any]
    features: dict[str, str]
    kv_bytes: int
    is_on_cpu: bool
    numbers: EngineNumbers

    @classmethod
    def of(cls, engine: AnyEngine, tokenizer: TokenizerFacts, numbers: EngineNumbers) -> Ready:
        return cls(
            path=engine.path,
            tokenizer=tokenizer,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            default_params=dict(engine.default_params),
            recommendation=engine.recommendation,
            pooling=engine.pooling,
            media=engine.media,
            adapters=engine.adapters.served,
            model_info=engine.model_info,
            capacity=dict(engine.capacity),
            features=engine.features,
            kv_bytes=engine.kv_bytes,
            is_on_cpu=engine.is_on_cpu,
            numbers=numbers,
        )


class NotStarted(msgspec.Struct, tag=True):
    """The model could not be loaded. The process ends."""

    error: Exception


class Ended(msgspec.Struct, tag=True):
    """The engine has failed, for this reason. The process ends."""

    reason: str


class Step(msgspec.Struct, tag=True, omit_defaults=True):
    """The events of a step, in the order in which a request gets their kinds, and the engine's numbers after the
    step."""

    left_out: list[LeftOut] = []
    progress: list[PromptProgress] = []
    prompts_done: list[PromptDone] = []
    chunks: list[TokenChunk] = []
    pooled: list[Pooled] = []
    finished: list[Finished] = []
    failed: list[Failed] = []
    aborted: list[Aborted] = []
    numbers: EngineNumbers | None = None
    steps: list[StepRecord] = []
    # By client: how many choices no longer wait, and how many bytes of bodies have been tokenized.
    left_waiting: list[tuple[str, int]] = []
    tokenized_bytes: list[tuple[str, int]] = []
    health: Health | None = None  # sent once a second

    @classmethod
    def of(cls, events: Iterable[Event]) -> Step:
        """Return a message with these events."""
        step = cls()
        lists: dict[type, list[Any]] = {
            LeftOut: step.left_out,
            PromptProgress: step.progress,
            PromptDone: step.prompts_done,
            TokenChunk: step.chunks,
            Pooled: step.pooled,
            Finished: step.finished,
            Failed: step.failed,
            Aborted: step.aborted,
        }
        for event in events:
            lists[type(event)].append(event)
        return step

    def events(self) -> list[Event]:
        """Return all events. Those of a request are in their order, except among its choices."""
        return [
            *self.left_out,
            *self.progress,
            *self.prompts_done,
            *self.chunks,
            *self.pooled,
            *self.ends(),
        ]

    def ends(self) -> list[Terminal]:
        return [*self.finished, *self.failed, *self.aborted]


class Health(msgspec.Struct):
    """Slowly changing numbers, whose arrival shows that the process is alive."""

    cores_ns: int  # CPU time of the process
    num_tokenizing: int
    num_hangs: int
    hang: str
    step_cost: StepCost | None


class Begun(msgspec.Struct, tag=True):
    """These requests are about to enter their first step. If the process ends then, they may be the cause."""

    request_ids: list[str]


class Answer(msgspec.Struct, tag=True):
    """The answer to a question, or why there is none."""

    number: int
    report: ReplicaReport | None = None
    rows: dict[str, OpenRow] | None = None
    token_ids: list[int] | None = None
    result: Any = None  # result of a method of the tokenizer
    adapter: ServedAdapter | None = None
    error: Exception | None = None


ToFront = Ready | NotStarted | Ended | Step | Begun | Answer
