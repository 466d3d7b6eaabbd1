"""Submit the calls of a run to oaiserve's engine in this process, without HTTP, and record each one as a Sample.

Only this file imports the engine, and only when it loads one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from loadtest.arrivals import Arrivals
from loadtest.client_health import ProcessHealth, ProcessWatch
from loadtest.drive import Progress
from loadtest.errors import UsageError
from loadtest.experiment import MOST_REQUESTS, plan
from loadtest.prompts import Call, Workload
from loadtest.sample import Sample
from oaiserve import interpreter
from oaiserve.config import Device, Dtype, EngineOptions, OptionError
from oaiserve.errors import APIError, DeviceLost
from oaiserve.runtime import THREADS, Empty, Queue, Runtime

if TYPE_CHECKING:
    from oaiserve.engine.engine import Engine
    from oaiserve.engine.request import Event, Prompt, Request, Terminal

SHOW_NS = 500_000_000  # interval at which progress is shown
BURST_SWITCH_SECONDS = 0.005  # Python's default
LEAST_QUIET_NS = 20_000_000  # Progress is not shown within this time before a submit, because that could delay it.
# With an engine in process, the lines of --requests may also have these fields.
SAMPLING = {"temperature", "top_p", "top_k", "min_p"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """The options of an engine in this process, and of what is submitted to it."""

    mode: Literal["online", "offline"] = "online"
    """online: answers are streamed. offline: all requests are submitted at the start, and each answer comes whole."""

    device: Device = "auto"
    """Device that runs the model. auto: the GPU if there is one, else the CPU."""

    dtype: Dtype = "auto"
    """Number format of the weights and the KV cache. auto: the model's, if the device is fast with it."""

    max_batch_size: int = 256
    """Maximum number of sequences in one batch (--max-running of a server)."""

    prefill_max_batch_size: int | None = None
    """Maximum number of sequences that prefill in one step. Default: as many as fit."""

    submit_interval_ms: float = 0.0
    """Milliseconds between two submits. 0: all at once. For other arrivals: --arrival."""

    submit_schedule: Literal["absolute", "relative"] = "absolute"
    """absolute: submits are due at fixed times, so a late one delays no other. relative: each is due one
    --submit-interval-ms after the one before has returned."""

    stream_interval: int = 1
    """Tokens per event of a stream. The first token is always sent at once."""

    tokenize_workers: int = 2
    """Threads that tokenize prompts. 0: submit encodes them itself."""

    pretok: bool = False
    """Encode the prompts before the run, and submit their token ids."""

    prefix_cache: bool = True
    """Reuse computed KV blocks for prompts that begin with the same tokens."""

    cuda_graph: bool = True
    """On a GPU, run steps as CUDA graphs."""

    nvtx: bool = False
    """Mark steps and phases of requests as ranges for a profiler: NVTX on a GPU, ITT on a CPU."""

    warmup_runs: int = 1
    """Whole runs before those that are measured."""

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--max-batch-size", self.max_batch_size, 1),
            ("--prefill-max-batch-size", 1 if self.prefill_max_batch_size is None else self.prefill_max_batch_size, 1),
            ("--submit-interval-ms", self.submit_interval_ms, 0),
            ("--stream-interval", self.stream_interval, 1),
            ("--tokenize-workers", self.tokenize_workers, 0),
            ("--warmup-runs", self.warmup_runs, 0),
        ):
            if not least <= value < float("inf"):
                raise UsageError(f"{flag} is {value:g}, but must be at least {least}.")
        if self.prefill_max_batch_size is not None and self.prefill_max_batch_size > self.max_batch_size:
            raise UsageError(
                f"--prefill-max-batch-size is {self.prefill_max_batch_size}, but must be at most --max-batch-size, "
                f"which is {self.max_batch_size}."
            )


def load_engine(model: str, options: EngineRun) -> Engine:
    """Load an engine without starting it. Raises UsageError or StartupError if it rejects an option."""
    interpreter.begin_load()
    try:
        from oaiserve.engine.engine import Engine
        from oaiserve.plugin_loading import own_plugins, ways_of

        kernels = [plugin for plugin in own_plugins() if plugin.name == "cuda"]
        return Engine.from_pretrained(
            model,
            EngineOptions(
                device=options.device,
                dtype=options.dtype,
                max_running=options.max_batch_size,
                prefill_max_requests=options.prefill_max_batch_size,
                prefix_cache=options.prefix_cache,
                tokenize_workers=options.tokenize_workers,
                cuda_graph=options.cuda_graph,
                nvtx=options.nvtx,
                max_waiting=MOST_REQUESTS,
            ),
            ways=partial(ways_of, kernels),
        )
    except OptionError as error:
        raise UsageError(str(error)) from error
    except DeviceLost as error:
        raise UsageError(f"{error} Run the command again: it then computes everything in plain torch.") from error
    finally:
        interpreter.end_load()


def engine_facts(engine: Engine) -> dict[str, str]:
    """Return, by name, the settings in the summary that the engine decides."""
    graphs = engine.features.get("graphs", "they are for a GPU")
    return {
        "device": engine.model_info["device"],
        "dtype": engine.model_info["dtype"],
        "paged_attention": "on" if engine.kv_bytes else "off: the model has no KV cache in blocks",
        "cuda_graphs": f"off: {graphs}" if graphs else "on",
    }


@dataclass(slots=True)
class EngineResult:
    """The measurements of one run."""

    samples: list[Sample]
    offsets: list[float] | None  # send times in seconds; None if they depend on earlier submits or answers
    health: ProcessHealth

    @property
    def submit_wall_seconds(self) -> float:
        """The time from the first submit to the return of the last one."""
        if not self.samples:
            return 0.0
        last = self.samples[-1]
        return (last.sent_ns + (last.submit_ns or 0) - self.samples[0].sent_ns) / 1e9


class EngineTarget:
    """An engine that has started. `run` may be called any number of times."""

    def __init__(self, engine: Engine, workload: Workload, options: EngineRun, runtime: Runtime = THREADS) -> None:
        self._engine = engine
        self._workload = workload
        self._options = options
        self._runtime = runtime

    def run(
        self, arrivals: Arrivals, seed: int, on_progress: Callable[[Progress, int], None] = lambda progress, total: None
    ) -> EngineResult:
        """Make all prompts, encode them with --pretok, submit all requests, and wait until they have ended."""
        calls, offsets = plan(self._workload, arrivals, seed)
        if own := sorted({key for call in calls for key in call.body} - {"messages", *SAMPLING}):
            raise UsageError(f"--requests has {', '.join(own)}, for which --target http is needed.")
        requests = [self._request(f"{seed}-{index}", call) for index, call in enumerate(calls)]
        samples = [
            Sample(
                index,
                0,
                requested_tokens=call.max_tokens,
                is_stream=self._options.mode == "online",
                must_fill=not self._workload.stop_on_eos,
            )
            for index, call in enumerate(calls)
        ]
        by_id = dict(zip((request.request_id for request in requests), samples, strict=True))
        answers = Answers(by_id, lambda progress: on_progress(progress, len(calls)), self._runtime)
        if offsets is None:
            due = when_users_are_free(arrivals, answers)
        elif self._options.submit_schedule == "relative":
            due = after_each_other(int(self._options.submit_interval_ms * 1e6), answers)
            offsets = None
        else:
            due = on_schedule(offsets, answers)
        # A burst takes about a millisecond. With the short switch interval of a server, the submitting thread would
        # yield to the tokenize workers, whose time would be counted in the submits.
        is_burst = arrivals.arrival == "at-once" and self._options.tokenize_workers > 0
        burst = interpreter.switch_interval(BURST_SWITCH_SECONDS) if is_burst else nullcontext()
        watch = ProcessWatch()
        watch.start(watch_loop=False)
        try:
            with interpreter.switch_interval(interpreter.SWITCH_SECONDS):
                with burst:
                    num_submitted = self._submit(requests, samples, due, answers)
                answers.wait_for_all()
        finally:
            health = watch.stop()
        return EngineResult(samples[:num_submitted], offsets, health)

    def _submit(
        self, requests: Sequence[Request], samples: Sequence[Sample], due: Iterator[int], answers: Answers
    ) -> int:
        """Submit each request when it is due, and return the number of submitted requests."""
        submit = self._engine.submit
        clock_ns = self._runtime.clock_ns
        deliver = answers.deliver
        progress = answers.progress
        for request, sample, due_ns in zip(requests, samples, due, strict=False):
            progress.num_sent += 1
            sample.intended_ns = due_ns
            sample.sent_ns = clock_ns()
            try:
                submit(request, deliver)
            except APIError as error:  # the engine has ended
                answers.fail(sample, error)
            sample.submit_ns = clock_ns() - sample.sent_ns
        return progress.num_sent

    def _request(self, request_id: str, call: Call) -> Request:
        from oaiserve.engine.request import ChatPrompt, Request, SamplingParams, TextPrompt, TokenPrompt

        prompt: Prompt
        if "messages" in call.body:
            prompt = ChatPrompt(call.body["messages"])
        elif isinstance(call.prompt, str):
            prompt = TextPrompt(call.prompt)
        else:
            prompt = TokenPrompt(call.prompt)
        if self._options.pretok:
            try:
                prompt = TokenPrompt(self._engine.tokenizer.encode(prompt))
            except APIError as error:
                raise UsageError(f"A prompt cannot be encoded: {error}") from error
        own = {name: value for name, value in call.body.items() if name in SAMPLING}
        sampling = {"temperature": self._workload.temperature, **own}
        params = SamplingParams(max_tokens=call.max_tokens, ignore_eos=not self._workload.stop_on_eos, **sampling)
        interval = 0 if self._options.mode == "offline" else self._options.stream_interval
        return Request(request_id, (prompt,), params, stream_interval=interval)


class Answers:
    """The answers of a run. The engine thread hands over the events of each step; the thread that submits writes them
    into the samples while it waits."""

    def __init__(self, samples: Mapping[str, Sample], show: Callable[[Progress], None], runtime: Runtime) -> None:
        """`samples` are keyed by request id."""
        from oaiserve.engine.request import TERMINAL, Failed, TokenChunk

        self._samples = samples
        self._show = show
        self.clock_ns = runtime.clock_ns
        self._shown_ns = self.clock_ns()
        self._inbox: Queue[tuple[int, list[Event]]] = runtime.queue()
        self._chunk = TokenChunk
        self._terminal = TERMINAL
        self._failed = Failed
        self.progress = Progress()
        self.ends: deque[int] = deque()  # end times of requests that the sender has not read yet

    def deliver(self, events: list[Event]) -> None:
        """Store the events of a step. The engine thread calls this."""
        self._inbox.put((self.clock_ns(), events))

    def take(self, until_ns: int) -> None:
        """Wait for the events of a step until `until_ns`, and write them into the samples."""
        now_ns = self.clock_ns()
        if now_ns - self._shown_ns >= SHOW_NS and until_ns - now_ns >= LEAST_QUIET_NS:
            self._shown_ns = now_ns
            self._show(self.progress)
        try:
            at_ns, events = self._inbox.get(timeout=max(0, until_ns - self.clock_ns()) / 1e9)
        except Empty:
            return
        for event in events:
            if isinstance(event, self._chunk):
                if event.token_ids:
                    self._samples[event.request_id].event_ns.append(at_ns)
            elif isinstance(event, self._terminal):
                self._finish(self._samples[event.request_id], at_ns, event)

    def wait_until(self, due_ns: int) -> None:
        while self.clock_ns() < due_ns:
            self.take(due_ns)

    def wait_for_all(self) -> None:
        while self.progress.num_ended < self.progress.num_sent:
            self.take(self.clock_ns() + SHOW_NS)

    def fail(self, sample: Sample, error: APIError) -> None:
        """End a request that the engine has rejected or failed."""
        sample.error = type(error).__name__
        sample.error_message = str(error)
        self._end(sample, self.clock_ns())

    def _finish(self, sample: Sample, at_ns: int, event: Terminal) -> None:
        usage = event.usage
        times = event.times
        sample.prompt_tokens = usage.prompt_tokens
        sample.cached_tokens = usage.cached_tokens
        sample.completion_tokens = usage.completion_tokens
        sample.phases_ns = {phase.name: phase.duration_ns for phase in times.ended(self.clock_ns).phases()[:-1]}
        if times.first_token is not None and times.last_token is not None and sample.is_stream:
            # Use the engine's own timestamps, as spans and histograms do: the events are handed over later.
            sample.first_tokens = 1
            sample.event_ns = [times.first_token, *sample.event_ns[1:-1], times.last_token][: usage.completion_tokens]
        if isinstance(event, self._failed):
            self.fail(sample, event.error)
        else:
            self._end(sample, at_ns)

    def _end(self, sample: Sample, at_ns: int) -> None:
        sample.end_ns = at_ns
        self.ends.append(at_ns)
        self.progress.num_ended += 1
        self.progress.num_failed += sample.error is not None


def on_schedule(offsets: Sequence[float], answers: Answers) -> Iterator[int]:
    """Wait for each time of a schedule, and yield it. `offsets` are in seconds after the start."""
    start_ns = answers.clock_ns()
    for offset in offsets:
        due_ns = start_ns + int(offset * 1e9)
        answers.wait_until(due_ns)
        yield due_ns


def after_each_other(interval_ns: int, answers: Answers) -> Iterator[int]:
    """Wait for an interval after each submit, and yield the time at which it ends."""
    due_ns = answers.clock_ns()
    while True:
        yield due_ns
        due_ns = answers.clock_ns() + interval_ns
        answers.wait_until(due_ns)


def when_users_are_free(arrivals: Arrivals, answers: Answers) -> Iterator[int]:
    """Wait until a user of a closed loop joins or has received an answer, and yield the time of that."""
    start_ns = answers.clock_ns()
    stop_ns = None if arrivals.duration_seconds is None else start_ns + int(arrivals.duration_seconds * 1e9)
    apart_ns = int(arrivals.ramp_seconds * 1e9 / arrivals.concurrency)
    joins = deque(start_ns + number * apart_ns for number in range(arrivals.concurrency))
    while True:
        now_ns = answers.clock_ns()
        if stop_ns is not None and now_ns >= stop_ns:
            return
        if answers.ends:
            yield answers.ends.popleft()
        elif joins and joins[0] <= now_ns:
            yield joins.popleft()
        else:
            answers.take(joins[0] if joins else now_ns + SHOW_NS)
