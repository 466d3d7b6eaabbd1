"""The dashboard Overview: is the server healthy? It shows rate, errors, latency, tokens and saturation."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.panels import ENGINE, REQUESTS, Panel, Query, board, lines, number, quantiles, rate

# The least targets of a request in seconds, unless --slo sets others: those of oaiserve/telemetry/targets.py.
LEAST_TTFT = 1
LEAST_TPOT = 0.2
FINISHED = f'outcome="finished", {REQUESTS}'
REQUESTS_TOTAL = "oaiserve_requests_total"
FAILED = f'outcome="failed", {REQUESTS}'


def dashboard() -> Dashboard:
    return board(
        "oaiserve-overview",
        "oaiserve / Overview",
        "Rate, errors, latency, tokens and saturation. If something is wrong, continue with Where time goes.",
        [
            ("Now", _now()),
            ("Traffic", _traffic()),
            ("Latency", _latency()),
            ("Saturation", _saturation()),
            ("What is asked for", _asked_for()),
        ],
    )


def _now() -> list[Panel]:
    first_tokens = rate("oaiserve_time_to_first_token_seconds_bucket", FINISHED, "le")
    return [
        number(
            "Instances up",
            "Instances that Prometheus can scrape; each of several models in one server is one. If there are fewer "
            "than you started, see OaiserveTargetDown in the runbook.",
            "none",
            f"count(oaiserve_model_info{{{REQUESTS}}}) or vector(0)",
            [(None, "red"), (1, "green")],
        ),
        number(
            "Requests", "Requests that ended per second, with any outcome.", "reqps", rate(REQUESTS_TOTAL, REQUESTS)
        ),
        number(
            "Failed",
            "Share of requests that failed by the server's fault. Above 5 %, see OaiserveErrors in the runbook.",
            "percentunit",
            f"({rate(REQUESTS_TOTAL, FAILED)} or vector(0)) / {rate(REQUESTS_TOTAL, REQUESTS)}",
            [(None, "green"), (0.005, "orange"), (0.05, "red")],
        ),
        number(
            "First token, p95",
            "95 of 100 finished requests had their first token within this time. It is red above "
            f"{LEAST_TTFT:g} s, up to which no request misses its target by default; Where time goes shows which phase "
            "takes the time.",
            "s",
            f"histogram_quantile(0.95, {first_tokens})",
            [(None, "green"), (LEAST_TTFT / 2, "orange"), (LEAST_TTFT, "red")],
        ),
        number(
            "Generated",
            "Tokens generated per second, counted when their request ends.",
            "short",
            rate("oaiserve_generation_tokens_total", REQUESTS),
        ),
        number(
            "KV cache in use",
            "Share of the KV blocks in use, on the instance with the largest share. If it is full and there are "
            "preemptions, see OaiserveKvCacheFull in the runbook.",
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
            "Requests that ended per second. `rejected`: the server refused them. `failed`: the server's fault. "
            "`cancelled`: the client left. A growing share of `cancelled` often means that users do not want to wait.",
            "reqps",
            [Query(rate(REQUESTS_TOTAL, REQUESTS, "outcome"), "{{outcome}}")],
            stacked=True,
        ),
        lines(
            "Refusals by reason",
            "Refusals per second. `overloaded` and `unavailable`: more requests wait than the limits allow, or the "
            "server is shutting down. `invalid_request` and `context_length_exceeded`: look at the client. "
            "`missing_key`, `unknown_key`, `role`, `host` and `origin`: refused before it reached a route; the log "
            "says who. `rate_limited`: a key has used up a limit.",
            "reqps",
            [
                Query(rate("oaiserve_rejected_total", ENGINE, "reason"), "{{reason}}"),
                Query(rate("oaiserve_refused_access_total", ENGINE, "reason"), "{{reason}}"),
            ],
            stacked=True,
        ),
        lines(
            "Tokens",
            "Tokens per second, counted when their request ends: generated tokens, prompt tokens that were computed, "
            "and prompt tokens from the prefix cache.",
            "short",
            [
                Query(rate("oaiserve_generation_tokens_total", REQUESTS), "generated"),
                Query(computed, "prompt, computed"),
                Query(rate("oaiserve_cached_prompt_tokens_total", REQUESTS), "prompt, cached"),
            ],
        ),
        lines(
            "Deadlines",
            "Requests per second that had a deadline of their own: `met` or `missed`.",
            "reqps",
            [Query(rate("oaiserve_deadlines_total", ENGINE, "outcome"), "{{outcome}}")],
            stacked=True,
        ),
    ]


def _latency() -> list[Panel]:
    event_tokens, events = (rate(f"oaiserve_event_tokens_{part}", FINISHED) for part in ("sum", "count"))
    return [
        lines(
            "Time to first token",
            "Percentiles of finished requests. The points are single requests: click one for its trace. Up to the line "
            f"of {LEAST_TTFT:g} s no request misses its target by default; above it, SLO shows which ones do.",
            "s",
            quantiles("oaiserve_time_to_first_token_seconds", FINISHED),
            thresholds=[(None, "transparent"), (LEAST_TTFT, "red")],
        ),
        lines(
            "Time per output token",
            "Percentiles of the mean time between the tokens of a request. Up to the line of "
            f"{LEAST_TPOT:g} s no request misses its target by default; above it, users read faster than the tokens "
            "come: lower --max-running, or look at the KV cache and at prefill steps on Engine.",
            "s",
            quantiles("oaiserve_time_per_output_token_seconds", FINISHED),
            thresholds=[(None, "transparent"), (LEAST_TPOT, "red")],
        ),
        lines(
            "Whole request",
            "Time from the first byte of a request to the last byte of its answer. It grows with the answer's length.",
            "s",
            quantiles("oaiserve_request_duration_seconds", FINISHED),
        ),
        lines(
            "Gap between two events",
            "Percentiles of the single gaps between the events of streams, as clients see them. If the p99 is far "
            "above the p50, streams stutter because of the prefill of other requests (--max-step-tokens, "
            "--itl-target-seconds) or of preemptions.",
            "s",
            quantiles("oaiserve_inter_token_latency_seconds", FINISHED),
        ),
        lines(
            "Tokens in an event",
            "Mean number of tokens in an event of a stream. With drafts, several leave together: fewer and larger "
            "events, with longer gaps.",
            "short",
            [Query(f"{event_tokens} / ({events} > 0)", "tokens")],
        ),
    ]


def _saturation() -> list[Panel]:
    return [
        lines(
            "Running and waiting",
            "Sequences that run and that wait. If some wait all the time, see OaiserveQueueGrowing in the runbook.",
            "short",
            [
                Query(f"sum(oaiserve_requests_running{{{ENGINE}}})", "running"),
                Query(f"sum(oaiserve_requests_waiting{{{ENGINE}}})", "waiting"),
            ],
        ),
        lines(
            "Time in the model",
            "Share of time in which the model ran. Near 100 % with requests waiting, the machine is the limit.",
            "percentunit",
            [Query(rate("oaiserve_engine_model_seconds_total", ENGINE, "instance"), "{{instance}}")],
            most=1,
        ),
        lines(
            "CPU",
            "Cores in use by instance. If the model runs on the CPU and all cores are in use, other busy programs make "
            "every step slower.",
            "short",
            [Query(rate("process_cpu_seconds_total", f'job="oaiserve", {ENGINE}', "instance"), "cores {{instance}}")],
            span=4,
        ),
        lines(
            "Memory",
            "Resident memory by instance, without the GPU's memory, and the limit of its container or machine, at "
            "which the system ends the process. Near it, lower --kv-cache-memory or raise the limit.",
            "bytes",
            [Query(f'process_resident_memory_bytes{{job="oaiserve", {ENGINE}}}', "{{instance}}")],
            overlay=[Query(f"oaiserve_memory_limit_bytes{{{ENGINE}}}", "limit of {{instance}}")],
            span=4,
        ),
    ]


def _asked_for() -> list[Panel]:
    return [
        lines(
            "Longest choice",
            "Tokens of the longest choice of a request, by percentile: how long answers get.",
            "short",
            quantiles("oaiserve_request_longest_choice_tokens", FINISHED),
        ),
        lines(
            "Limit on an answer",
            "What requests set as `max_tokens`, by percentile, where they set it. Far above the longest choice, "
            "it limits nothing.",
            "short",
            quantiles("oaiserve_request_max_tokens", FINISHED),
        ),
        lines(
            "Choices",
            "Choices that requests ask for (`n`), by percentile. Each takes a place in the batch.",
            "short",
            quantiles("oaiserve_request_choices", FINISHED),
        ),
    ]
