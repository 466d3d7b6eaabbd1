"""The dashboard Gateway: does each server behind `oaiserve route` answer, and what became of those that did not?"""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.panels import ENGINE, INSTALLATION, Panel, Query, board, buckets, lines, quantiles, rate

NAME = "oaiserve_gateway"


def dashboard() -> Dashboard:
    return board(
        "oaiserve-gateway",
        "oaiserve / Gateway",
        "Gateways, and the servers behind them as they see these. A gateway's log says which address has which number.",
        [("Servers", _servers()), ("Requests", _requests()), ("What faults cost", _faults())],
        instances=f"{NAME}_replica_up{{{INSTALLATION}}}",
    )


def _servers() -> list[Panel]:
    # Each gateway has numbers of its own for the servers.
    server = "instance, replica"
    legend = "{{replica}} of {{instance}}"

    return [
        lines(
            "Servers that answer",
            "1 while a server gets requests. 0 while it gives no reports, takes no requests or is left out.",
            "short",
            [Query(f"min by ({server}) ({NAME}_replica_up{{{ENGINE}}})", legend)],
        ),
        lines(
            "Open requests",
            "Requests of each gateway at each server without a whole answer. One server far above the others holds the "
            "longest prefix, or is slow.",
            "short",
            [Query(f"max by ({server}) ({NAME}_open_requests{{{ENGINE}}})", legend)],
            stacked=True,
        ),
        lines(
            "Left out for failures",
            "Pauses per second of servers whose requests keep failing, though they report. Its log says why.",
            "short",
            [Query(rate(f"{NAME}_ejected_total", ENGINE, server), legend)],
        ),
        lines(
            "Connections",
            "Open connections of clients, and those that it closed per second, by reason. all: --max-connections were "
            "open. held back: seconds per second that the 4xx of clients with many refusals wait.",
            "short",
            [
                Query(f"sum({NAME}_connections{{{ENGINE}}})", "open"),
                Query(rate(f"{NAME}_connections_refused_total", ENGINE, "reason"), "{{reason}}"),
                Query(rate(f"{NAME}_refusal_delay_seconds_total", ENGINE), "held back, s/s"),
            ],
        ),
    ]


def _requests() -> list[Panel]:
    return [
        lines(
            "Requests",
            "Ended requests per second. cut_off and no_replica are what clients notice of faults.",
            "reqps",
            [Query(rate(f"{NAME}_requests_total", ENGINE, "ending"), "{{ending}}")],
            stacked=True,
        ),
        lines(
            "Why a server was chosen",
            "Choices per second. Many that are spilled tell of a server with too many conversations for its share.",
            "reqps",
            [
                Query(rate(f"{NAME}_choices_total", ENGINE, "reason"), "{{reason}}"),
            ],
            stacked=True,
        ),
        lines(
            "Prompt tokens expected in caches",
            "Tokens per second that the chosen servers were expected to have cached, at least.",
            "short",
            [Query(rate(f"{NAME}_expected_hit_tokens_total", ENGINE), "tokens")],
        ),
        lines(
            "Time to the head of an answer",
            "From the body of a request to its answer, or to the first token of a stream.",
            "s",
            quantiles(f"{NAME}_wait_seconds", ENGINE),
        ),
        lines(
            "Time to choose a server",
            "What the gateway adds in front of a request, apart from passing it on.",
            "s",
            quantiles(f"{NAME}_choice_seconds", ENGINE),
        ),
        buckets(
            "Time to the head of an answer, by count",
            "Two bands mean two kinds of requests, or a server that is slower than the others.",
            "s",
            f"{NAME}_wait_seconds",
            ENGINE,
        ),
    ]


def _faults() -> list[Panel]:
    def counted(title: str, description: str, metric: str, label: str) -> Panel:
        query = Query(rate(f"{NAME}_{metric}_total", ENGINE, label), f"{{{{{label}}}}}")
        return lines(title, description, "reqps", [query], stacked=True)

    return [
        counted("Moved", "Requests that another server got before their answer began, per second.", "moved", "reason"),
        counted(
            "Streams that went on",
            "Streams whose server was lost, per second. failed ones ended with an error; unlike ones may differ.",
            "continued",
            "result",
        ),
        counted(
            "Refused by name",
            "Requests by a name of the server, or from a web page, that is not allowed, per second.",
            "refused_access",
            "reason",
        ),
        counted("Spans", "Spans of the gateway, per second. dropped and failed ones are missing.", "spans", "result"),
    ]
