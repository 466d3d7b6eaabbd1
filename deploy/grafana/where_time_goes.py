"""The dashboard Where time goes: why is the server slow? It shows phases, reasons to wait, and the slowest requests."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.panels import ENGINE, RATE, REQUESTS, Panel, Query, board, buckets, lines, quantiles, rate

# The phases in the order of a request, each with the reasons why it may be long.
PHASES = {
    "receive": "If it is long, the body is large or came slowly: look at the client's network, or at the event loop "
    "(Engine, row Process).",
    "tokenize_wait": "If it is long, all tokenize workers were busy: raise --tokenize-workers.",
    "tokenize": "If it is long, prompts are long, the cores were busy, or grammars were compiled (Engine, row Grammars "
    "and tools).",
    "encode_media": "Of requests with images or sounds. If it is long, these are large or many, or few were in the "
    "cache of their vectors.",
    "queue": "If it is long, the row Queue shows what requests waited for.",
    "prefill": "If it is long, prompts are long, few of their tokens were cached, or other prompts shared the steps.",
    "decode": "If it is long, answers are long, the batch is large, or there were preemptions.",
    "respond": "If it is long, the client read slowly, or the event loop was late.",
}
PHASE = "oaiserve_request_phase_seconds"


def dashboard() -> Dashboard:
    heatmaps = [buckets(phase, help, "s", PHASE, f'phase="{phase}", {REQUESTS}') for phase, help in PHASES.items()]
    return board(
        "oaiserve-phases",
        "oaiserve / Where time goes",
        "The phases of a request touch and add up to its duration, so begin with the longest one.",
        [("Phases", _phases()), ("Queue", _queue()), ("Slowest requests", _slowest()), ("Each phase", heatmaps)],
    )


def _phases() -> list[Panel]:
    seconds = rate(f"{PHASE}_sum", REQUESTS, "phase")
    requests = rate("oaiserve_request_duration_seconds_count", REQUESTS)
    slow = f"histogram_quantile(0.95, {rate(f'{PHASE}_bucket', REQUESTS, 'phase, le')})"
    return [
        lines(
            "Mean time per request, by phase",
            "The height of the stack is the mean duration of a request. Begin with the phase that grew.",
            "s",
            [Query(f"{seconds} / scalar({requests})", "{{phase}}")],
            stacked=True,
        ),
        lines(
            "Share of each phase",
            "Share of each phase in the total time of requests. If the shape changes, another phase has become the "
            "limit.",
            "s",
            [Query(seconds, "{{phase}}")],
            share=True,
        ),
        lines(
            "p95 of each phase",
            "95 of 100 requests took at most this long in the phase. These times do not add up. Click a point for its "
            "trace.",
            "s",
            [Query(slow, "{{phase}}", exemplars=True)],
            span=24,
        ),
    ]


def _queue() -> list[Panel]:
    return [
        lines(
            "What requests wait for",
            "Seconds of waiting per second, by reason. batch_full: --max-running is the limit. no_blocks and "
            "behind_others: the KV cache is. token_budget: --max-step-tokens is. step_under_way: steps are long. "
            "same_prefix: another request computes the same prefix, which saves work. prefix_read: it is read from "
            "disk. prefix_restored: it is restored from host memory.",
            "s",
            [Query(rate("oaiserve_queue_wait_seconds_total", ENGINE, "reason"), "{{reason}}")],
            stacked=True,
        ),
        lines(
            "Waiting now",
            "Sequences in the engine's queue, and requests that no tokenize worker has taken. If the latter is not "
            "near zero, raise --tokenize-workers.",
            "short",
            [
                Query(f"sum(oaiserve_requests_waiting{{{ENGINE}}})", "engine's queue"),
                Query(f"sum(oaiserve_tokenize_queue_depth{{{ENGINE}}})", "tokenizer"),
            ],
            span=6,
        ),
        lines(
            "Stall by preemptions",
            "95th percentile of the time that preempted requests stood still. Seconds mean that the KV cache is too "
            "small.",
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
            "The highest points are the slowest requests: click one and open its trace, which has its phases and the "
            "reasons why it waited. /debug/requests?slowest=queue on the server lists those that waited longest.",
            "s",
            [*quantiles("oaiserve_request_duration_seconds", REQUESTS)],
        ),
        lines(
            "First token, with single requests",
            "Time to first token. The points are single requests: click one for its trace.",
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
