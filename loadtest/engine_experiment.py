"""Run the points of a sweep on an engine in this process, each with its warm-up and its repeats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from loadtest.arrivals import Arrivals
from loadtest.engine_target import EngineRun, EngineTarget, engine_facts, load_engine
from loadtest.experiment import OnProgress, OnSamples, describe_run, make_point
from loadtest.measure import Slos
from loadtest.progress import ProgressLine
from loadtest.prompts import Workload


@contextmanager
def open_engine(
    model: str, workload: Workload, options: EngineRun, slos: Slos, line: ProgressLine
) -> Iterator[EngineExperiment]:
    """Load and start an engine, and stop it at the end. Raises UsageError or StartupError if it cannot be loaded."""
    with line.while_waiting(f"loading {model}"):
        engine = load_engine(model, options)
        engine.start()
    try:
        settings = {"engine": {"model": model} | asdict(options) | engine_facts(engine)}
        yield EngineExperiment(EngineTarget(engine, workload, options), workload, options, slos, settings)
    finally:
        engine.stop()


class EngineExperiment:
    """An engine that has started. `run_point` may be called any number of times."""

    def __init__(
        self, target: EngineTarget, workload: Workload, options: EngineRun, slos: Slos, settings: dict[str, Any]
    ) -> None:
        self.settings = settings
        self._target = target
        self._workload = workload
        self._options = options
        self._slos = slos
        self._num_runs = 0

    def run_point(
        self,
        arrivals: Arrivals,
        num_repeats: int,
        label: str,
        on_progress: OnProgress = lambda label, progress, total: None,
        on_samples: OnSamples = lambda label, samples: None,
    ) -> dict[str, Any]:
        """Warm up, run one point as often as `num_repeats`, and return it as an entry of the report's `points`."""
        label = f"{self._options.mode}, {label}"
        for number in range(self._options.warmup_runs):
            self._run(arrivals, f"{label}, warm-up {number + 1} of {self._options.warmup_runs}", on_progress)
        runs = []
        for repeat in range(num_repeats):
            title = f"{label}, {repeat + 1} of {num_repeats}" if num_repeats > 1 else label
            run = self._run(arrivals, title, on_progress, on_samples)
            runs.append(run)
        return make_point(label, arrivals, runs)

    def _run(
        self,
        arrivals: Arrivals,
        title: str,
        on_progress: OnProgress,
        on_samples: OnSamples = lambda label, samples: None,
    ) -> dict[str, Any]:
        seed = self._workload.seed_of_run(self._num_runs)
        self._num_runs += 1
        result = self._target.run(arrivals, seed, partial(on_progress, title))
        on_samples(title, result.samples)
        run = describe_run(
            result.samples, [result.health], arrivals, result.offsets, self._slos, None, is_in_process=True
        )
        return run | {"submit_wall_seconds": result.submit_wall_seconds}
