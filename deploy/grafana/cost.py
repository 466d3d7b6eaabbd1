"""The dashboard Cost: who uses the machine, how much of it is unused, and what running side by side saves."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.panels import ENGINE, Panel, Query, board, lines, rate

MACHINE = "oaiserve_cost_machine_seconds_total"
ALONE = "oaiserve_cost_alone_seconds_total"
CLIENT = "{{client}}"


def dashboard() -> Dashboard:
    return board(
        "oaiserve-cost",
        "oaiserve / Cost",
        "What each client's requests cost when they ended; without API keys, there is one client without a name.",
        [("The machine", _machine()), ("What it comes to", _amounts()), ("Is it shared well?", _sharing())],
    )


def _by_client(metric: str) -> list[Query]:
    return [Query(rate(metric, ENGINE, "client"), CLIENT)]


def _metered(title: str, about: str, unit: str, name: str, *more: Query) -> Panel:
    """Return the parts of the clients in something, stacked under the whole by its meter."""
    queries = [*_by_client(f"oaiserve_cost_{name}_total"), *more]
    meter = Query(rate(f"oaiserve_meter_{name}_total", ENGINE), "meter")
    return lines(title, about, unit, queries, overlay=[meter], stacked=True)


def _machine() -> list[Panel]:
    return [
        _metered(
            "Cores, by client",
            "Cores of the server's process that each client's requests used, and nobody's: the start, and work without "
            "a request in a step. In the long run they add up to the meter; a request counts when it ends.",
            "short",
            "core_seconds",
            Query(rate("oaiserve_nobody_core_seconds_total", ENGINE), "nobody"),
        ),
        lines(
            "The engine's time, by client",
            "Share of the engine's time. If little of it is nobody's, the machine is full.",
            "percentunit",
            [*_by_client(MACHINE), Query(rate("oaiserve_nobody_machine_seconds_total", ENGINE), "nobody")],
            stacked=True,
        ),
    ]


def _amounts() -> list[Panel]:
    hourly = f"3600 * {rate('oaiserve_cost_price_total', ENGINE, 'client')}"
    return [
        lines(
            "Price per hour, by client",
            "Part of --cost-per-hour, in its currency, at the present rate. The rest is nobody's.",
            "short",
            [Query(hourly, CLIENT)],
            stacked=True,
        ),
        _metered(
            "Power, by client",
            "Power of each client's requests, under the machine's own: idle cores and other processes have the rest. "
            "It is empty where no meter can be read.",
            "watt",
            "joules",
        ),
        _metered(
            "KV cache, by client",
            "Bytes of the KV cache that each client's requests held on average, under all that were used. Blocks of a "
            "shared prefix are divided.",
            "bytes",
            "kv_byte_seconds",
        ),
    ]


def _sharing() -> list[Panel]:
    return [
        lines(
            "Cost beside others, of the cost alone",
            "What requests cost, as a share of what they would have cost one after the other. A low share is a batch "
            "that works; above 1, preemptions or another program cost more than sharing saves.",
            "percentunit",
            [Query(f"{rate(MACHINE, ENGINE, 'client')} / {rate(ALONE, ENGINE, 'client')}", CLIENT)],
        ),
        lines(
            "Weights read, by client",
            "Bytes of weights read per second: of a step with several rows, each has a part.",
            "Bps",
            _by_client("oaiserve_cost_weight_bytes_total"),
            stacked=True,
        ),
    ]
