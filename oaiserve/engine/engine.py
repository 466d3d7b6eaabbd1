"""The engine as its users see it: an object that takes requests, with or without HTTP around it.

engine = Engine.from_pretrained("demo")
engine.start()
print(engine.generate(["The capital of France is"], SamplingParams(max_tokens=8, temperature=0))[0].text)
engine.stop()
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from oaiserve import demo, hub
from oaiserve.config import EngineOptions
from oaiserve.engine.blocks import BlockPool
from oaiserve.engine.detokenize import TokenTable
from oaiserve.engine.drafts import Drafts
from oaiserve.engine.grammar import Grammars
from oaiserve.engine.host_time import Ranges
from oaiserve.engine.loop import Abort, Broken, EngineLoop, Runner, Stop, Submitted
from oaiserve.engine.open_requests import Bounds
from oaiserve.engine.policy import POLICIES
from oaiserve.engine.pooling import Pooling
from oaiserve.engine.profiling import EndProfile, Profiler, StartProfile
from oaiserve.engine.request import (
    TERMINAL,
    Aborted,
    ChatPrompt,
    Deliver,
    Event,
    Failed,
    FinishReason,
    PairPrompt,
    Prompt,
    Request,
    SamplingParams,
    TextPrompt,
    TokenChunk,
    TokenPrompt,
)
from oaiserve.engine.scheduler import Limits, Scheduler
from oaiserve.engine.shared_limit import SharedLimit
from oaiserve.engine.step_account import EngineSnapshot
from oaiserve.engine.tokenize import REST, TokenizeStage
from oaiserve.engine.tokenizer import Tokenizer
from oaiserve.errors import InvalidRequest, Overloaded, Unavailable
from oaiserve.model_files import refuse_unless_sound
from oaiserve.record import HostPart, Profile, StepRecord
from oaiserve.remembered import NoRecord, NotRemembered, Subject
from oaiserve.source import find_model
from oaiserve.start_times import StartTimes
from oaiserve.times import monotonic_ns

if TYPE_CHECKING:
    from oaiserve.engine.model.parallel.workers import Workers
    from oaiserve.engine.model.pooling.load import LoadedPooler
    from oaiserve.engine.model.spec import LoadedModel, ModelSpec
    from oaiserve.engine.model.started import Started

log = logging.getLogger(__name__)

# Of the bodies whose work waits or is under way. Parsed, a body takes up to four times its bytes, or more as ids.
MAX_BODY_BYTES = 64 * 2**20
# What the first answer need not wait for, and would: most of it keeps the interpreter.
AFTER_FIRST_ANSWER_SECONDS = 0.5
Result = TypeVar("Result")


@dataclass(slots=True)
class Completion:
    """A whole choice, as `Engine.generate` returns it."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class ModelProcesses(Protocol):
    """The other processes that a model which is split runs in.

    They have ended, or are about to, once `failure` is set.
    """

    failure: Exception | None

    def watch(self, on_failure: Callable[[Exception], None], /) -> None: ...

    def stop(self) -> None: ...


class Engine:
    """The engine takes requests and delivers their events. All of its methods may be called from any thread.

    `from_pretrained` builds one; tests build it of its parts. Request ids must be unique among the open requests.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        runner: Runner,
        num_blocks: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        grammars: Grammars | None = None,
        default_params: Mapping[str, float | int] | None = None,
        options: EngineOptions | None = None,
        max_step_tokens_default: int = 512,
        device: str = "",
        dtype: str = "",
        ranges: Ranges | None = None,
        profiler: Profiler | None = None,
        processes: ModelProcesses | None = None,
        pooling: Pooling | None = None,
        clock_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        options = options or EngineOptions()
        self.tokenizer = tokenizer
        self.pooling = pooling  # None: the model generates text
        self.max_model_len = max_model_len  # tokens of prompt and answer together
        self.vocab_size = vocab_size
        self.default_params = dict(default_params or {})  # what the model itself asks for
        self.model_info = {  # for telemetry
            "dtype": dtype,
            "device": device,
            "max_model_len": str(max_model_len),
            "block_size": str(options.block_size),
            "kv_blocks": str(num_blocks),
        }
        self._max_waiting = options.max_waiting
        self._waiting = SharedLimit(options.max_waiting)  # choices, and other work for the tokenizer
        self._body_bytes = SharedLimit(MAX_BODY_BYTES)
        self._clock_ns = clock_ns
        self._is_draining = False
        self._processes = processes
        has_drafts = options.drafts == "lookup" or (options.drafts == "auto" and device == "cpu")
        self._loop = EngineLoop(
            Scheduler(
                BlockPool(num_blocks, options.block_size),
                Limits(
                    max_running=options.max_running,
                    max_step_tokens=options.step_tokens(max_step_tokens_default),
                    prefill_max_requests=options.prefill_max_requests,
                    prefill_max_tokens=options.prefill_max_tokens,
                    lookahead=options.lookahead,
                ),
                policy=POLICIES[options.policy],
                prefix_cache=options.prefix_cache,
            ),
            runner,
            TokenTable(tokenizer.backend),
            Bounds(
                max_model_len=max_model_len,
                max_waiting_tokens=options.max_waiting_tokens,
                queue_timeout_seconds=options.queue_timeout_seconds,
                request_timeout_seconds=options.request_timeout_seconds,
                **_default_limits(options, self.default_params),
            ),
            waiting=self._waiting,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            clock_ns=clock_ns,
            stop_tokenizing=lambda request_id: self._tokenize.abort(request_id),
            pools=pooling is not None,
            # What a draft follows must be known before the step is launched.
            overlap=options.overlap and runner.is_asynchronous and not has_drafts,
            drafts=Drafts(only_if_exact=options.drafts == "auto") if has_drafts and pooling is None else None,
            itl_target_seconds=options.itl_target_seconds,
            ranges=ranges,
            profiler=profiler,
        )
        grammars = grammars or Grammars(tokenizer.backend, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        self._tokenize = TokenizeStage(
            tokenizer,
            grammars.compile,
            self._loop.post,
            num_workers=options.tokenize_workers,
            # Encoding keeps no lock, but a core, and streams that decode would notice.
            encode_rest=REST if device == "cpu" and pooling is None else 0.0,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            clock=clock_ns,
        )
        if processes is not None:
            processes.watch(lambda failure: self._loop.post(Broken(failure)))

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "demo",
        options: EngineOptions | None = None,
        *,
        times: StartTimes | None = None,
        meanwhile: Callable[[], object] = lambda: None,
        **kwargs: Any,
    ) -> Engine:
        """Load a model and return its engine. `model` is "demo", a folder, a hub id or a GGUF file.

        The options are an EngineOptions, or its fields by name. `times` gets the parts of the load. `meanwhile` is
        called while native code packs the weights of a model that has been checked, which leaves time to import more.
        Raises StartupError if the model cannot be loaded or served.
        """
        options, times = replace(options or EngineOptions(), **kwargs), times or StartTimes()
        if model != "demo":
            return cls._load(model, options, times, meanwhile)
        folder = demo.fetched()
        # Its digests are computed beside the imports, which leave a core idle.
        with ThreadPoolExecutor(1, thread_name_prefix="digests") as beside:
            unchanged = beside.submit(times.run, "digests", demo.refuse_unless_unchanged, folder)
            try:
                return cls._load(folder, options, times, meanwhile)
            finally:
                unchanged.result()  # its error says why another one was raised

    @classmethod
    def _load(
        cls, model: str | Path, options: EngineOptions, times: StartTimes, meanwhile: Callable[[], object]
    ) -> Engine:
        source = find_model(model)
        refuse_unless_sound(source)
        template = options.chat_template.read_text(encoding="utf-8") if options.chat_template else None
        asked: Subject | None = None
        if source.is_local and source.gguf_file is None:
            with times.part("import of torch"):
                from oaiserve.engine.model.cpu.checked import checked_subject

            asked = checked_subject(Path(source.location), options)
            if asked is not None and not options.recheck:
                try:
                    return cls._from_checked(asked, template, options, times, meanwhile)
                except NotRemembered as reason:
                    level = logging.DEBUG if isinstance(reason, NoRecord) else logging.INFO
                    text = "The check of this model is not remembered, so transformers' code is loaded: %s"
                    log.log(level, text, reason)
        with times.part("import of transformers"):  # takes seconds
            from oaiserve.engine.model.load import load_model
            from oaiserve.engine.model.pooling.load import find_model_task, load_pooler

        offline = not source.is_local and not hub.is_reachable()
        task = find_model_task(model, options, offline=offline)
        with times.part("tokenizer"):
            tokenizer = Tokenizer.from_pretrained(model, template, offline=offline, recheck=options.recheck)
        # The model is loaded in a thread that ends. Each thread that computes gets a pool of OpenMP workers. Once these
        # outnumber the cores, all of them sleep between operations instead of spinning, and a decode step on a CPU
        # takes two thirds longer. Afterwards only the engine thread computes.
        with ThreadPoolExecutor(1, thread_name_prefix="load") as loader:
            if task != "generate":
                pooler = loader.submit(load_pooler, model, task, options, offline=offline).result()
                return cls.from_pooler(pooler, tokenizer, options)
            if options.tensor_parallel > 1:
                from oaiserve.engine.model.parallel.workers import load_parallel

                loaded, workers = loader.submit(load_parallel, model, options, offline=offline).result()
                try:
                    with workers.explained():
                        return cls.from_loaded(loaded, tokenizer, options, workers)
                except BaseException:
                    workers.stop()
                    raise
            loaded = loader.submit(
                times.run,
                "weights",
                load_model,
                model,
                device=options.device,
                dtype=options.dtype,
                max_model_len=options.max_model_len,
                offline=offline,
            ).result()
        with times.part("native step"):
            return cls.from_loaded(loaded, tokenizer, options, asked=asked)

    @classmethod
    def _from_checked(
        cls,
        asked: Subject,
        template: str | None,
        options: EngineOptions,
        times: StartTimes,
        meanwhile: Callable[[], object],
    ) -> Engine:
        """Make the engine of a model that an earlier start has checked. Raises NotRemembered."""
        with times.part("what is remembered"):
            from oaiserve.engine.model.cpu.checked import recall_model
            from oaiserve.engine.model.restart import restart_runner

            checked = recall_model(asked, options)
        # Weights are packed in native code, in a thread that ends, while Python makes the tables of the tokenizer.
        with ThreadPoolExecutor(1, thread_name_prefix="load") as loader:
            started = loader.submit(times.run, "weights and check", restart_runner, checked, options)
            with times.part("tokenizer"):
                tokenizer = Tokenizer.from_pretrained(asked.folder, template)
            grammars = cls._grammars(checked.spec, tokenizer)
            meanwhile()
            engine = cls._of(checked.spec, started.result(), tokenizer, grammars, options)
        grammars.prepare(AFTER_FIRST_ANSWER_SECONDS)
        log.info(
            "The native step is ready: it computes what transformers' code did on %s, with the same files, versions "
            "and CPU (--recheck asks that code again)",
            checked.day,
        )
        return engine

    @classmethod
    def from_loaded(
        cls,
        loaded: LoadedModel,
        tokenizer: Tokenizer,
        options: EngineOptions,
        workers: Workers | None = None,
        asked: Subject | None = None,
    ) -> Engine:
        """Make the engine of a loaded model. `workers` hold the other parts of a model that is split.

        If the native step computes what the model does, that is remembered for `asked`. Raises StartupError where the
        options ask for what the device or its memory does not have.
        """
        from oaiserve.engine.model.cpu.checked import remember_checked
        from oaiserve.engine.model.start import start_runner

        grammars = cls._grammars(loaded, tokenizer)
        grammars.prepare()  # while the model's code is made ready, most of which is native
        when_checked = None if asked is None else partial(remember_checked, asked, loaded, options=options)
        started = start_runner(loaded, options, workers, when_checked)
        return cls._of(loaded, started, tokenizer, grammars, options, workers)

    @staticmethod
    def _grammars(spec: ModelSpec, tokenizer: Tokenizer) -> Grammars:
        eos_token_ids = _end_of_sequence(spec, tokenizer)
        return Grammars(tokenizer.backend, vocab_size=spec.vocab_size, eos_token_ids=eos_token_ids)

    @classmethod
    def _of(
        cls,
        spec: ModelSpec,
        started: Started,
        tokenizer: Tokenizer,
        grammars: Grammars,
        options: EngineOptions,
        workers: Workers | None = None,
    ) -> Engine:
        engine = cls(
            tokenizer=tokenizer,
            runner=started.runner,
            num_blocks=started.num_blocks,
            max_model_len=started.max_model_len,
            vocab_size=spec.vocab_size,
            eos_token_ids=_end_of_sequence(spec, tokenizer),
            grammars=grammars,
            default_params=spec.default_params if options.generation_config else {},
            options=options,
            max_step_tokens_default=started.max_step_tokens_default,
            device=str(spec.device),
            dtype=str(spec.dtype).removeprefix("torch."),
            ranges=started.ranges,
            profiler=started.profiler,
            processes=workers,
        )
        log.info(
            "%s on %s in %s: %d KV blocks of %d tokens (%.2f GiB), up to %d tokens a request",
            spec.name,
            spec.device,
            str(spec.dtype).removeprefix("torch."),
            started.num_blocks,
            options.block_size,
            started.num_blocks * options.block_size * spec.kv_bytes_per_token / 2**30,
            started.max_model_len,
        )
        if engine.default_params:
            log.info("Defaults from the model's generation_config.json: %s", engine.default_params)
        return engine

    @classmethod
    def from_pooler(cls, pooler: LoadedPooler, tokenizer: Tokenizer, options: EngineOptions) -> Engine:
        """Make the engine of a model that turns texts into vectors or scores. It has no KV cache."""
        from oaiserve.engine.model.start import start_pooling

        started = start_pooling(pooler, options)
        engine = cls(
            tokenizer=tokenizer,
            runner=started.runner,
            num_blocks=0,
            max_model_len=pooler.max_model_len,
            vocab_size=pooler.vocab_size,
            options=replace(options, prefix_cache=False),
            max_step_tokens_default=started.max_step_tokens_default,
            device=str(pooler.device),
            dtype=str(pooler.dtype).removeprefix("torch."),
            profiler=started.profiler,
            pooling=pooler.pooling,
        )
        log.info(
            "%s on %s in %s, for --task %s: up to %d tokens a text",
            type(pooler.layers).__name__,
            pooler.device,
            str(pooler.dtype).removeprefix("torch."),
            pooler.pooling.task,
            pooler.max_model_len,
        )
        return engine

    @property
    def failure(self) -> BaseException | None:
        """The error that has ended the engine thread, or is about to end it; None after `stop`."""
        if self._loop.failure is None and self._processes is not None:
            return self._processes.failure
        return self._loop.failure

    @property
    def is_ready(self) -> bool:
        return self._loop.is_alive and not self._is_draining and self.failure is None

    @property
    def num_waiting(self) -> int:
        """The number of sequences that have not entered a step yet, those in the tokenize stage and other work for the
        tokenizer included."""
        return self._waiting.total

    def snapshot(self) -> EngineSnapshot:
        """Return the engine's numbers after the last step. This costs the engine thread nothing."""
        now_ns = self._clock_ns()  # before the snapshot, so that the idle time of a later call is never less
        snapshot = self._loop.snapshot
        host_ns = dict(snapshot.host_ns)
        if snapshot.idle_since_ns is not None:
            host_ns[HostPart.IDLE] += max(0, now_ns - snapshot.idle_since_ns)
        return snapshot._replace(num_tokenizing=self._tokenize.num_waiting, host_ns=host_ns)

    def take_steps(self) -> list[StepRecord]:
        """Take the records of the steps since the last call, oldest first, as far as they are kept.

        Only one thread may call this at a time. It never blocks.
        """
        steps = []
        while self._loop.steps:
            steps.append(self._loop.steps.popleft())
        return steps

    def start(self) -> None:
        self._loop.start()

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Accept a request. `deliver` gets its events on the engine thread; the last event is a terminal one.

        This neither encodes nor blocks, unless there are no tokenize workers. Raises Unavailable before `start`, while
        the engine drains and after its end, and Overloaded if too much waits. If nothing waits, a request of any size
        is taken. If one client has filled the queue, others still get their share.
        """
        self._check_open()
        self._take(request.client, request.num_choices, request.num_bytes)
        self._loop.post(Submitted(request, deliver, self._clock_ns()))
        self._tokenize.submit(request, partial(self._body_bytes.give_back, request.client, request.num_bytes))

    def run_in_turns(self, work: Generator[None, None, Result], *, client: str, num_bytes: int) -> Future[Result]:
        """Run work with the tokenizer among that of requests, in turns by client: each `yield` of it ends a turn.

        Cancelling the future ends it. `num_bytes` is the size of the body that it comes from. Raises Unavailable and
        Overloaded, as `submit` does.
        """
        self._check_open()
        self._take(client, 1, num_bytes)

        def on_end() -> None:
            self._waiting.give_back(client, 1)
            self._body_bytes.give_back(client, num_bytes)

        return self._tokenize.run(work, client=client, num_bytes=num_bytes, on_end=on_end)

    def give_back_later(self) -> None:
        """Give memory back to the system in a moment: a large body has been dropped before it was any work."""
        self._tokenize.give_back_later()

    def _check_open(self) -> None:
        if self._is_draining:
            raise Unavailable("The server is shutting down. Please try again.", retry_after_seconds=5)
        if not self.is_ready:
            raise Unavailable("The server is not ready to take requests; try again later.", retry_after_seconds=5)

    def _take(self, client: str, num_sequences: int, num_bytes: int) -> None:
        """Take the room that a request needs while it waits. Raises Overloaded if there is none for this client."""
        if not self._waiting.take(client, num_sequences):
            raise self._overloaded(
                f"{self.num_waiting} sequences are waiting already, this request has {num_sequences}, and the "
                f"limit is {self._max_waiting}"
            )
        if not self._body_bytes.take(client, num_bytes):
            self._waiting.give_back(client, num_sequences)
            raise self._overloaded("too many bytes of prompts are being tokenized already")

    def _overloaded(self, reason: str) -> Overloaded:
        retry_after_seconds = self._loop.requests.drain_rate.retry_after_seconds(self.num_waiting)
        message = f"The server is overloaded: {reason}; try again later."
        return Overloaded(message, retry_after_seconds=retry_after_seconds)

    def abort(self, request_id: str) -> None:
        """End a request early, in any phase. This does nothing if it has ended."""
        self._tokenize.abort(request_id)
        self._loop.post(Abort(request_id))

    def profile(self, num_steps: int, timeout_seconds: float) -> Future[Profile]:
        """Begin a profile of the next `num_steps` steps, or of as many as come in that time. All requests are slower
        meanwhile.

        The future gets the profile, or one of these errors: Conflict (a profile is being made already), NotFound (this
        engine has no profiler), InternalError (the profiler failed), Unavailable (the engine has ended).
        """
        asked = StartProfile(num_steps, int(timeout_seconds * 1e9))
        self._loop.post(asked)
        return asked.future

    def end_profile(self, asked: Future[Profile]) -> None:
        """End a profile early, with the steps that it has. This does nothing if it has ended or never began."""
        self._loop.post(EndProfile(asked))

    def stream(self, request: Request) -> Iterator[Event]:
        """Submit a request, and yield its events up to the terminal one. Closing the generator early aborts the
        request."""
        inbox: SimpleQueue[list[Event]] = SimpleQueue()
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
        self, prompts: Sequence[str | Sequence[int] | Prompt], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Return all choices of all prompts, in order. Raises the APIError that a request has failed with."""
        if self.pooling is not None:
            raise InvalidRequest(f"This model is for the task '{self.pooling.task}', and generates no text.")
        request = Request(
            f"generate-{next(_generate_ids)}",
            tuple(_as_prompt(prompt) for prompt in prompts),
            params or SamplingParams(),
            stream_interval=0,
        )
        completions: list[Completion] = []
        for event in self.stream(request):
            if isinstance(event, TokenChunk):
                completions.append(
                    Completion(event.index, event.text, event.token_ids, event.finish_reason, event.stop_reason)
                )
            elif isinstance(event, Failed):
                raise event.error
            elif isinstance(event, Aborted):
                raise Unavailable("The engine dropped the request.")
        return sorted(completions, key=lambda completion: completion.index)

    def drain(self) -> None:
        """Refuse requests from now on; open ones go on. A signal handler may call this, because it only sets a flag."""
        self._is_draining = True

    def stop(self, drain_timeout_seconds: float = 0.0) -> None:
        """Refuse new requests, give open ones this long to finish, fail the rest, and end all threads."""
        self.drain()
        if self._loop.is_alive:
            self._loop.post(Stop(drain=True))
            if not self._loop.join(drain_timeout_seconds):
                self._loop.post(Stop(drain=False))
                self._loop.join()
        self._tokenize.stop()
        if self._processes is not None:
            self._processes.stop()

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


_generate_ids = itertools.count()


def _as_prompt(prompt: str | Sequence[int] | Prompt) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if isinstance(prompt, TextPrompt | TokenPrompt | PairPrompt | ChatPrompt):
        return prompt
    return TokenPrompt(prompt)


def _end_of_sequence(spec: ModelSpec, tokenizer: Tokenizer) -> frozenset[int]:
    eos_token_id = tokenizer.eos_token_id
    return spec.eos_token_ids | (frozenset() if eos_token_id is None else {eos_token_id})


def _default_limits(options: EngineOptions, asked: Mapping[str, float | int]) -> dict[str, int]:
    """Return the limits of answers whose requests set none: the operator's, or else what the model asks for."""
    if options.default_max_tokens is not None:
        return {"default_max_tokens": options.default_max_tokens}
    if "max_new_tokens" in asked:  # as in transformers, it beats max_length
        return {"default_max_tokens": int(asked["max_new_tokens"])}
    return {"default_max_length": int(asked["max_length"])} if "max_length" in asked else {}
