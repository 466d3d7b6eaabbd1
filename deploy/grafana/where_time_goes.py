"""Why is it slow? The phases of requests, what they wait for, and the slowest ones."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.panels import ENGINE, RATE, REQUESTS, Panel, Query, board, buckets, lines, quantiles, rate

# In the order in which a request goes through them, with what helps where one is long.
PHASES = {
    "receive": "The body came slowly or is large: the client's network, or the event loop (Engine, row Process).",
    "tokenize_wait": "All tokenize workers were busy: raise --tokenize-workers.",
    "tokenize": "The prompt is long, or the cores were busy.",
    "queue": "The row Queue says what it waited for.",
    "prefill": "Much to compute: long prompts, few of their tokens cached; or other prompts in the same steps.",
    "decode": "The answer: its length, the batch it shares, preemptions.",
    "respond": "The client read slowly, or the event loop was late.",
}
PHASE = "oaiserve_request_phase_seconds"


def dashboard() -> Dashboard:
    heatmaps = [buckets(phase, help, "s", PHASE, f'phase="{phase}", {REQUESTS}') for phase, help in PHASES.items()]
    return board(
        "oaiserve-phases",
        "oaiserve / Where time goes",
        "The phases of a request touch and add up to its duration, so the longest one here is where to begin.",
        [("Phases", _phases()), ("Queue", _queue()), ("Slowest requests", _slowest()), ("Each phase", heatmaps)],
    )


def _phases() -> list[Panel]:
    seconds = rate(f"{PHASE}_sum", REQUESTS, "phase")
    requests = rate("oaiserve_request_duration_seconds_count", REQUESTS)
    slow = f"histogram_quantile(0.95, {rate(f'{PHASE}_bucket', REQUESTS, 'phase, le')})"
    return [
        lines(
            "Mean time per request, by phase",
            "The height is the mean duration. Begin with the phase that grew.",
            "s",
            [Query(f"{seconds} / scalar({requests})", "{{phase}}")],
            stacked=True,
        ),
        lines(
            "Share of each phase",
            "Of all the time that requests took. A change of shape means that another part has become the limit.",
            "s",
            [Query(seconds, "{{phase}}")],
            share=True,
        ),
        lines(
            "p95 of each phase",
            "95 of 100 requests were faster in this phase. These do not add up. Click a point for its trace.",
            "s",
            [Query(slow, "{{phase}}", exemplars=True)],
            span=24,
        ),
    ]


def _queue() -> list[Panel]:
    return [
        lines(
            "What requests wait for",
            "Seconds of waiting per second, by reason. batch_full: --max-running. no_blocks and behind_others: the KV "
            "cache. token_budget: --max-step-tokens. step_under_way: steps are long. same_prefix: nothing.",
            "s",
            [Query(rate("oaiserve_queue_wait_seconds_total", ENGINE, "reason"), "{{reason}}")],
            stacked=True,
        ),
        lines(
            "Waiting now",
            "Sequences in the engine's queue, and requests that no tokenize worker has taken. The second should be "
            "near zero: else raise --tokenize-workers.",
            "short",
            [
                Query(f"sum(oaiserve_requests_waiting{{{ENGINE}}})", "engine's queue"),
                Query(f"sum(oaiserve_tokenize_queue_depth{{{ENGINE}}})", "tokenizer"),
            ],
            span=6,
        ),
        lines(
            "Stood still after a preemption",
            "Of requests that were preempted, how long. Seconds here mean that the KV cache is too small.",
            "s",
            [
                Query(
                    f"histogram_quantile(0.95, {rate('oaiserve_preemption_stall_seconds_bucket', REQUESTS, 'le')})",
                    "p95",
                )
            ],
            span=6,
        ),
    ]


def _slowest() -> list[Panel]:
    return [
        lines(
            "Duration, with single requests",
            "The points furthest up are the slowest requests: click one and open its trace, which has its phases and "
            "what it waited for. On the machine itself: /debug/requests?slowest=queue.",
            "s",
            [*quantiles("oaiserve_request_duration_seconds", REQUESTS)],
        ),
        lines(
            "First token, with single requests",
            "The same for the time to first token.",
            "s",
            [
                *quantiles("oaiserve_time_to_first_token_seconds", REQUESTS),
                Query(
                    f"sum(rate(oaiserve_time_to_first_token_seconds_sum{{{REQUESTS}}}[{RATE}]))"
                    f" / sum(rate(oaiserve_time_to_first_token_seconds_count{{{REQUESTS}}}[{RATE}]))",
                    "mean",
                ),
            ],
        ),
    ]
