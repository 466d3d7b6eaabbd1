"""The command `oaiserve plan`: from a recorded load and limits to a table of settings that keep them."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from json import dumps
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from oaiserve.errors import StartupError
from oaiserve.explain import commands
from oaiserve.facts import slos
from oaiserve.files.progress import Progress
from oaiserve.plan.recorded import Cost, RecordedLoad, RecordedServer, busiest, read
from oaiserve.plan.replay import ReplayedLoad
from oaiserve.plan.search import Highest, alone, calibrated, changes, good_share, highest_rate, replay

BUSIEST_PROMPTS = 300  # that are replayed, as often as it takes: those of the busiest time, if more were recorded
SHARES = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25)  # of the highest rate, which the table shows
LEAST_CHANGE = 0.03  # of the rate, as a share; smaller ones are noise of the search
LONE_BUSY_SHARE = 0.1  # below this, requests on a server hardly overlap
_HEAD = ("prompts/s", "good", "TTFT p50", "p99", "ITL p50", "p99", "busy", "cached", "preempted")


def main(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code: 2 if the user can correct the error."""
    return commands.run(_command_line(), argv)


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
        """Estimate how much of a recorded load a server can take, and how many replicas or what settings more needs.

        The load is replayed through the scheduler at other rates, without a model: the time of a step is what steps
        cost when the load was recorded.

        Parameters
        ----------
        source
            A recording (serve --record-requests), an answer of /debug/requests, a log (serve --log-format json),
            samples of the load test (--samples), or JSON lines with timestamp, input_length and output_length. All but
            the first need --cost.
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
        try:
            limits = slos.parse(slo)
        except ValueError as error:
            raise StartupError(str(error)) from error
        if not limits:
            raise StartupError("--slo is empty, but must have a limit, as in ttft:300ms,itl:50ms.")
        if not 0 < attainment <= 1:
            raise StartupError(f"--attainment is {attainment:g}, but must be above 0 and at most 1.")
        if rate is not None and rate <= 0:
            raise StartupError(f"--rate is {rate:g}, but must be above 0.")
        load = read(source)
        if load.num_waiting_clients:
            raise StartupError(_no_rate(source, load.num_waiting_clients))
        priced = calibrated(load if cost is None else read(cost, "--cost"))
        if priced.cost is None:
            raise StartupError(
                f"'{cost or source}' does not say what steps cost. Give --cost a recording of a server (serve "
                "--record-requests) without --no-explain that has answered 50 requests, or was stopped in order."
            )
        load = replace(load, server=priced.server, cost=priced.cost)
        outcome = make_plan(load, priced.cost, limits, attainment, rate, with_settings=settings)
        print(render(outcome), end="")
        if json is not None:
            try:
                json.write_text(dumps(outcome, indent=1) + "\n")
            except OSError as error:
                raise StartupError(f"--json is '{json}', which cannot be written: {error.strerror}.") from error
        return 0

    return app


def _no_rate(source: Path, num_clients: int) -> str:
    whose = "one client that waited" if num_clients == 1 else f"{num_clients} clients that each waited"
    return (
        f"'{source}' is of a closed loop: of {whose} for an answer before asking again. How often they asked follows "
        "from how fast this server answered, so it tells no rate that a server has to bear. Record requests that come "
        "by themselves, as those of users, or of 'oaiserve bench run --arrival poisson --rate 2'."
    )


def make_plan(
    whole: RecordedLoad,
    cost: Cost,
    limits: slos.Slos,
    attainment: float,
    rate: float | None,
    *,
    with_settings: bool,
) -> dict[str, Any]:
    """Return the plan. The settings that are tried are counted on stderr, for they take a while."""
    load = busiest(whole, BUSIEST_PROMPTS)
    best = highest_rate(load, cost, load.server, limits, attainment)
    recorded = figures(replay(load, cost, load.server, load.rate), load.rate, limits) if load.rate else None
    outcome: dict[str, Any] = {
        "load": _load(whole) | {"num_replayed": len(load.arrivals)},
        "server": asdict(load.server),
        "cost": asdict(cost),
        "slos_seconds": dict(limits),
        "attainment": attainment,
        "highest_rate": None if best is None else best.rate,
        "recorded": recorded,
        "rates": [],
        "settings": [],
        "rate": rate,
        "is_lone": best is not None and best.replayed.busy_share < LONE_BUSY_SHARE,
        "replicas": None,
    }
    if best is not None and rate is not None and not outcome["is_lone"]:
        outcome["replicas"] = math.ceil(rate / best.rate)
    if best is None:
        lone = alone(load, cost, load.server)
        kept = {name: good_share(lone, {name: seconds}) for name, seconds in limits.items()}
        outcome["alone"] = figures(lone, 0.0, limits) | {"kept_shares": kept}
    else:
        for share in SHARES:
            replayed = best.replayed if share == 1 else replay(load, cost, load.server, best.rate * share)
            outcome["rates"].append(figures(replayed, best.rate * share, limits))
    if with_settings:
        tried = []
        for flag, server in Progress([*changes(load.server, limits)], desc="Trying settings", unit=" settings"):
            tried.append({"flag": flag, "rate": rate_with(server, load, cost, limits, attainment, best)})
        outcome["settings"] = sorted(tried, key=lambda change: -change["rate"])
    return outcome


def rate_with(
    server: RecordedServer, load: RecordedLoad, cost: Cost, limits: slos.Slos, attainment: float, best: Highest | None
) -> float:
    """Return the highest rate with other settings, 0 if there is none. `best` is the one with the load's own."""
    # Where a setting changes nothing, as a limit that is not reached, there is nothing to search for.
    if best is not None and replay(load, cost, server, best.rate).served == best.replayed.served:
        return best.rate
    highest = highest_rate(load, cost, server, limits, attainment, first=None if best is None else best.rate)
    return 0.0 if highest is None else highest.rate


def figures(replayed: ReplayedLoad, rate: float, limits: slos.Slos) -> dict[str, Any]:
    """Return the figures of a load at a rate: times in seconds, and shares."""
    served = replayed.served
    ttfts = [one.ttft for one in served if one.ttft is not None]
    gaps = [gap for one in served for gap in one.gaps]
    return {
        "rate": rate,
        "good_share": good_share(replayed, limits),
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


def render(outcome: dict[str, Any]) -> str:
    """Return a plan as text with markdown tables."""
    best = outcome["highest_rate"]
    sentences = [*_load_sentences(outcome["load"]), *_rate_sentences(outcome)]
    if disturbance_share := outcome["cost"]["disturbance_share"]:
        sentences.append(f"What else ran there added {disturbance_share:.0%} to the time of steps.")
    lines = textwrap.wrap(" ".join(sentences), 100)
    rows = [_row(row) for row in outcome["rates"]]
    if outcome["recorded"] is not None:
        rows.insert(0, _row(outcome["recorded"], " (as recorded)"))
    lines += ["", *_table([_HEAD, *rows])]
    compared = [
        (change["flag"], f"{change['rate']:.3g}", f"{change['rate'] / best:.2f}" if best else "-")
        for change in outcome["settings"]
        if change["rate"] and not (best and abs(change["rate"] / best - 1) < LEAST_CHANGE)
    ]
    if compared:
        lines += ["", *_table([("setting", "prompts/s", "ratio"), *compared])]
    return "\n".join(lines) + "\n"


def _load_sentences(load: dict[str, Any]) -> list[str]:
    sentences = [
        f"The load: {load['num_prompts']} prompts in {load['seconds']:.0f} s ({load['rate']:.3g}/s), "
        f"{load['mean_prompt_tokens']:.0f} tokens in and {load['mean_answer_tokens']:.0f} out on average."
    ]
    if load["num_left_out"]:
        sentences.append(f"{load['num_left_out']} more have no known prompt or no answer.")
    if load["num_replayed"] < load["num_prompts"]:
        sentences.append(f"The {load['num_replayed']} of its busiest time are replayed.")
    return sentences


def _rate_sentences(outcome: dict[str, Any]) -> list[str]:
    best, rate = outcome["highest_rate"], outcome["rate"]
    slo = ", ".join(f"{name} {seconds * 1e3:g} ms" for name, seconds in outcome["slos_seconds"].items())
    within = f"Within {slo} for {outcome['attainment']:.0%} of the requests:"
    if best is None:
        lone = outcome["alone"]
        kept = ", ".join(f"{name} {share:.0%}" for name, share in lone["kept_shares"].items())
        return [
            f"{within} no rate is low enough. Of requests that are each alone on the server, {lone['good_share']:.0%} "
            f"are good (by limit: {kept}). "
            f"TTFT p50 {_ms(lone['ttft_seconds'], 'p50')}, p99 {_ms(lone['ttft_seconds'], 'p99')}, "
            f"ITL p50 {_ms(lone['itl_seconds'], 'p50')}, p99 {_ms(lone['itl_seconds'], 'p99')}."
        ]
    if outcome["is_lone"]:
        return [
            f"{within} up to {best:.3g} prompts/s on one server, where hardly two requests meet: these limits are "
            "those of a lone request here. Allow more time, or serve from a faster machine, not more of them."
        ]
    sentences = [f"{within} up to {best:.3g} prompts/s on one server."]
    if rate is not None:
        replicas = f"{outcome['replicas']} replicas" if outcome["replicas"] > 1 else "one server is enough"
        sentences.append(f"For {rate:g} prompts/s: {replicas}.")
        if outcome["replicas"] > 1:
            sentences[-1] = sentences[-1][:-1] + ", if a router keeps together what prompts share."
    if best < (helpful := max((change["rate"] for change in outcome["settings"]), default=0.0)) / 1.05:
        flag = outcome["settings"][0]["flag"]
        sentences.append(f"What helps most is {flag}: {helpful:.3g} prompts/s.")
    elif outcome["settings"]:
        sentences.append("No other setting brings 5 % more.")
    return sentences


def _row(row: dict[str, Any], note: str = "") -> tuple[str, ...]:
    ttft, itl = row["ttft_seconds"], row["itl_seconds"]
    return (
        f"{row['rate']:.3g}{note}",
        f"{row['good_share']:.0%}",
        *(_ms(quantiles, name) for quantiles in (ttft, itl) for name in ("p50", "p99")),
        f"{row['busy_share']:.0%}",
        f"{row['hit_share']:.0%}",
        str(row["num_preemptions"]),
    )


def _ms(quantiles: dict[str, float] | None, name: str) -> str:
    return "-" if quantiles is None else f"{float(f'{quantiles[name] * 1e3:.3g}'):,g} ms"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    head, *rest = ([*row] for row in rows)
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rest)]
