"""Run a load on oaiserve's engine in this process: without HTTP, to measure `submit`, the tokenizer and the engine.

This is the only file of the load test that imports oaiserve, and it does so only when it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Literal

from loadtest.arrivals import Arrivals
from loadtest.client_health import ProcessHealth, ProcessWatch
from loadtest.drive import Progress
from loadtest.errors import UsageError
from loadtest.experiment import MOST_REQUESTS, OnProgress, OnSamples, describe_run, make_point, plan
from loadtest.measure import Slos
from loadtest.prompts import Call, Workload
from loadtest.sample import Sample

if TYPE_CHECKING:
    from oaiserve.engine.engine import Engine
    from oaiserve.engine.request import Event, Prompt, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """The options of the engine in process. --model names the model that it loads (default: demo)."""

    mode: Literal["online", "offline"] = "online"
    """online: requests arrive over time and answers are streamed. offline: all requests are submitted at the start and
    each answer comes whole."""

    max_batch_size: int = 256
    """Most sequences that are computed together (--max-running of the server)."""

    prefill_max_batch_size: int | None = None
    """Most sequences in prefill in one step."""

    prefill_max_tokens: int | None = None
    """Most prompt tokens in one step."""

    submit_interval_ms: float = 0.0
    """Time between two submits. 0: all at once, or as --arrival says."""

    submit_schedule: Literal["absolute", "relative"] = "absolute"
    """absolute: submits are due at fixed times, so a slow one does not delay the others. relative: each submit is due
    one interval after the last one has returned."""

    prefix_cache: bool = True
    """Keep computed blocks for prompts that begin alike."""

    pretok: bool = False
    """Submit token ids that were encoded before the run."""

    tokenize_workers: int = 2
    """Threads that encode prompts. 0: submit encodes them itself."""

    stream_interval: int = 1
    """Tokens in each event after the first one."""

    warmup_runs: int = 1
    """Whole runs before those that are measured."""

    repeat_runs: int = 1
    """Runs that are measured."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model. auto: a GPU if there is one."""

    cuda_graph: bool = True
    """On a GPU, capture the steps in which all sequences decode as CUDA graphs."""

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--submit-interval-ms", self.submit_interval_ms, 0),
            ("--warmup-runs", self.warmup_runs, 0),
            ("--repeat-runs", self.repeat_runs, 1),
            ("--stream-interval", self.stream_interval, 1),
        ):
            if value < least:
                raise UsageError(f"{flag} is {value:g}, but must be at least {least}.")


def load_engine(model: str, options: EngineRun) -> Engine:
    """Load an engine without starting it. Raises UsageError with the engine's own sentence if it refuses."""
    from oaiserve.config import EngineOptions, OptionError
    from oaiserve.engine.engine import Engine
    from oaiserve.errors import StartupError

    try:
        return Engine.from_pretrained(
            model,
            EngineOptions(
                device=options.device,
                max_running=options.max_batch_size,
                prefill_max_requests=options.prefill_max_batch_size,
                prefill_max_tokens=options.prefill_max_tokens,
                prefix_cache=options.prefix_cache,
                tokenize_workers=options.tokenize_workers,
                cuda_graph=options.cuda_graph,
                max_waiting=MOST_REQUESTS,
            ),
        )
    except (OptionError, StartupError) as error:
        raise UsageError(str(error)) from error


def submit_arrivals(arrivals: Arrivals, options: EngineRun) -> Arrivals:
    """Return the arrivals of an open loop: those of the options, or all requests at once if they ask for none."""
    if options.submit_interval_ms > 0:
        return Arrivals(arrival="constant", rate=1000 / options.submit_interval_ms)
    if arrivals.is_open and options.mode == "online":
        return arrivals
    return Arrivals(arrival="at-once")


def run_engine(
    model: str | None,
    workload: Workload,
    arrivals: Arrivals,
    options: EngineRun,
    slos: Slos,
    on_progress: OnProgress,
    on_samples: OnSamples,
) -> dict[str, Any]:
    """Load the model, warm up, run --repeat-runs times, and return the only entry of the report's `points`."""
    arrivals = submit_arrivals(arrivals, options)
    label = f"{options.mode}, {arrivals.arrival}"
    runs = []
    with load_engine(model or "demo", options) as engine:
        target = EngineTarget(engine, workload, options)
        for number in range(-options.warmup_runs, options.repeat_runs):
            title = f"{label}, " + ("warm-up" if number < 0 else f"{number + 1} of {options.repeat_runs}")
            seed = workload.seed + 1000 * number
            samples, offsets, health = target.run(arrivals, seed, partial(on_progress, title))
            if number < 0:
                continue
            # Relative times move with each submit, so there is no fixed rate to compare with.
            fixed_offsets = None if options.submit_schedule == "relative" else offsets
            run = describe_run(samples, [health], arrivals, fixed_offsets, slos, None)
            submits = [(sample.sent_ns, sample.sent_ns + (sample.submit_ns or 0)) for sample in samples]
            run["submit_wall_seconds"] = (submits[-1][1] - submits[0][0]) / 1e9
            runs.append(run)
            on_samples(title, samples)
    return make_point(label, arrivals, runs)


class EngineTarget:
    def __init__(self, engine: Engine, workload: Workload, options: EngineRun) -> None:
        if workload.turns > 1 or workload.abandon_share or workload.slow_share:
            raise UsageError(
                "--turns, --abandon-share and --slow-share need a server: they have no meaning in process."
            )
        self._engine = engine
        self._workload = workload
        self._options = options

    def run(
        self, arrivals: Arrivals, seed: int, on_progress: Callable[[Progress, int], None] = lambda progress, total: None
    ) -> tuple[list[Sample], list[float], ProcessHealth]:
        """Submit all requests and wait until they have ended. Returns the samples, the schedule (seconds), and this
        process's health."""
        from oaiserve.engine.request import TERMINAL

        calls, offsets = plan(self._workload, arrivals, seed)
        if own := sorted({key for call in calls for key in call.body} - {"messages"}):
            raise UsageError(f"--requests has {', '.join(own)}, which need --target http.")
        assert offsets is not None  # submit_arrivals returns open loops only
        requests = [self._request(f"{seed}-{index}", call) for index, call in enumerate(calls)]
        samples = [Sample(i, 0, requested_tokens=call.max_tokens) for i, call in enumerate(calls)]
        events: list[list[tuple[int, list[Event]]]] = [[] for _ in calls]
        ended: SimpleQueue[int] = SimpleQueue()

        def deliver_to(index: int) -> Callable[[list[Event]], None]:
            mine = events[index]

            def deliver(step: list[Event]) -> None:  # on the engine thread
                mine.append((monotonic_ns(), step))
                if isinstance(step[-1], TERMINAL):
                    ended.put(index)

            return deliver

        delivers = [deliver_to(index) for index in range(len(calls))]
        watch = ProcessWatch()
        watch.start(watch_loop=False)
        self._submit(requests, delivers, samples, offsets)
        progress = Progress(num_sent=len(calls))
        while progress.num_ended < len(calls):
            try:
                ended.get(timeout=0.5)
                progress.num_ended += 1
            except Empty:
                on_progress(progress, len(calls))
        health = watch.stop()
        for sample, steps in zip(samples, events, strict=True):
            self._fill(sample, steps)
        return samples, offsets, health

    def _submit(
        self,
        requests: Sequence[Request],
        delivers: Sequence[Callable[[list[Event]], None]],
        samples: Sequence[Sample],
        offsets: Sequence[float],
    ) -> None:
        is_relative = self._options.submit_schedule == "relative"
        interval_ns = int(self._options.submit_interval_ms * 1e6)
        start_ns = due_ns = monotonic_ns()
        submit = self._engine.submit
        for request, deliver, sample, offset in zip(requests, delivers, samples, offsets, strict=True):
            if not is_relative:
                due_ns = start_ns + int(offset * 1e9)
            while (wait_ns := due_ns - monotonic_ns()) > 0:
                time.sleep(wait_ns / 1e9)
            sample.intended_ns = due_ns
            sample.sent_ns = monotonic_ns()
            submit(request, deliver)
            now_ns = monotonic_ns()
            sample.submit_ns = now_ns - sample.sent_ns
            if is_relative:
                due_ns = now_ns + interval_ns

    def _request(self, request_id: str, call: Call) -> Request:
        from oaiserve.engine.request import ChatPrompt, Request, SamplingParams, TextPrompt, TokenPrompt

        prompt: Prompt
        if "messages" in call.body:
            prompt = ChatPrompt(call.body["messages"])
        else:
            prompt = TextPrompt(call.prompt) if isinstance(call.prompt, str) else TokenPrompt(call.prompt)
        if self._options.pretok:
            prompt = TokenPrompt(self._engine.tokenizer.encode(prompt))
        params = SamplingParams(max_tokens=call.max_tokens, temperature=0.0, ignore_eos=not self._workload.stop_on_eos)
        interval = 0 if self._options.mode == "offline" else self._options.stream_interval
        return Request(request_id, (prompt,), params, stream_interval=interval)

    def _fill(self, sample: Sample, steps: Sequence[tuple[int, list[Event]]]) -> None:
        from oaiserve.engine.request import Aborted, Failed, Finished, TokenChunk

        sample.is_stream = self._options.mode == "online"
        sample.must_fill = not self._workload.stop_on_eos
        for at_ns, step in steps:
            sample.event_ns += [at_ns for event in step if isinstance(event, TokenChunk) and event.token_ids]
            sample.end_ns = at_ns
        last = steps[-1][1][-1]
        assert isinstance(last, Finished | Failed | Aborted)
        if not isinstance(last, Finished):
            sample.error = type(last.error).__name__ if isinstance(last, Failed) else "aborted"
        usage = last.usage
        sample.prompt_tokens, sample.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        sample.completion_tokens = usage.completion_tokens
        sample.phases_ns = {phase.name: phase.duration_ns for phase in last.times.ended().phases()[:-1]}
