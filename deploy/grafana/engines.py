"""The dashboard Engines: engines of other kinds as a gateway in front of them sees them. It has no panel for what only
the inside of an engine shows."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.panels import ENGINE, INSTALLATION, RATE, REQUESTS, Panel, Query, board, lines, quantiles, rate
from deploy.grafana.why import CAUSE

NAME = "oaiserve_engine"
FINISHED = f'outcome="finished", {REQUESTS}'
# Each gateway numbers its engines itself.
BY_ENGINE = "instance, engine"
LEGEND = "{{engine}} of {{instance}}"


def dashboard() -> Dashboard:
    return board(
        "oaiserve-engines",
        "oaiserve / Engines",
        "Engines of other kinds behind gateways that were started with --engine. The log says which URL has which "
        "number. The dashboards for oaiserve's own engines have more rows, which need the inside of an engine.",
        [
            ("Engines", _engines()),
            ("Requests", _requests()),
            ("Where does the time go?", _time()),
            ("Which prompts are read again?", _read_again()),
        ],
        instances=f"{NAME}_info{{{INSTALLATION}}}",
        models_of=f"{NAME}_info",
    )


def _engines() -> list[Panel]:
    reported = f"sum by ({BY_ENGINE}, state) ({NAME}_reported_requests{{{ENGINE}}})"
    cached = f"{NAME}_reported_cache_tokens_total"
    hits, queries = (rate(cached, f'result="{result}", {ENGINE}', BY_ENGINE) for result in ("hit", "queried"))
    return [
        lines(
            "Engines that answer",
            "1 while an engine answers, and 0 while it doesn't.",
            "short",
            [Query(f"min by ({BY_ENGINE}) ({NAME}_up{{{ENGINE}}})", LEGEND)],
        ),
        lines(
            "Open requests",
            "Requests of each client without a whole answer, in all engines. A client is the name of an API key, empty "
            "without one.",
            "short",
            [Query(f"sum by (client) ({NAME}_open_requests{{{ENGINE}}})", "{{client}}")],
            stacked=True,
        ),
        lines(
            "Running and waiting, by the engine",
            "What engines report about themselves, with requests that bypass the gateway. llama.cpp reports them "
            "only if its metrics are switched on, and Ollama never.",
            "short",
            [Query(reported, "{{state}}, " + LEGEND)],
        ),
        lines(
            "Prefix cache, by the engine",
            "Share of the prompt tokens that the engine found in its prefix cache, as vLLM and SGLang report it.",
            "percentunit",
            [Query(f"{hits} / ({queries} > 0)", LEGEND)],
            most=1,
        ),
        lines(
            "Preemptions, by the engine",
            "Requests per second that vLLM stopped for others, because its KV cache was full.",
            "reqps",
            [Query(rate(f"{NAME}_reported_preemptions_total", ENGINE, BY_ENGINE), LEGEND)],
        ),
        lines(
            "Answers that could not be read",
            "Per second. They were passed on as they are, and only their times and status are known. The page of such "
            "a request says why.",
            "reqps",
            [Query(rate(f"{NAME}_unread_answers_total", ENGINE, BY_ENGINE), LEGEND)],
        ),
    ]


def _requests() -> list[Panel]:
    outcomes = rate("oaiserve_requests_total", REQUESTS, f"{BY_ENGINE}, outcome")
    computed = (
        f"{rate('oaiserve_prompt_tokens_total', REQUESTS)} - {rate('oaiserve_cached_prompt_tokens_total', REQUESTS)}"
    )
    return [
        lines(
            "Requests by engine and outcome",
            "Requests that ended per second. `rejected`: the gateway or the engine refused them. `failed`: their "
            "fault. `cancelled`: the client left.",
            "reqps",
            [Query(outcomes, "{{outcome}}, " + LEGEND)],
            stacked=True,
        ),
        lines(
            "Time to first token",
            "Percentiles of finished streams, up to the first event with text. The points are single requests.",
            "s",
            quantiles("oaiserve_time_to_first_token_seconds", FINISHED),
        ),
        lines(
            "Gap between two events",
            "Percentiles of the single gaps between the events of streams, as clients see them.",
            "s",
            quantiles("oaiserve_inter_token_latency_seconds", FINISHED),
        ),
        lines(
            "Tokens",
            "Tokens per second by the usage that engines report, counted when their request ends. A stream has one "
            "only if its client sets include_usage.",
            "short",
            [
                Query(rate("oaiserve_generation_tokens_total", REQUESTS), "generated"),
                Query(computed, "prompt, computed"),
                Query(rate("oaiserve_cached_prompt_tokens_total", REQUESTS), "prompt, cached"),
            ],
        ),
    ]


def _time() -> list[Panel]:
    requests = rate("oaiserve_request_duration_seconds_count", REQUESTS)
    phases = rate("oaiserve_request_phase_seconds_sum", REQUESTS, "phase")
    causes = rate(CAUSE, f'phase="first_byte", {ENGINE}', "cause")
    return [
        lines(
            "Mean time per request, by phase",
            "The height of the stack is the mean duration of a request. wait: in the gateway. first_byte: until the "
            "engine's first byte. stream: from then to its last one.",
            "s",
            [Query(f"{phases} / scalar({requests})", "{{phase}}")],
            stacked=True,
        ),
        lines(
            "Causes of the wait for the first byte",
            "Mean time per request, by cause. alone: what it takes by itself. neighbour_prompts and neighbour_decodes: "
            "an estimate of the time behind others. not_known_yet: too few streams were alone at the engine.",
            "s",
            [Query(f"{causes} / scalar({requests})", "{{cause}}")],
            stacked=True,
        ),
        *(
            lines(
                title,
                text,
                "s",
                [
                    Query(
                        f"sum by (client) (rate(oaiserve_client_{name}_seconds_total{{{ENGINE}}}[{RATE}]))",
                        "{{client}}",
                    )
                ],
                stacked=True,
            )
            for name, title, text in (
                (
                    "delayed",
                    "Made others wait, by client",
                    "Seconds per second for which requests of others waited for this client's, as estimated from "
                    "outside. The gateway's page /clients has the command that limits it.",
                ),
                (
                    "waited",
                    "Waited for others, by client",
                    "Seconds per second for which each client's requests waited for those of others.",
                ),
            )
        ),
    ]


def _read_again() -> list[Panel]:
    return [
        lines(
            "Tokens read again",
            "Per second, by the reason that the gateway finds in the texts. system, message: something changes early "
            "in the prompts, such as a clock. tools: their order changes. evicted: the text is the same, and the "
            "engine had not cached it.",
            "short",
            [Query(rate("oaiserve_prompt_tokens_read_again_total", ENGINE, "reason"), "{{reason}}")],
            stacked=True,
            span=24,
        ),
    ]
