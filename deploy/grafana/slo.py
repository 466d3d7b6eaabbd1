"""The dashboard SLO: are the objectives kept? It shows the recording rules by model; these have no instances."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.panels import MODEL, REQUESTS, Panel, Query, board, lines, number, rate

# For each objective the share to keep, and the title and the description of its panel.
OBJECTIVES = {
    "availability": (0.995, "Answered", "Share of requests that were neither failed nor turned away."),
    "ttft": (0.99, "First token in time", "Share of finished requests whose first token came within its target."),
    "tpot": (0.99, "Tokens in time", "Share of finished requests whose mean time between tokens is within its target."),
}
TOTAL = "oaiserve_requests_total"
FINISHED = f'outcome="finished", {REQUESTS}'
FAILED = f'outcome="failed", {REQUESTS}'
OF_CLIENTS = "RateLimited"  # limits of a key
TURNED_AWAY = f'outcome="rejected", status=~"429|503", error_type!="{OF_CLIENTS}", {REQUESTS}'
BUDGET = "on (slo) group_left () oaiserve:slo_budget:ratio"
FAST = 14.4  # burn rates of the alerts
SLOW = 6


def dashboard() -> Dashboard:
    return board(
        "oaiserve-slo",
        "oaiserve / SLO",
        "Objectives, error budgets, and how fast the budgets are used up. deploy/prometheus/recording.rules.yml "
        "defines objectives and budgets.",
        [("Last hour", _last_hour()), ("Goodput", _goodput()), ("Burn rate", _burn_rates())],
    )


def _errors(slo: str, window: str) -> str:
    return f'oaiserve:slo_errors:ratio_rate{window}{{slo="{slo}", {MODEL}}}'


def _last_hour() -> list[Panel]:
    shares = [
        number(
            title,
            f"{what} Green: the objective is kept. Red: the budget is used up more than {SLOW} times too fast; see "
            "OaiserveSloSlowBurn in the runbook.",
            "percentunit",
            f"min(1 - {_errors(slo, '1h')})",
            [(None, "red"), (1 - SLOW * (1 - share), "orange"), (share, "green")],
        )
        for slo, (share, title, what) in OBJECTIVES.items()
    ]
    left = [
        number(
            f"Budget left, {slo}",
            "Share of the error budget that is left over the dashboard's time range; each five minutes count alike. "
            "Below zero the objective is missed: stop deploying changes, and find the phase that takes long.",
            "percentunit",
            f"min(1 - avg_over_time({_errors(slo, '5m')}[$__range]) / {BUDGET})",
            [(None, "red"), (0, "orange"), (0.5, "green")],
        )
        for slo in OBJECTIVES
    ]
    return shares + left


def _goodput() -> list[Panel]:
    def met(slo: str) -> str:
        return rate("oaiserve_slo_requests_total", f'slo="{slo}", outcome="met", {REQUESTS}')

    return [
        lines(
            "Goodput",
            "Requests per second that met each target: --slo, or a multiple of what the request would have taken "
            "alone. The others that finished came too late, or had no such target: answers of one token have none for "
            "the tokens after it, and vectors, background work and the first requests after a start have none.",
            "reqps",
            [
                Query(rate(TOTAL, FINISHED), "finished"),
                Query(met("ttft"), "first token in time"),
                Query(met("tpot"), "tokens in time"),
            ],
        ),
        lines(
            "Turned away and failed",
            "Requests per second that count against availability. A 429 or 503 means too little capacity; the log has "
            "the reasons of the failures.",
            "reqps",
            [
                Query(f"{rate(TOTAL, FAILED)} or vector(0)", "failed"),
                Query(f"{rate(TOTAL, TURNED_AWAY)} or vector(0)", "turned away"),
            ],
            stacked=True,
        ),
    ]


def _burn_rates() -> list[Panel]:
    return [
        lines(
            f"Burn rate, {slo}",
            f"How many times too fast the error budget is used up: at 1 it lasts exactly 30 days. OaiserveSloFastBurn "
            f"fires above {FAST} both in the last hour and in the last five minutes, OaiserveSloSlowBurn above {SLOW} "
            "both in the last six hours and in the last half hour.",
            "none",
            [
                Query(f"max({_errors(slo, window)} / {BUDGET})", f"last {window}")
                for window in ("5m", "30m", "1h", "6h")
            ],
            thresholds=[(None, "transparent"), (SLOW, "orange"), (FAST, "red")],
        )
        for slo in OBJECTIVES
    ]
