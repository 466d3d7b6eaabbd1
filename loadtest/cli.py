"""The command line: run, find-max, agents, compare, diff and null-server. A wrong option gives one sentence, and exit
code 2."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import uvloop
from cyclopts import App, CoercionError, CycloptsError, Group, Parameter

from loadtest.agents import command as agents_command
from loadtest.agents.command import AgentServers
from loadtest.agents.runs import AgentRuns
from loadtest.agents.shapes import Sizes
from loadtest.arrivals import NEEDS_RATE, Arrivals
from loadtest.comparison import compare, load_report
from loadtest.diff import compared, paragraph, rows
from loadtest.engine_experiment import open_engine
from loadtest.engine_target import EngineRun
from loadtest.errors import UsageError
from loadtest.experiment import Experiment, OnSamples, make_report, open_experiment
from loadtest.html import render_html
from loadtest.http_target import MOST_PORT, HttpOptions
from loadtest.measure import Slos, parse_slos
from loadtest.null_server import NullOptions, NullServer
from loadtest.progress import ProgressLine
from loadtest.prompts import Workload
from loadtest.report import disagrees, failed_requests, render
from loadtest.sample import Sample
from loadtest.search import RateSearch, Search
from loadtest.targets import Target, arrivals_in_process, given_flags, refuse_idle_flags
from oaiserve.commands.addresses import cannot_listen
from oaiserve.errors import StartupError
from oaiserve.explain.commands import message_of

# Exit codes of --strict.
INVALID = 3
FAILED_REQUESTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a run: its target, its repeats, and where its report goes."""

    target: Target = "http"
    """http: send requests to a server. engine: submit them to oaiserve's engine in this process."""

    repeats: Annotated[int, Parameter(alias="--repeat-runs")] = 1
    """Runs of each point, each with different prompts. With two or more, intervals are over the repeats."""

    warmup: int = 4
    """Requests before each run that are not measured."""

    slo: str | None = None
    """Limits that a good request keeps, as in ttft:300ms,tpot:30ms. Metrics: ttft, tpot, itl
    (for 95 % of its gaps), latency."""

    calibrate: bool = True
    """First measure the most that this client can do, against a server without a model."""

    strict: bool = False
    """Exit with 3 if the client's figures are invalid, or if server and client disagree; else with 4 if requests
    failed."""

    json: Path | None = None
    """Write the report to this file as JSON."""

    html: Path | None = None
    """Write the report to this file as one HTML page."""

    samples: Path | None = None
    """Write all stamps of all requests to this file, one JSON object per line."""

    def __post_init__(self) -> None:
        for flag, value, least in (("--repeats", self.repeats, 1), ("--warmup", self.warmup, 0)):
            if value < least:
                raise UsageError(f"{flag} is {value}, but must be at least {least}.")


def main(argv: Sequence[str] | None = None, name: str = "loadtest") -> int:
    """Run one command and return its exit code: 2 for a mistake of the user, 3 or 4 for a failed check of
    --strict."""
    try:
        argv = sys.argv[1:] if argv is None else argv
        command, bound, _ = _command_line(name, argv).parse_args(
            argv, print_error=False, exit_on_error=False, verbose=False
        )
        return command(*bound.args, **bound.kwargs) or 0
    except CycloptsError as error:
        cause = error.__context__ if isinstance(error, CoercionError) else None
        return _refuse(name, str(cause) if isinstance(cause, UsageError) else message_of(error, name))
    except (UsageError, StartupError) as error:
        return _refuse(name, str(error))
    except KeyboardInterrupt:
        return 130


def _refuse(name: str, reason: str) -> int:
    print(f"{name}: {' '.join(reason.split())}", file=sys.stderr)
    return 2


def _flags(title: str, position: int) -> Parameter:
    return Parameter(name="*", group=Group(title, sort_key=position))


def _command_line(name: str, argv: Sequence[str] = ()) -> App:
    """Return the command line. `argv` are the arguments that it will parse: `run` rejects flags that would have no
    effect."""
    app = App(
        name=name,
        help="Load tests for OpenAI-compatible servers, and for oaiserve's engine in process.",
        version_flags=[],
        default_parameter=Parameter(negative_iterable=()),
    )

    @app.command
    def run(
        *,
        run: Annotated[RunOptions, _flags("Run", 1)] = RunOptions(),
        workload: Annotated[Workload, _flags("Workload", 2)] = Workload(),  # noqa: B008 - frozen
        arrivals: Annotated[Arrivals, _flags("Arrivals", 3)] = Arrivals(),  # noqa: B008 - frozen
        http: Annotated[HttpOptions, _flags("Server", 4)] = HttpOptions(),  # noqa: B008 - frozen
        engine: Annotated[EngineRun, _flags("Engine in process", 5)] = EngineRun(),  # noqa: B008 - frozen
    ) -> int:
        """Send requests to a server, or to the engine in process, and report latencies, throughput, and whether the
        figures can be trusted."""
        workload = workload.seeded()
        given = given_flags(argv)
        refuse_idle_flags(given, run.target, workload, engine)
        slos = parse_slos(run.slo)
        line = ProgressLine()
        opened: AbstractContextManager[Experiment]
        if run.target == "engine":
            opened = open_engine(http.model or "demo", workload, engine, slos, line)
            return _run(run, workload, arrivals_in_process(given, arrivals, engine), opened, slos, line)
        opened = open_experiment(workload, http, slos, run.warmup, run.calibrate)
        return _run(run, workload, arrivals, opened, slos, line)

    @app.command(name="find-max")
    def find_max_(
        *,
        search: Annotated[Search, _flags("Search", 1)],
        workload: Annotated[Workload, _flags("Workload", 2)] = Workload(),  # noqa: B008 - frozen
        http: Annotated[HttpOptions, _flags("Server", 3)] = HttpOptions(),  # noqa: B008 - frozen
    ) -> int:
        """Find the highest rate (poisson) at which the server keeps its SLOs."""
        return _find_max(search, workload.seeded(), http)

    @app.command
    def agents(
        *,
        servers: Annotated[AgentServers, _flags("Servers", 1)] = AgentServers(),  # noqa: B008 - frozen
        runs: Annotated[AgentRuns, _flags("Runs", 2)] = AgentRuns(),  # noqa: B008 - frozen
        sizes: Annotated[Sizes, _flags("Sizes", 3)] = Sizes(),  # noqa: B008 - frozen
    ) -> int:
        """Make runs of agents against servers in turns, and count the prompt tokens that each server reads again."""
        return agents_command.run(servers, runs, sizes)

    @app.command(name="compare")
    def compare_(a: Path, b: Path, /) -> int:
        """Compare two reports that were written with --json, as ratios B / A; * marks those that are not chance.

        Parameters
        ----------
        a
            The report that is the baseline.
        b
            The report that is compared with it.
        """
        print(compare(load_report(a), load_report(b)), end="")
        return 0

    @app.command(name="diff")
    def diff_(a: Path, b: Path, /, *, table: bool = True) -> int:
        """Compare the requests of two recordings: where those of B spent more or less time than those of A, and why.

        Parameters
        ----------
        a
            A recording (serve --record-requests), or an answer of /debug/requests: the baseline.
        b
            What is compared with A: another recording or answer.
        table
            Print all parts below the paragraph.
        """
        change = compared(a, b)
        print(paragraph(change))
        if table:
            print("\n" + "\n".join(rows(change)))
        return 0

    @app.command
    def null_server(
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        options: Annotated[NullOptions, _flags("Answers", 1)] = NullOptions(),  # noqa: B008 - frozen
    ) -> int:
        """Serve answers without a model, after set delays, to measure the client by itself.

        Parameters
        ----------
        host
            Address to listen on.
        port
            TCP port; 0 takes any free one.
        """
        if not 0 <= port <= MOST_PORT:
            raise UsageError(f"--port is {port}, but must be from 0 to {MOST_PORT}.")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(host, port, options))
        return 0

    return app


async def _serve(host: str, port: int, options: NullOptions) -> None:
    server = NullServer(options)
    try:
        await server.start(host, port)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    print(f"null server at http://{host}:{server.port}", flush=True)
    await server.serve_forever()


def _run(
    run: RunOptions,
    workload: Workload,
    arrivals: Arrivals,
    opened: AbstractContextManager[Experiment],
    slos: Slos,
    line: ProgressLine,
) -> int:
    """Run all points, publish their report, and return the exit code. Ctrl-C keeps the points that are complete."""
    sweep = sweep_points(arrivals)
    _check_writable(("--json", run.json), ("--html", run.html), ("--samples", run.samples))
    points: list[dict[str, Any]] = []
    problems: list[str] = []
    code = 0
    try:
        with opened as experiment:
            on_samples = _sample_writer(run.samples, problems)
            for point in sweep:
                points.append(experiment.run_point(point, run.repeats, point.label, line.show, on_samples))
    except KeyboardInterrupt:
        if not points:
            raise
        code = 130
    finally:
        line.clear()
    settings = experiment.settings | {"workload": _json_options(workload), "slos": slos, "repeats": run.repeats}
    report = make_report(run.target, points, **settings)
    if code:
        print(f"Stopped after {len(points)} of {len(sweep)} points.", file=sys.stderr)
    verdict = publish(report, run)
    if problems:
        raise UsageError(problems[0])
    return code or verdict


def _find_max(search: Search, workload: Workload, http: HttpOptions) -> int:
    _check_writable(("--json", search.json), ("--html", search.html))
    slos = parse_slos(search.slo)
    plan = search.plan(workload)
    line = ProgressLine()
    with open_experiment(workload, http, slos, search.warmup, search.calibrate) as experiment:
        rates = RateSearch(experiment, plan, search, slos, line)
        try:
            bracket = rates.run()
        finally:
            line.clear()
    settings = experiment.settings | {"workload": _json_options(workload), "slos": slos, "repeats": 1}
    outcome = asdict(bracket) | {"search": _json_options(search)}
    _write("--json", search.json, lambda: json.dumps(outcome, indent=1) + "\n")
    points = [rates.points[rate] for rate in sorted(rates.points)]
    _write("--html", search.html, lambda: render_html(make_report("http", points, **settings), bracket))
    return 1 if bracket.problem else 0


def sweep_points(arrivals: Arrivals) -> list[Arrivals]:
    """Return the arrivals of each point of a sweep, or the one point if there is no --sweep."""
    sweep = arrivals.sweep
    if sweep is None:
        return [arrivals]
    if arrivals.is_open and arrivals.arrival not in NEEDS_RATE:
        raise UsageError(f"--sweep has no meaning with --arrival {arrivals.arrival}.")
    try:
        if arrivals.is_open:
            return [replace(arrivals, rate=rate, sweep=None) for rate in map(float, sweep.split(","))]
        return [replace(arrivals, concurrency=users, sweep=None) for users in map(int, sweep.split(","))]
    except UsageError:
        raise
    except ValueError:
        raise UsageError(
            f"--sweep is '{sweep}', but must be numbers, as in 1,2,4 (whole ones in a closed loop)."
        ) from None


def publish(report: dict[str, Any], run: RunOptions) -> int:
    """Print the report, write it to the files that the options name, and return the exit code."""
    print(render(report), end="")
    _write("--json", run.json, lambda: json.dumps(report, indent=1) + "\n")
    _write("--html", run.html, lambda: render_html(report))
    bad = [point["label"] for point in report["points"] if point["verdict"] == "invalid" or disagrees(point)]
    failed, judged = failed_requests(report["points"])
    if run.strict and failed:
        print(f"--strict: {failed} of {judged} requests failed ({failed / max(1, judged):.1%}).", file=sys.stderr)
    if not run.strict or not (bad or failed):
        return 0
    return INVALID if bad else FAILED_REQUESTS


def _write(flag: str, path: Path | None, content: Callable[[], str], mode: str = "w") -> None:
    if path is None:
        return
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(content())
    except OSError as error:
        raise UsageError(f"{flag} is '{path}', which cannot be written: {error.strerror}.") from error


def _json_options(options: Any) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()}


def _check_writable(*files: tuple[str, Path | None]) -> None:
    """Raise UsageError before the run if a file cannot be written, so that no results are lost. A run that ends early
    leaves existing files as they are."""
    for flag, path in files:
        _write(flag, path, lambda: "", mode="a")


def _sample_writer(path: Path | None, problems: list[str]) -> OnSamples:
    """Return a function that writes the samples of a run. If writing fails, it adds the reason to `problems` and stops
    writing, because the report doesn't need the samples."""
    mode = "w"

    def write(label: str, samples: Sequence[Sample]) -> None:
        nonlocal mode
        if path is None or problems:
            return
        try:
            with path.open(mode, encoding="utf-8") as file:
                file.writelines(json.dumps({"run": label} | asdict(sample)) + "\n" for sample in samples)
        except OSError as error:
            problems.append(f"--samples is '{path}', which cannot be written: {error.strerror}.")
        mode = "a"

    return write
