"""Is it well? Rate, errors, latency, tokens, and how full it is."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.panels import ENGINE, REQUESTS, Panel, Query, board, lines, number, quantiles, rate

FINISHED = f'outcome="finished", {REQUESTS}'
REQUESTS_TOTAL = "oaiserve_requests_total"
FAILED = f'outcome="failed", {REQUESTS}'


def dashboard() -> Dashboard:
    return board(
        "oaiserve-overview",
        "oaiserve / Overview",
        "Rate, errors, latency, tokens and saturation. Where something is wrong, go on with Where time goes.",
        [("Now", _now()), ("Traffic", _traffic()), ("Latency", _latency()), ("Saturation", _saturation())],
    )


def _now() -> list[Panel]:
    first_tokens = rate("oaiserve_time_to_first_token_seconds_bucket", FINISHED, "le")
    return [
        number(
            "Instances up",
            "Those that Prometheus can scrape. Fewer than you started: see the runbook, OaiserveTargetDown.",
            "none",
            f'sum(up{{job="oaiserve", {ENGINE}}})',
            [(None, "red"), (1, "green")],
        ),
        number(
            "Requests", "Requests that ended, per second, however they ended.", "reqps", rate(REQUESTS_TOTAL, REQUESTS)
        ),
        number(
            "Failed",
            "Share of requests that failed through the server's fault. Above 5 %: see the runbook, OaiserveErrors.",
            "percentunit",
            f"({rate(REQUESTS_TOTAL, FAILED)} or vector(0)) / {rate(REQUESTS_TOTAL, REQUESTS)}",
            [(None, "green"), (0.005, "orange"), (0.05, "red")],
        ),
        number(
            "First token, p95",
            "95 of 100 finished requests had their first token within this time. Red above the objective of 1 s: "
            "Where time goes says in which phase it is lost.",
            "s",
            f"histogram_quantile(0.95, {first_tokens})",
            [(None, "green"), (0.5, "orange"), (1, "red")],
        ),
        number(
            "Generated",
            "Tokens generated per second, counted when their request ends.",
            "short",
            rate("oaiserve_generation_tokens_total", REQUESTS),
        ),
        number(
            "KV cache in use",
            "Share of the KV cache's blocks in use, of the fullest instance. Full with preemptions: see the runbook, "
            "OaiserveKvCacheFull.",
            "percentunit",
            f"max(oaiserve_kv_cache_usage_ratio{{{ENGINE}}})",
            [(None, "green"), (0.8, "orange"), (0.95, "red")],
        ),
    ]


def _traffic() -> list[Panel]:
    computed = (
        f"{rate('oaiserve_prompt_tokens_total', REQUESTS)} - {rate('oaiserve_cached_prompt_tokens_total', REQUESTS)}"
    )
    return [
        lines(
            "Requests by outcome",
            "Ended requests per second. `rejected` are refusals, `failed` is the server's fault, `cancelled` clients "
            "left. A growing share of `cancelled` often means that people do not want to wait.",
            "reqps",
            [Query(rate(REQUESTS_TOTAL, REQUESTS, "outcome"), "{{outcome}}")],
            stacked=True,
            span=8,
        ),
        lines(
            "Refusals by reason",
            "Per second. `overloaded` and `unavailable`: more comes than the server may let wait, or it is going "
            "down. `invalid_request` and `context_length_exceeded`: look at the client.",
            "reqps",
            [Query(rate("oaiserve_rejected_total", ENGINE, "reason"), "{{reason}}")],
            stacked=True,
            span=8,
        ),
        lines(
            "Tokens",
            "Per second, counted when their request ends: generated, prompt tokens that were computed, and prompt "
            "tokens that the prefix cache had already.",
            "short",
            [
                Query(rate("oaiserve_generation_tokens_total", REQUESTS), "generated"),
                Query(computed, "prompt, computed"),
                Query(rate("oaiserve_cached_prompt_tokens_total", REQUESTS), "prompt, cached"),
            ],
            span=8,
        ),
    ]


def _latency() -> list[Panel]:
    return [
        lines(
            "Time to first token",
            "Of finished requests. The points are single requests: click one for its trace. Above the line of 1 s the "
            "objective is missed.",
            "s",
            quantiles("oaiserve_time_to_first_token_seconds", FINISHED),
            thresholds=[(None, "transparent"), (1, "red")],
        ),
        lines(
            "Time per output token",
            "Mean time between the tokens of a request. Above the line of 0.1 s the objective is missed, and people "
            "read faster than it writes: lower --max-running or look at KV cache and prefills on Engine.",
            "s",
            quantiles("oaiserve_time_per_output_token_seconds", FINISHED),
            thresholds=[(None, "transparent"), (0.1, "red")],
        ),
        lines(
            "Whole request",
            "From the first byte of a request to the last byte of its answer. Grows with the length of answers.",
            "s",
            quantiles("oaiserve_request_duration_seconds", FINISHED),
        ),
        lines(
            "Gap between two tokens",
            "Each single gap in a stream. A p99 far above the p50 is a stutter: prefills of others "
            "(--prefill-max-tokens, --itl-target-seconds) or preemptions.",
            "s",
            quantiles("oaiserve_inter_token_latency_seconds", FINISHED),
        ),
    ]


def _saturation() -> list[Panel]:
    return [
        lines(
            "Running and waiting",
            "Sequences. Waiting all the time: see the runbook, OaiserveQueueGrowing.",
            "short",
            [
                Query(f"sum(oaiserve_requests_running{{{ENGINE}}})", "running"),
                Query(f"sum(oaiserve_requests_waiting{{{ENGINE}}})", "waiting"),
            ],
            span=8,
        ),
        lines(
            "Time in the model",
            "Share of time in which the model ran. Near 100 % with requests waiting: the machine is the limit.",
            "percentunit",
            [Query(rate("oaiserve_engine_model_seconds_total", ENGINE, "instance"), "{{instance}}")],
            span=8,
            most=1,
        ),
        lines(
            "CPU",
            "Cores in use, by instance. On a CPU, work for more cores than there are makes every step slower.",
            "short",
            [Query(rate("process_cpu_seconds_total", f'job="oaiserve", {ENGINE}', "instance"), "cores {{instance}}")],
            span=4,
        ),
        lines(
            "Memory",
            "Resident memory by instance, without what is on a GPU.",
            "bytes",
            [Query(f'process_resident_memory_bytes{{job="oaiserve", {ENGINE}}}', "{{instance}}")],
            span=4,
        ),
    ]
