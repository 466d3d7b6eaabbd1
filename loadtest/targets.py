"""Rejects flags that would have no effect in a run, and names the alternatives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Literal

from loadtest.arrivals import Arrivals
from loadtest.engine_target import EngineRun
from loadtest.errors import UsageError
from loadtest.http_target import HttpOptions
from loadtest.prompts import Workload

Target = Literal["http", "engine"]


def _flags(options: type) -> set[str]:
    return {"--" + field.name.replace("_", "-") for field in fields(options)}


ARRIVAL_FLAGS = _flags(Arrivals)
ENGINE_FLAGS = _flags(EngineRun)
HTTP_FLAGS = _flags(HttpOptions) - {"--model"}
HTTP_FLAGS |= {"--warmup", "--calibrate", "--turns", "--abandon-share", "--slow-share"}
RANDOM_PROMPT_FLAGS = {"--input-len", "--random-form", "--prefix-len", "--prefix-groups"}
# What to use instead of a flag that belongs to the other target.
IN_PROCESS = {
    "--warmup": "use --warmup-runs",
    "--stream": "use --mode offline for whole answers",
    "--endpoint": 'use "messages" in the lines of --requests',
}
OVER_HTTP = {
    "--mode": "use --no-stream for whole answers",
    "--device": "start it with --device",
    "--dtype": "start it with --dtype",
    "--max-batch-size": "start it with --max-running",
    "--submit-interval-ms": "use --arrival constant with --rate",
    "--stream-interval": "start it with --stream-interval",
    "--tokenize-workers": "start it with --tokenize-workers",
    "--pretok": "use --random-form ids, or token ids in the lines of --requests",
    "--prefix-cache": "start it with --no-prefix-cache",
    "--cuda-graph": "start it with --no-cuda-graph",
    "--nvtx": "start it with --nvtx",
    "--warmup-runs": "use --warmup",
}


def given_flags(argv: Sequence[str]) -> list[str]:
    """Return the flags of a command line without their values, with `--no-x` as `--x`."""
    words = (word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--"))
    return ["--" + word.removeprefix("--no-").removeprefix("--") for word in words]


def refuse_idle_flags(given: Sequence[str], target: Target, workload: Workload, engine: EngineRun) -> None:
    """Raise UsageError if one of the flags on the command line would have no effect."""
    reason = next(_reasons(given, target, workload, engine), None)
    if reason is not None:
        raise UsageError(reason)


def _reasons(given: Sequence[str], target: Target, workload: Workload, engine: EngineRun) -> Iterator[str]:
    for flag in given:
        if target == "engine" and flag in HTTP_FLAGS:
            yield f"{flag} needs --target http. In process, {IN_PROCESS.get(flag, 'leave it out')}."
        if target == "http" and flag in ENGINE_FLAGS:
            yield f"{flag} needs --target engine. With a server, {OVER_HTTP.get(flag, 'leave it out')}."
        if flag in RANDOM_PROMPT_FLAGS and workload.prompt is not None:
            yield f"{flag} is for random prompts. Use it without --prompt."
        if flag == "--prompt" and workload.requests is not None:
            yield "--prompt and --requests both set the prompts. Use one of them."
    if target == "engine":
        yield from _reasons_in_process(given, workload, engine)


def _reasons_in_process(given: Sequence[str], workload: Workload, engine: EngineRun) -> Iterator[str]:
    arrival_flags = [flag for flag in given if flag in ARRIVAL_FLAGS]
    has_interval = engine.submit_interval_ms > 0
    if engine.mode == "offline":
        is_idle = {
            "--submit-interval-ms": has_interval,
            "--submit-schedule": engine.submit_schedule == "relative",
            "--stream-interval": "--stream-interval" in given,
        }
        for flag in [*arrival_flags, *(flag for flag, holds in is_idle.items() if holds)]:
            yield f"{flag} needs --mode online: --mode offline submits all at once, and takes whole answers."
    if arrival_flags and "--submit-interval-ms" in given:
        yield f"--submit-interval-ms and {arrival_flags[0]} both say when requests are submitted. Use one of them."
    if engine.submit_schedule == "relative" and not has_interval:
        yield "--submit-schedule relative needs a --submit-interval-ms above 0."
    are_ids = workload.prompt is None and workload.requests is None and workload.random_form == "ids"
    if engine.pretok and are_ids:
        yield "--pretok has no effect on random prompts of token ids. Use --random-form words, or a --prompt."


def arrivals_in_process(given: Sequence[str], arrivals: Arrivals, engine: EngineRun) -> Arrivals:
    """Return when requests are submitted: every --submit-interval-ms, or as the arrival flags say, or all at once."""
    if engine.submit_interval_ms > 0:
        return Arrivals(arrival="constant", rate=1000 / engine.submit_interval_ms)
    if any(flag in ARRIVAL_FLAGS for flag in given):
        return arrivals
    return Arrivals(arrival="at-once")
