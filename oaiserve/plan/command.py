"""The command `oaiserve plan`: a recorded load and limits go in, a table of what would keep them comes out."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from oaiserve.engine.step_cost import StepCost
from oaiserve.errors import StartupError
from oaiserve.plan.recorded import RecordedLoad, read
from oaiserve.plan.replay import Replayed
from oaiserve.plan.search import Change, changes, highest_rate, is_good, replay

METRICS = ("ttft", "itl", "tpot", "latency")
_UNITS = {"ms": 1e-3, "us": 1e-6, "s": 1.0}
SHARES = (0.5, 0.75, 0.9, 1.0, 1.1, 1.25)  # of the highest rate, which the table shows
_HEAD = ("prompts/s", "good", "TTFT p50", "p99", "ITL p50", "p99", "busy", "cached", "preempted")


def main(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code: 2 if the user can correct the error."""
    try:
        command, bound, _ = _command_line().parse_args(argv, print_error=False, exit_on_error=False, verbose=False)
        return command(*bound.args, **bound.kwargs) or 0
    except (CycloptsError, StartupError) as error:
        print(f"oaiserve plan: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _command_line() -> App:
    app = App(name="oaiserve plan", version_flags=[], default_parameter=Parameter(negative_iterable=()))

    @app.default
    def plan(
        *,
        source: Annotated[Path, Parameter(name="--from")],
        slo: str,
        cost: Path | None = None,
        rate: float | None = None,
        attainment: float = 0.95,
        settings: bool = True,
        json: Path | None = None,
    ) -> int:
        """Say which rate of a recorded load a server stands, how many replicas another rate needs, and what would help.

        The load is replayed through the scheduler at other rates, without a model: the time of a step is what steps
        cost when the load was recorded.

        Parameters
        ----------
        source
            A recording (serve --record-requests), an answer of /debug/requests, or JSON lines with timestamp,
            input_length and output_length. The last two need --cost.
        slo
            Limits that a good request keeps, as in ttft:300ms,itl:50ms. Metrics: ttft, itl (for 95 % of its gaps),
            tpot, latency.
        cost
            A recording whose server and cost of steps are taken instead.
        rate
            Also say how many replicas so many prompts a second need.
        attainment
            Share of the requests that must be good.
        settings
            Also try other settings of the server.
        json
            Write the plan to this file as JSON, too.
        """
        limits = parse_limits(slo)
        if not 0 < attainment <= 1:
            raise StartupError(f"--attainment is {attainment:g}, but must be above 0 and at most 1.")
        if rate is not None and rate <= 0:
            raise StartupError(f"--rate is {rate:g}, but must be above 0.")
        load = read(source)
        if cost is not None:
            priced = read(cost)
            load = replace(
                load,
                server=priced.server,
                cost=priced.cost,
                host_seconds=priced.host_seconds,
                before_queue_seconds=priced.before_queue_seconds,
            )
        if load.cost is None:
            raise StartupError(
                f"'{cost or source}' does not say what steps cost. Give --cost a recording (serve --record-requests) "
                "of a server that has served for a while, without --no-explain."
            )
        found = make_plan(load, load.cost, limits, attainment, rate, with_settings=settings)
        print(render(found), end="")
        if json is not None:
            _write(json, found)
        return 0

    return app


def parse_limits(text: str) -> dict[str, float]:
    """Return the limits in seconds by metric, from "ttft:300ms,itl:50ms". Raises StartupError."""
    limits = {}
    for part in text.split(","):
        name, _, value = part.partition(":")
        unit = next((unit for unit in _UNITS if value.endswith(unit)), "")
        try:
            limits[name] = float(value.removesuffix(unit)) * _UNITS[unit]
        except (ValueError, KeyError):
            limits[name] = 0.0
        if name not in METRICS or limits[name] <= 0:
            raise StartupError(
                f"--slo has '{part}', but must be METRIC:TIME with METRIC one of {', '.join(METRICS)} and TIME in s, "
                "ms or us, as in ttft:300ms,itl:50ms."
            )
    return limits


def make_plan(
    load: RecordedLoad,
    cost: StepCost,
    limits: dict[str, float],
    attainment: float,
    rate: float | None,
    *,
    with_settings: bool,
) -> dict[str, Any]:
    """Return the plan as data for JSON."""
    best = highest_rate(load, cost, load.server, limits, attainment)
    recorded = figures(replay(load, cost, load.server, load.rate), load.rate, limits) if load.rate else None
    found: dict[str, Any] = {
        "load": _load(load),
        "server": asdict(load.server),
        "limits_seconds": limits,
        "attainment": attainment,
        "highest_rate": None if best is None else best.rate,
        "recorded": recorded,
        "rates": [],
        "settings": [],
        "rate": rate,
        "replicas": None if rate is None or best is None else math.ceil(rate / best.rate),
    }
    if best is None:
        return found
    for share in SHARES:
        replayed = best.replayed if share == 1 else replay(load, cost, load.server, best.rate * share)
        found["rates"].append(figures(replayed, best.rate * share, limits))
    if with_settings:
        tried = [
            Change(flag, 0.0 if (other := highest_rate(load, cost, server, limits, attainment)) is None else other.rate)
            for flag, server in changes(load.server, limits)
        ]
        found["settings"] = [asdict(change) for change in sorted(tried, key=lambda change: -change.rate)]
    return found


def figures(replayed: Replayed, rate: float, limits: dict[str, float]) -> dict[str, Any]:
    """Return what became of a load at a rate: times in seconds, and shares."""
    served = replayed.served
    ttfts = [one.ttft for one in served if one.ttft is not None]
    gaps = [gap for one in served for gap in one.gaps]
    return {
        "rate": rate,
        "good_share": sum(is_good(one, limits) for one in served) / max(1, len(served)),
        "ttft_seconds": _quantiles(ttfts),
        "itl_seconds": _quantiles(gaps),
        "busy_share": replayed.busy_share,
        "hit_share": replayed.hit_share,
        "num_preemptions": replayed.num_preemptions,
        "num_refused": replayed.num_refused,
    }


def _quantiles(values: list[float]) -> dict[str, float] | None:
    if len(values) < 2:
        return None
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98]}


def _load(load: RecordedLoad) -> dict[str, Any]:
    arrivals = load.arrivals
    return {
        "num_prompts": len(arrivals),
        "num_left_out": load.num_left_out,
        "seconds": arrivals[-1].seconds,
        "rate": load.rate,
        "mean_prompt_tokens": statistics.fmean(len(arrival.prompt) for arrival in arrivals),
        "mean_answer_tokens": statistics.fmean(arrival.answer_tokens for arrival in arrivals),
    }


def render(found: dict[str, Any]) -> str:
    """Return a plan as text with markdown tables."""
    load, best = found["load"], found["highest_rate"]
    slo = ", ".join(f"{name} {seconds * 1e3:g} ms" for name, seconds in found["limits_seconds"].items())
    lines = [
        f"The load: {load['num_prompts']} prompts in {load['seconds']:.0f} s ({load['rate']:.3g}/s), "
        f"{load['mean_prompt_tokens']:.0f} tokens in and {load['mean_answer_tokens']:.0f} out on average"
        + (f"; {load['num_left_out']} more have no known prompt or no answer." if load["num_left_out"] else "."),
        f"Within {slo} for {found['attainment']:.0%} of the requests: "
        + ("no rate is low enough." if best is None else f"up to {best:.3g} prompts/s on one server."),
    ]
    if found["rate"] is not None and best is not None:
        lines.append(
            f"For {found['rate']:g} prompts/s: {found['replicas']} replicas, "
            "if a router keeps together what prompts share."
        )
    rows = [_row(row) for row in found["rates"]]
    if found["recorded"] is not None:
        rows.insert(0, _row(found["recorded"], " (as recorded)"))
    lines += ["", *_table([_HEAD, *rows])]
    if found["settings"]:
        compared = [
            (change["flag"], f"{change['rate']:.3g}", f"{change['rate'] / best:.2f}") for change in found["settings"]
        ]
        lines += ["", *_table([("setting", "prompts/s", "ratio"), *compared])]
    return "\n".join(lines) + "\n"


def _row(row: dict[str, Any], note: str = "") -> tuple[str, ...]:
    def ms(quantiles: dict[str, float] | None, name: str) -> str:
        return "-" if quantiles is None else f"{quantiles[name] * 1e3:.4g} ms"

    ttft, itl = row["ttft_seconds"], row["itl_seconds"]
    return (
        f"{row['rate']:.3g}{note}",
        f"{row['good_share']:.0%}",
        *(ms(quantiles, name) for quantiles in (ttft, itl) for name in ("p50", "p99")),
        f"{row['busy_share']:.0%}",
        f"{row['hit_share']:.0%}",
        str(row["num_preemptions"]),
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    head, *rest = ([*row] for row in rows)
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rest)]


def _write(path: Path, found: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise StartupError(f"--json is '{path}', which cannot be written: {error.strerror}.") from error
