"""The engine as its users see it: it takes requests, with or without HTTP around it.

engine = Engine.from_pretrained("demo")
engine.start()
print(engine.generate(["The capital of France is"], SamplingParams(max_tokens=8, temperature=0))[0].text)
engine.stop()
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from oaiserve.config import EngineOptions
from oaiserve.engine.admission import Admission
from oaiserve.engine.current_numbers import current_numbers
from oaiserve.engine.engine_parts import EngineParts
from oaiserve.engine.grammars.grammar import Grammars
from oaiserve.engine.loop import EngineLoop
from oaiserve.engine.replica_reports import Reports
from oaiserve.engine.request import (
    TERMINAL,
    Aborted,
    Deliver,
    Event,
    Failed,
    Prompt,
    Request,
    SamplingParams,
    TextPrompt,
    TokenChunk,
    TokenPrompt,
)
from oaiserve.engine.requests.commands import Abort, DropAdapter, Stop, Submitted
from oaiserve.engine.requests.open_rows import OpenRows
from oaiserve.engine.scheduling.pacing import StepTime
from oaiserve.engine.scheduling.policy import POLICIES
from oaiserve.engine.scheduling.scheduler import Scheduler
from oaiserve.engine.sequences.blocks import BlockPool, StatePool
from oaiserve.engine.start.plan import start_model
from oaiserve.engine.start.request import LoadMedia, Way
from oaiserve.engine.start.start_times import StartTimes
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.engine.tiers.lower_tier import LowerTier
from oaiserve.engine.tokenize import Post, TokenizeStage
from oaiserve.engine.types.adapters import ServedAdapter
from oaiserve.engine.types.sampling_rule import SamplingRule
from oaiserve.errors import InvalidRequest, NotFound, Unavailable
from oaiserve.explain.step_cost import StepCost
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.open_row import MOST_SHOWN, OpenRow
from oaiserve.facts.step_record import StepRecord
from oaiserve.http.fair_turns import REST, Work
from oaiserve.runtime import THREADS, Queue, Runtime
from oaiserve.wire.prefix_keys import Prompt as RoutedPrompt
from oaiserve.wire.prefix_keys import prompt_of_body
from oaiserve.wire.report import ReplicaReport

Result = TypeVar("Result")


class Engine:
    """The engine takes requests and delivers their events. All of its methods may be called from any thread.

    `from_pretrained` starts its model; tests make a small one. Request ids must be unique among the open
    requests.
    """

    # Only an engine in a separate process is started again, and pauses meanwhile.
    pause = ""
    num_restarts = 0
    replicas = ()

    def __init__(self, parts: EngineParts) -> None:
        """Make an engine, not started yet."""
        model = parts.model
        self.tokenizer = model.tokenizer
        self.pooling = model.pooling
        self.media = frozenset() if model.media is None else model.media.kinds
        self.adapters = model.adapters
        self.path = model.path
        self.max_model_len = model.max_model_len
        self.vocab_size = model.vocab_size
        self.default_params = dict(model.default_params)
        self.recommendation = model.recommendation
        self.energy = parts.energy
        self._parts = parts
        self._clock_ns = parts.runtime.clock_ns
        self._is_draining = False
        self.admission = Admission(
            parts.options.max_waiting,
            lambda num_waiting: self._loop.requests.drain_rate.retry_after_seconds(num_waiting),
            has_media=model.media is not None,
        )
        pool = BlockPool(model.num_blocks, parts.options.block_size)
        self._tier: LowerTier | None = None
        if model.make_tier is not None:
            self._tier = model.make_tier(pool, lambda arrived: self._loop.post(arrived), parts.runtime)
        self._loop = EngineLoop(
            parts,
            _scheduler(parts, pool, self._tier, lambda: self.step_cost),
            waiting=self.admission.waiting,
            stop_tokenizing=lambda request_id: self._tokenize.abort(request_id),
            give_back_later=lambda: self._tokenize.give_back_later(),
        )
        phases = self._loop.phases
        self._tokenize = _tokenize_stage(parts, self._loop.post if phases is None else phases.watch(self._loop.post))
        self._reports = Reports(
            self.snapshot,
            self._loop.requests.computed_prompts,
            is_cached=lambda block_hash: pool.find(block_hash) is not None,
            clock_ns=self._clock_ns,
            incarnation=parts.runtime.token_hex(8),
        )

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "demo",
        options: EngineOptions | None = None,
        *,
        times: StartTimes | None = None,
        meanwhile: Callable[[], object] = lambda: None,
        rules: Callable[[Tokenizer], tuple[SamplingRule, ...]] | None = None,
        ways: Callable[[], Iterable[Way]] = tuple,
        load_media: LoadMedia | None = None,
        runtime: Runtime = THREADS,
        **kwargs: Any,
    ) -> Engine:
        """Load a model and return its engine. `model` is "demo", a folder, a hub id or a GGUF file.

        The options are an EngineOptions, or its fields by name. `times` records the phases of the load. `meanwhile` is
        called while torch's libraries are loaded, which leaves time for other imports. `rules` makes the plug-ins'
        sampling rules for the model's tokenizer, and `ways` returns the plug-ins' ways to start a model. Without the
        one of the plug-in `cuda`, transformers' own code computes on a GPU. Without `load_media`, the engine accepts no
        images or sounds. `runtime` starts all threads, including those of the load. Raises StartupError if the model
        cannot be loaded or served.
        """
        options = replace(options or EngineOptions(), **kwargs)
        served = start_model(
            model, options, times or StartTimes(), meanwhile, runtime, ways=ways, load_media=load_media
        )
        if rules is not None:
            served = replace(served, rules=rules(served.tokenizer))
        return cls(EngineParts.of(served, options, runtime=runtime))

    @property
    def is_on_cpu(self) -> bool:
        return self._parts.model.device == "cpu"

    @property
    def kv_bytes(self) -> int:
        """Return the size of the KV cache."""
        return self._parts.model.num_blocks * self._parts.model.block_bytes

    @property
    def model_info(self) -> dict[str, str]:
        """Return the labels that telemetry shows for the model."""
        model = self._parts.model
        return {
            "dtype": model.dtype,
            "device": model.device,
            "max_model_len": str(model.max_model_len),
            "block_size": str(self._parts.options.block_size),
            "kv_blocks": str(model.num_blocks),
        }

    @property
    def capacity(self) -> dict[str, int]:
        """Return the limits of steps. Recordings include them, so that a replay uses the same ones."""
        parts = self._parts
        return {
            "drafts": parts.has_drafts,
            "block_size": parts.options.block_size,
            "kv_blocks": parts.model.num_blocks,
            "max_model_len": parts.model.max_model_len,
            "max_running": parts.limits.max_running,
            "max_step_tokens": parts.limits.max_step_tokens,
        }

    @property
    def features(self) -> dict[str, str]:
        """Return optional features, such as faster ways to compute, each with the reason why it is off, or "" if it is
        on."""
        features = dict(self._parts.model.features)
        if self._parts.model.runner.is_exact:
            features["exact"] = ""
        else:
            features["exact"] = "a token's logits depend on the rows of its step"
        if self._parts.has_drafts:
            features["drafts"] = ""
        else:
            features["drafts"] = "the model keeps states, or --drafts does not ask for them"
        return features

    def load_adapter(self, name: str, path: Path, *, in_place: bool = False) -> ServedAdapter:
        """Load an adapter for requests, which takes a while. With `in_place`, it replaces the adapter of the same name,
        which open requests keep. Raises what `AdapterTable.load` does."""
        created = self._parts.runtime.unix_ns() // 10**9
        if in_place:
            adapter, replaced = self.adapters.replace(name, path, created)
            if replaced is not None:
                self._loop.post(DropAdapter(replaced.number))
        else:
            adapter = self.adapters.load(name, path, created)
        self._tokenize.give_back_later()  # Free the memory that the files were read into.
        return adapter

    def unload_adapter(self, name: str) -> ServedAdapter:
        """Accept no further requests for an adapter. It is freed when the last open request with it ends. Raises
        NotFound."""
        adapter = self.adapters.unload(name)
        self._loop.post(DropAdapter(adapter.number))
        return adapter

    @property
    def failure(self) -> BaseException | None:
        """Return the error that has ended the engine thread or is about to; None after `stop`."""
        return self._loop.failure

    @property
    def hang(self) -> str:
        """The part of its work in which the engine thread is stuck; empty while it makes progress."""
        return self._loop.watchdog.hang

    @property
    def is_ready(self) -> bool:
        return self._loop.is_alive and not self._is_draining and self.failure is None and not self.hang

    @property
    def step_cost(self) -> StepCost | None:
        """The learnt cost of steps at their current slowdown: None before the first steps, and if time isn't divided
        into causes."""
        if self._loop.causes is None:
            return None
        return self._loop.causes.slowed_cost

    @property
    def num_waiting(self) -> int:
        """Return the number of sequences before their first step, and of other work for the tokenizer."""
        return self.admission.waiting.total

    @property
    def numbers(self) -> EngineNumbers:
        """The numbers as the engine thread has last published them."""
        return self._loop.snapshot

    def snapshot(self) -> EngineNumbers:
        """Return the engine's numbers after the last step, or the current ones if there is no work. This costs the
        engine thread nothing."""
        now_ns = self._clock_ns()  # before the snapshot, so that the idle time of a later call is never less
        cores_ns = self._parts.cores_ns()
        return current_numbers(
            self.numbers,
            self.adapters.served,
            now_ns=now_ns,
            cores_ns=cores_ns,
            explains=self._loop.causes is not None,
            num_tokenizing=self._tokenize.num_waiting,
            num_hangs=self._loop.watchdog.num_hangs,
        )

    def report(self, replica: str = "") -> ReplicaReport:
        """Return the load and the prefix keys of cached prompts, for routers, within a millisecond."""
        return self._reports.report(replica)

    @property
    def is_reporting(self) -> bool:
        """Return whether a report has been requested. From then on, requests should have `routing`."""
        return self._reports.is_asked

    def routing_of(self, content: bytes | bytearray) -> RoutedPrompt | None:
        return prompt_of_body(content) if self._reports.is_asked else None

    def open_requests(self, epoch_offset_ns: int, request_id: str | None = None) -> dict[str, OpenRow]:
        """Return the newest open requests by id, newest first, or only the one with this id. It may take milliseconds.

        `epoch_offset_ns` is the wall clock minus the monotonic clock.
        """
        rows = OpenRows(self._loop.arriving, self._loop.requests, self._loop.causes, self._clock_ns)
        if request_id is not None:
            return rows.one(request_id, epoch_offset_ns)
        return rows.newest(MOST_SHOWN, epoch_offset_ns)

    def take_steps(self) -> list[StepRecord]:
        """Take the kept records of steps since the last call, oldest first. One thread at a time may call this."""
        steps = []
        while self._loop.steps:
            steps.append(self._loop.steps.popleft())
        return steps

    def start(self) -> None:
        """Start the engine thread, and wait until it is ready to compute at full speed."""
        self._loop.start()
        if self._tier is not None:
            self._tier.start()

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Accept a request. `deliver` gets its events on the engine thread; the last event is a terminal one.

        This neither encodes nor blocks, unless there are no tokenize workers. Raises Unavailable before `start`, while
        the engine drains and after its end, and Overloaded if too much waits. If nothing waits, a request of any size
        is taken. If one client has filled the queue, others still get their share.
        """
        self._check_open()
        if request.is_background:
            self.admission.take_in_background(request.client, request.num_bytes, self._loop.requests.num_background)
        else:
            self.admission.take(request.client, request.num_choices, request.num_bytes)
        self._accept(request, deliver, self._clock_ns())

    def take_over(self, request: Request, deliver: Deliver, submitted_ns: int) -> None:
        """Take a request that another process has accepted for this engine, at a time of the same clock."""
        self.admission.waiting.add(request.client, 0 if request.is_background else request.num_choices)
        self.admission.body_bytes.add(request.client, request.num_bytes)
        self._accept(request, deliver, submitted_ns)

    def tell_first_steps(self, tell: Callable[[list[str]], object]) -> None:
        """From now on, call `tell` on the engine thread with the ids of requests that are about to enter their first
        step."""
        self._loop.requests.on_first_step = tell

    def _accept(self, request: Request, deliver: Deliver, submitted_ns: int) -> None:
        self._loop.post(Submitted(request, deliver, submitted_ns))
        give_back = partial(self.admission.body_bytes.give_back, request.client, request.num_bytes)
        self._tokenize.submit(request, give_back)

    def encode(self, prompt: Prompt, most_tokens: int | None) -> Work[list[int]]:
        """Return work for `run_in_turns` that encodes a prompt. It raises what `Tokenizer.encode_in_pieces` does."""
        return self._tokenize.encode(prompt, most_tokens)

    def run_in_turns(self, work: Work[Result], *, client: str, num_bytes: int) -> Future[Result]:
        """Run work with the tokenizer alongside requests, in turns by client: each `yield` of it ends a turn.

        Cancelling the future ends it. `num_bytes` is the size of its body. Raises Unavailable and
        Overloaded, as `submit` does.
        """
        self._check_open()
        self.admission.take(client, 1, num_bytes)

        def on_end() -> None:
            self.admission.waiting.give_back(client, 1)
            self.admission.body_bytes.give_back(client, num_bytes)

        return self._tokenize.run(work, client=client, num_bytes=num_bytes, on_end=on_end)

    def give_back_later(self) -> None:
        """Return freed memory to the system in a moment, after a large body was dropped before it became work."""
        self._tokenize.give_back_later()

    def _check_open(self) -> None:
        if self._is_draining:
            raise Unavailable("The server is shutting down. Please try again.", retry_after_seconds=5)
        if not self.is_ready:
            raise Unavailable("The server is not ready to take requests; try again later.", retry_after_seconds=5)

    def abort(self, request_id: str) -> None:
        """End a request early, in any phase. This does nothing if it has ended."""
        # The order matters: when aborted, the stage posts a result without prompts, which must find the request ended.
        self._loop.post(Abort(request_id))
        self._tokenize.abort(request_id)

    def stream(self, request: Request) -> Iterator[Event]:
        """Submit a request, and yield its events up to the terminal one. Closing the generator aborts it."""
        inbox: Queue[list[Event]] = self._parts.runtime.queue()
        self.submit(request, inbox.put)
        ended = False
        try:
            while not ended:
                for event in inbox.get():
                    ended = isinstance(event, TERMINAL)
                    yield event
        finally:
            if not ended:
                self.abort(request.request_id)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int] | Prompt],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
    ) -> list[TokenChunk]:
        """Return all choices of all prompts, each in one chunk and in order, of the model or of one of its adapters.

        Raises NotFound for an unknown adapter, and the APIError of a failed request.
        """
        served = None if adapter is None else self.adapters.get(adapter)
        if adapter is not None and served is None:
            raise NotFound(f"No adapter '{adapter}' is loaded.")
        if self.pooling is not None:
            raise InvalidRequest(f"This model is for the task '{self.pooling.task}', and generates no text.")
        texts: list[Prompt] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                texts.append(TextPrompt(prompt))
            else:
                texts.append(prompt if isinstance(prompt, Prompt) else TokenPrompt(prompt))
        request = Request(
            f"generate-{next(_generate_ids)}",
            tuple(texts),
            params or SamplingParams(),
            stream_interval=0,
            adapter=0 if served is None else served.number,
        )
        choices: list[TokenChunk] = []
        for event in self.stream(request):
            if isinstance(event, TokenChunk):
                choices.append(event)
            elif isinstance(event, Failed):
                raise event.error
            elif isinstance(event, Aborted):
                raise Unavailable("The engine dropped the request.")
        return sorted(choices, key=lambda choice: choice.index)

    def drain(self) -> None:
        """Refuse new requests; open ones continue. A signal handler may call this, because it only sets a flag."""
        self._is_draining = True

    def stop(self, drain_timeout_seconds: float = 0.0) -> None:
        """Refuse new requests, give open ones this long to finish, fail the rest, and end all threads."""
        self.drain()
        if self._loop.is_alive:
            self._loop.post(Stop(drain=True))
            if not self._loop.join(drain_timeout_seconds):
                self._loop.post(Stop(drain=False))
        self._loop.join()  # After a failure, the thread may still deliver the ends of the open requests.
        self._tokenize.stop()
        if self._tier is not None:
            self._tier.stop()

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


_generate_ids = itertools.count()


def _scheduler(
    parts: EngineParts, pool: BlockPool, tier: LowerTier | None, step_cost: Callable[[], StepCost | None]
) -> Scheduler:
    model = parts.model
    options = parts.options
    step_time: StepTime | None = None
    if options.explain:  # otherwise the cost of steps isn't fitted
        step_time = StepTime(step_cost, parts.limits.max_step_tokens, options.itl_target_seconds)
    return Scheduler(
        pool,
        parts.limits,
        policy=POLICIES[options.policy],
        prefix_cache=options.prefix_cache and model.pooling is None,
        states=StatePool(model.num_states) if model.num_states else None,
        tier=tier,
        step_time=step_time,
    )


def _tokenize_stage(parts: EngineParts, post: Post) -> TokenizeStage:
    model = parts.model
    grammars = model.grammars or Grammars(
        model.tokenizer.backend, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids
    )
    return TokenizeStage(
        model.tokenizer,
        grammars.compile,
        post,
        num_workers=parts.options.tokenize_workers,
        # Encoding holds no lock, but occupies a core, which slows down decoding on a CPU.
        encode_rest=REST if model.device == "cpu" and model.pooling is None else 0.0,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        media=None if model.media is None else model.media.reader,
        runtime=parts.runtime,
    )
