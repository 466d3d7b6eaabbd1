"""/debug/runs lists the runs of agents, and /debug/runs/{run_id} has the turns of one. Neither contains text, except
for a run's first words, where the inspector keeps them and the server's owner asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from oaiserve.errors import NotFound
from oaiserve.plugins.runs.kept_runs import MAX_RUNS, KeptRuns, Turns
from oaiserve.plugins.runs.perfetto import trace_of
from oaiserve.plugins.runs.turns import Run, RunRow, row_of, run_of, words_of
from oaiserve.routes.door.middleware import json_response
from oaiserve.routes.exchange import Exchange
from oaiserve.routes.operation import Operation, Parameter, read_query
from oaiserve.routes.serving import any_serving_of
from oaiserve.wire.report import ROUTER_HEADER

_NOT_STORED = {"cache-control": "no-store"}  # Browsers must not store texts of requests.
MAX_SINGLE_SENT = 200  # single requests in an answer to a gateway, which may find their continuation on another replica
LIST_FORM = Parameter("form", "gateway: with what joins the runs of several replicas.", ("row", "gateway"))
FORM = Parameter("form", "perfetto: as a trace for https://ui.perfetto.dev", ("whole", "perfetto"))


class RunList(msgspec.Struct):
    """The latest runs, newest first."""

    runs: list[RunRow]


@Operation(summary="The latest runs of agents, newest first.", group="Debugging", answer=RunList, query=(LIST_FORM,))
async def recent_runs(request: Request) -> Response:
    """Answer with the runs that clients name, and those whose prompts continue each other. A gateway gets what it needs
    to find the runs that several replicas served."""
    is_for_gateway = read_query(request.query_params, (LIST_FORM,))["form"] == "gateway"
    kept = kept_runs(request)
    serving = any_serving_of(request)
    exchanges = [*serving.exchanges.values()]
    first_words = _first_words(request)
    # As with the keys of /debug/report: anyone who can guess a prompt can compute its digest.
    has_digests = is_for_gateway and (serving.config.shares_prefix_cache or ROUTER_HEADER in request.headers)

    def render() -> Response:
        num_open = _num_open(exchanges)
        runs = kept.newest_first() + (kept.single(MAX_SINGLE_SENT) if has_digests else [])
        rows = []
        for run in runs:
            row = row_of(*run[:2], kept.now_unix_ns(), num_dropped=run.num_dropped, num_open=num_open[run.run_id])
            row.first_words = words_of(run.turns, first_words)
            if has_digests:
                row.digests = [*run.digests]
                row.before = [*run.before]
            rows.append(row)
        return json_response(RunList(rows), headers=_NOT_STORED if first_words else None)

    return await run_in_threadpool(render)


@Operation(
    summary="A run of an agent: its turns, and the time between them.",
    group="Debugging",
    answer=Run,
    query=(FORM,),
    errors=(NotFound,),
)
async def recent_run(request: Request) -> Response:
    """Answer with the turns of a run, also as a trace. Raises NotFound."""
    form = read_query(request.query_params, (FORM,))["form"]
    run_id = request.path_params["run_id"]
    kept = kept_runs(request)
    found = kept.get(run_id)
    if found is None:
        raise missing(run_id)
    exchanges = [*any_serving_of(request).exchanges.values()]

    def render() -> Response:
        return run_response(found, kept.now_unix_ns(), form, _num_open(exchanges)[run_id])

    return await run_in_threadpool(render)


def run_response(found: Turns, now_unix_ns: int, form: str | None, num_open: int) -> Response:
    run = run_of(*found[:2], now_unix_ns, num_dropped=found.num_dropped, num_open=num_open)
    if form == "perfetto":
        name = f'attachment; filename="{run.run_id}.json"'
        response = json_response(trace_of(run))
        response.headers["content-disposition"] = name
        return response
    return json_response(run)


def missing(run_id: str) -> NotFound:
    return NotFound(
        f"There is no run '{run_id[:128]}' here. This server keeps the last {MAX_RUNS:,} runs, none from before its "
        "start."
    )


def kept_runs(request: Request) -> KeptRuns:
    kept: KeptRuns = request.app.state.runs
    return kept


def _first_words(request: Request) -> Mapping[str, str]:
    """Return the first words of the conversations that the client of this request may see, keyed by request id. Without
    an inspector, there are none."""
    ask: Callable[[Request], Mapping[str, str]] | None = getattr(request.app.state, "first_words", None)
    return {} if ask is None else ask(request)


def _num_open(exchanges: Iterable[Exchange]) -> Counter[str]:
    """Return the number of open requests of each run."""
    turns = (exchange.turn for exchange in exchanges)
    return Counter(turn.run for turn in turns if turn is not None)
