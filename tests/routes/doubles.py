"""Test doubles for the routes: an engine whose answers are scripted, and a telemetry that keeps its records."""

import math
import queue
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from oaiserve.checkpoints.adapters import BadAdapter
from oaiserve.checkpoints.recommended_sampling import Recommendation
from oaiserve.engine.request import (
    TERMINAL,
    Aborted,
    ChatPrompt,
    Deliver,
    Event,
    Failed,
    FilledPrompt,
    Finished,
    FinishReason,
    GapPrompt,
    PairPrompt,
    Pooled,
    Prompt,
    PromptDone,
    Request,
    TextPrompt,
    TokenChunk,
    TooManyTokens,
    Usage,
)
from oaiserve.engine.text.fill import FillTokens
from oaiserve.engine.text.template_abilities import Abilities
from oaiserve.engine.types.adapters import AdapterTable, ServedAdapter
from oaiserve.engine.types.logprobs import Entry
from oaiserve.engine.types.media import MediaKind
from oaiserve.engine.types.pooling import Pooling
from oaiserve.errors import APIError, InvalidRequest
from oaiserve.explain.step_cost import StepCost
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.metric import Metric
from oaiserve.facts.record import EngineAccount, RequestRecord
from oaiserve.facts.times import RequestTimes
from oaiserve.facts.trace import TraceContext
from oaiserve.runtime import THREADS, Runtime
from oaiserve.telemetry.clients import Clients
from oaiserve.telemetry.metrics import Numbers
from oaiserve.telemetry.recent import RecentRequests
from oaiserve.telemetry.request_series import RequestSeries
from oaiserve.telemetry.samples import LiveSamples
from oaiserve.wire.prefix_keys import Prompt as RoutedPrompt
from oaiserve.wire.prefix_keys import prompt_of_body
from oaiserve.wire.report import ReplicaReport
from tests.engine.logprobs_for_tests import token_logprobs

VOCAB_SIZE = 1000

Script = Callable[[Request], Iterable[list[Event]]]  # the events that the engine delivers, step by step


def queue_in(runtime: Runtime) -> Any:
    """Return a queue that a test reads, in this runtime."""
    return queue.Queue() if runtime is THREADS else runtime.queue()


class FakeTemplate:
    """A chat template, of which only the source counts, and the text that it puts after the messages."""

    response_template: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, source: str) -> None:
        self.source = source
        takes = "tools" in source
        self.abilities = Abilities(tools=takes, calls=takes, results=takes)

    def generation_prompt(self, template_kwargs: Mapping[str, Any]) -> str:
        if "enable_thinking" in self.source and template_kwargs.get("enable_thinking") is False:
            return "assistant: <think>\n\n</think>\n\n"
        return "assistant: <think>\n" if self.source.endswith("<think>") else "assistant: "


class FakeTokenizer:
    """A tokenizer in which each character is a token."""

    def __init__(self, template: FakeTemplate | None = None) -> None:
        self.chat_template = template
        self.why_no_chat = "The model has no chat template."
        self.special_token_ids = {"<tool_call>": 998, "<special>": 999}
        self.special_ids = frozenset(self.special_token_ids.values())
        self.fill: FillTokens | None = None
        template_source = None if template is None else {"default": template.source, "tool_use": ""}
        self.stored = SimpleNamespace(special_tokens_map={"eos_token": "<special>"}, chat_template=template_source)

    def encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, ChatPrompt):
            return [ord(c) for message in prompt.messages for c in str(message["content"])]
        if isinstance(prompt, TextPrompt):
            return [ord(c) for c in prompt.text]
        if isinstance(prompt, GapPrompt):
            return [ord(c) for c in f"{prompt.prefix}{prompt.suffix}"]
        if isinstance(prompt, FilledPrompt):
            return [ord(c) for c in "".join(prompt.texts.values())]
        if isinstance(prompt, PairPrompt):
            return [ord(c) for c in prompt.first + prompt.second]
        return list(prompt.token_ids)

    def encode_in_pieces(
        self, prompt: Prompt, most_tokens: int | None = None, expand: object = None
    ) -> Generator[None, None, list[int]]:
        yield
        token_ids = self.encode(prompt)
        if most_tokens is not None and len(token_ids) > most_tokens:
            raise TooManyTokens(len(token_ids), is_exact=False)
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def lone_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [*map(chr, token_ids)]

    def first_tokens(self, text: str, num_tokens: int, param: str) -> str:
        return text[:num_tokens]

    def text_parts(self, prompt: Prompt, token_ids: Sequence[int]) -> Iterator[str]:
        """Yield the whole text of a prompt for its last token, or one character for each id."""
        text = prompt.prefix if isinstance(prompt, GapPrompt) else getattr(prompt, "text", None)
        texts = map(chr, token_ids) if text is None else ["", "", text]
        return iter(texts)


class FakeEngine:
    def __init__(self, template: FakeTemplate | None = None, runtime: Runtime = THREADS) -> None:
        self._runtime = runtime
        self.num_restarts = 0
        self.max_model_len = 4096
        self.vocab_size = VOCAB_SIZE
        self.tokenizer = FakeTokenizer(template)
        self.capacity = {"max_running": 4}
        self.step_cost: StepCost | None = None
        self.reset()

    def reset(self) -> None:
        self.default_params = {"temperature": 1.0}  # stated, so that no fallback applies
        self.recommendation: Recommendation | None = None
        self.failure: Exception | None = None
        self.hang = ""
        self.pause = ""
        self.tokenizer.fill = None
        self.pooling: Pooling | None = None
        self.media: frozenset[MediaKind] = frozenset()
        self.is_on_cpu = True
        self.adapters = AdapterTable(self._add_adapter)
        self.is_ready = True
        self.is_reporting = False
        self.script: Script = says("Hello", " world")
        self.submit_error: APIError | None = None
        self.submitted: queue.Queue[Request] = queue_in(self._runtime)
        self.aborted: queue.Queue[str] = queue_in(self._runtime)
        self.gives_back: queue.Queue[int] = queue_in(self._runtime)
        self.turns: queue.Queue[tuple[str, int]] = queue_in(
            self._runtime
        )  # client and bytes of each turn with the tokenizer
        self.open: dict[str, Deliver] = {}
        self.times: dict[str, RequestTimes] = {}
        self._with_texts: dict[str, Request] = {}

    def _add_adapter(self, number: int, name: str, path: Path) -> None:
        if path.name == "broken":
            raise BadAdapter(f"'{path}': it is broken")

    def load_adapter(self, name: str, path: Path, *, in_place: bool = False) -> ServedAdapter:
        created = self._runtime.unix_ns() // 10**9
        if in_place:
            return self.adapters.replace(name, path, created)[0]
        return self.adapters.load(name, path, created)

    def unload_adapter(self, name: str) -> ServedAdapter:
        return self.adapters.unload(name)

    def give_back_later(self) -> None:
        self.gives_back.put(1)

    def encode(self, prompt: Prompt, most_tokens: int) -> Generator[None, None, list[int]]:
        return self.tokenizer.encode_in_pieces(prompt, most_tokens)

    def run_in_turns(self, work: Generator[None, None, Any], *, client: str, num_bytes: int) -> Future[Any]:
        """Run the work at once. A test may put another stage in its place."""
        if self.submit_error is not None:
            raise self.submit_error
        future: Future[Any] = Future()
        self.turns.put((client, num_bytes))
        try:
            while True:
                next(work)
        except StopIteration as stop:
            future.set_result(stop.value)
        except APIError as error:
            future.set_exception(error)
        return future

    def routing_of(self, content: bytes | bytearray) -> RoutedPrompt | None:
        return prompt_of_body(content) if self.is_reporting else None

    def report(self) -> ReplicaReport:
        self.is_reporting = True
        return ReplicaReport("", "fake", 3, 1.5, 20.0, array("Q", (1, 2**64 - 1)), 2, 1, 0.25)

    def start(self) -> None:
        pass

    def drain(self) -> None:
        self.is_ready = False

    def stop(self, drain_timeout_seconds: float) -> None:
        pass

    def snapshot(self) -> EngineNumbers:
        return EngineNumbers()

    def submit(self, request: Request, deliver: Deliver) -> None:
        if self.submit_error is not None:
            raise self.submit_error
        now_ns = self._runtime.clock_ns()
        times = RequestTimes(request.received_ns, submitted=now_ns, tokenize_started=now_ns, tokenized=now_ns)
        self.open[request.request_id] = deliver
        self.times[request.request_id] = times
        self.submitted.put(request)
        if request.params.prompt_texts:
            self._with_texts[request.request_id] = request
        try:
            self._check(request)
        except APIError as error:
            self.deliver([failed(request.request_id, error, Usage(0, 0, 0))])
            return
        times.scheduled = self._runtime.clock_ns()
        for events in self.script(request):
            if times.first_token is None and any(isinstance(event, TokenChunk) for event in events):
                times.first_token = self._runtime.clock_ns()
            if isinstance(events[-1], Finished):
                times.last_token = self._runtime.clock_ns()
                times.first_token = times.first_token or times.last_token
            self.deliver(events)

    def _check(self, request: Request) -> None:
        params = request.params
        named_ids = {
            "prompt": [i for prompt in request.prompts for i in self.tokenizer.encode(prompt)],
            "logit_bias": params.logit_bias,
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
        }
        if any(not word.strip(" ") for word in params.bad_words):
            raise InvalidRequest("Invalid 'bad_words': a word has no tokens of its own.", param="bad_words")
        if any(isinstance(prompt, TextPrompt) and not prompt.text for prompt in request.prompts):
            raise InvalidRequest("Invalid 'prompt': it has no tokens. Send at least one.", param="prompt")
        for name, ids in named_ids.items():
            if max(ids, default=0) >= VOCAB_SIZE:
                raise InvalidRequest(f"Invalid '{name}': a token id is outside the model's vocabulary.", param=name)

    def deliver(self, events: list[Event]) -> None:
        """Deliver events of one request, with its stamps so far."""
        request_id = events[-1].request_id
        deliver = self.open[request_id]
        for event in events:
            if isinstance(event, PromptDone) and (request := self._with_texts.get(request_id)) is not None:
                event.texts = [*self.tokenizer.text_parts(request.prompts[event.prompt_index], event.token_ids)]
            if not isinstance(event, TokenChunk | Pooled):
                event.times = replace(self.times[request_id])
        if isinstance(events[-1], TERMINAL):
            del self.open[request_id], self.times[request_id]
        deliver(events)

    def abort(self, request_id: str) -> None:
        if request_id in self.open:
            self.aborted.put(request_id)
            self.deliver([Aborted(request_id, Usage(3, 0, 1), RequestTimes(), EngineAccount())])


def finished(request_id: str, usage: Usage, account: EngineAccount | None = None) -> Finished:
    """Return a terminal event; the engine fills in the stamps."""
    return Finished(request_id, usage, RequestTimes(), copy(account or EngineAccount()))


def failed(request_id: str, error: APIError, usage: Usage) -> Failed:
    return Failed(request_id, error, usage, RequestTimes(), EngineAccount())


def says(
    *texts: str,
    finish: FinishReason = FinishReason.STOP,
    stop_reason: str | int | None = None,
    has_end_token: bool = False,
    account: EngineAccount | None = None,
) -> Script:
    """Return a script that gives each choice these texts, one token for each. The choices take turns."""

    def script(request: Request) -> Iterable[list[Event]]:
        rid = request.request_id
        params = request.params
        yield list(prompts_done(request))
        num_choices = len(request.prompts) * params.n
        for position, text in enumerate(texts):
            is_last = position == len(texts) - 1
            yield [
                TokenChunk(
                    rid,
                    index,
                    text,
                    [position + 10],
                    token_logprobs(logprob(text, position + 10)) if params.logprobs is not None else None,
                    finish if is_last else None,
                    stop_reason if is_last else None,
                    [len(text)] if params.text_lengths else None,
                    has_end_token and is_last,
                )
                for index in range(num_choices)
            ]
        yield [finished(rid, Usage(3 * len(request.prompts), 2, len(texts) * num_choices), account)]

    return script


def pools(*vectors: Sequence[float]) -> Script:
    """Return a script that gives each prompt one of these vectors, the last prompt first."""

    def script(request: Request) -> Iterable[list[Event]]:
        for index in reversed(range(len(request.prompts))):
            yield [Pooled(request.request_id, index, array("f", vectors[index]))]
        yield [finished(request.request_id, Usage(3 * len(request.prompts), 0, 0))]

    return script


def candidates(*logprobs: list[float]) -> Script:
    """Return a script in which choice i of each prompt gets a token for each of its log-probabilities. The text of each
    token is the index of the choice."""

    def script(request: Request) -> Iterable[list[Event]]:
        rid = request.request_id
        best = [(8, b"x", -0.1)] * (request.params.logprobs or 0)
        yield list(prompts_done(request))
        for index in range(len(request.prompts) * len(logprobs)):
            name = f"{index}"
            values = logprobs[index % len(logprobs)]
            tokens = token_logprobs(*([(7, name.encode(), value), *best] for value in values))
            text = name * len(tokens)
            token_ids = [7] * len(tokens)
            lengths = [len(name)] * len(tokens)
            yield [TokenChunk(rid, index, text, token_ids, tokens, FinishReason.LENGTH, text_lengths=lengths)]
        num_tokens = len(request.prompts) * sum(map(len, logprobs))
        yield [finished(rid, Usage(3 * len(request.prompts), 2, num_tokens))]

    return script


def prompts_done(request: Request) -> Iterable[PromptDone]:
    for index in range(len(request.prompts)):
        tokens = None
        if request.params.prompt_logprobs is not None:
            tokens = token_logprobs([(1, b"In", math.nan)], logprob(" a", 2), logprob("?", 3), rank=2)
        yield PromptDone(request.request_id, index, [1, 2, 3], tokens, RequestTimes(), 0 if index else 2)


def logprob(text: str, token_id: int) -> list[Entry]:
    """Return a sampled token that is the second best, and its alternatives."""
    better = (token_id + 1, f"{text}!".encode(), -0.25)
    itself = (token_id, text.encode(), -1.5)
    return [itself, better, itself, (token_id + 2, f"{text}?".encode(), -math.inf)]


def fails(error: APIError, *texts: str) -> Script:
    """Return a script in which the request fails after these texts."""

    def script(request: Request) -> Iterable[list[Event]]:
        yield from starts(*texts)(request)
        yield [failed(request.request_id, error, Usage(3, 0, len(texts)))]

    return script


def starts(*texts: str) -> Script:
    """Return a script that gives these texts, and then nothing until the request is aborted."""

    def script(request: Request) -> Iterable[list[Event]]:
        if texts:
            yield [*prompts_done(request), *(TokenChunk(request.request_id, 0, text, [5], None) for text in texts)]

    return script


class FakeTelemetry:
    def __init__(self, runtime: Runtime = THREADS) -> None:
        self._runtime = runtime
        self.reset()
        self.recent = RecentRequests(8, epoch_offset_ns=lambda: 0)
        self.clients = Clients(runtime.clock_ns)
        self.samples = LiveSamples(RequestSeries("demo", epoch_offset_ns=lambda: 0), lambda: 0, runtime.clock_ns)
        self.closed = False
        self.shown: dict[str, Callable[[], Numbers]] = {}  # the metrics of plug-ins
        self.histograms: dict[str, list[float]] = {}  # likewise
        self.refused_access: list[str] = []  # the reasons

    def reset(self) -> None:
        self.records: queue.Queue[RequestRecord] = queue_in(self._runtime)
        self.sampled_traces: set[int] = set()

    def is_sampled(self, trace: TraceContext) -> bool:
        return trace.trace_id in self.sampled_traces

    def record(self, record: RequestRecord) -> None:
        self.recent.add(record)
        self.records.put(record)

    def wait_for_queued(self, timeout_seconds: float) -> None:
        pass

    def next_record(self) -> RequestRecord:
        return self.records.get()

    def observe_event_loop_lag(self, seconds: float) -> None:
        pass

    def count_refused_access(self, reason: str) -> None:
        self.refused_access.append(reason)

    def render(self, accept: str, names_clients: bool = True) -> tuple[bytes, str]:
        return f"# accept: {accept}\n{'# names clients' if names_clients else ''}".encode(), "text/plain; version=0.0.4"

    def show(self, metric: Metric, read: Callable[[], Numbers]) -> None:
        self.shown[metric.name] = read

    def show_histogram(self, metric: Metric) -> Callable[[float], None]:
        return self.histograms.setdefault(metric.name, []).append

    def close(self, timeout_seconds: float) -> bool:
        self.closed = True
        return True
