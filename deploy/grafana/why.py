"""The dashboard Why: what made requests slow? Each row asks one question, and says what helps if the answer is yes."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.panels import ENGINE, RATE, REQUESTS, Panel, Query, board, lines, rate

CAUSE = "oaiserve_phase_cause_seconds_total"
ERROR = "oaiserve_step_cost_error_ratio"


def dashboard() -> Dashboard:
    return board(
        "oaiserve-why",
        "oaiserve / Why",
        "The causes of the phases prefill and decode add up to them. Begin with the largest one in the first row.",
        [
            ("What made requests slow?", _causes()),
            ("Which prompts are read again?", _read_again()),
            ("Do neighbours make decode slow?", _neighbours()),
            ("Does one client make the others wait?", _clients()),
            ("Is the KV cache too small?", _preemption()),
            ("Does the machine do something else?", _machine()),
            ("Do grammars hold up steps?", _constraint()),
            ("Is the host too slow?", _host()),
            ("Can these answers be trusted?", _trust()),
        ],
    )


def _share(cause: str, phase: str = "prefill|decode") -> str:
    """Return a query for the share of a cause in the time of phases."""
    phases = f'phase=~"{phase}", {ENGINE}'
    part = rate(CAUSE, f'cause="{cause}", {phases}')
    return f"{part} / {rate(CAUSE, phases)}"


def _causes() -> list[Panel]:
    requests = rate("oaiserve_request_duration_seconds_count", REQUESTS)
    texts = {
        "prefill": "Mean time per request in prefill, by cause. alone: what the prompt takes by itself, which only "
        "fewer tokens or a faster machine change. The other causes have a row each.",
        "decode": "Mean time per request in decode, by cause. alone: what the answer takes by itself, which only fewer "
        "tokens or a faster machine change. The other causes have a row each.",
    }
    panels = []
    for phase, text in texts.items():
        seconds = rate(CAUSE, f'phase="{phase}", {ENGINE}', "cause")
        query = Query(f"{seconds} / scalar({requests})", "{{cause}}")
        panels.append(lines(f"Causes of {phase}", text, "s", [query], stacked=True))
    return panels


def _read_again() -> list[Panel]:
    helps = (
        "system, message: something changes early in the prompts, such as a clock; put it last. tools: send them in "
        "the same order. evicted: more --kv-cache-memory. /debug/requests/ID has the reason for each request."
    )
    tokens = rate("oaiserve_prompt_tokens_read_again_total", ENGINE, "reason")
    spent = rate("oaiserve_prompt_read_again_seconds_total", ENGINE, "reason")
    return [
        lines("Tokens read again", helps, "short", [Query(tokens, "{{reason}}")], stacked=True),
        lines("Time to read them again", helps, "s", [Query(spent, "{{reason}}")], stacked=True),
    ]


def _neighbours() -> list[Panel]:
    return [
        lines(
            "Share of neighbours in decode",
            "neighbour_decodes: others that decode in the same steps; lower --max-running, or add an instance. "
            "neighbour_prompts: prompts of others in the same steps; set --itl-target-seconds. "
            "neighbour_media: images and sounds of others, between steps; add an instance. /debug/requests/ID names "
            "the neighbour.",
            "percentunit",
            [
                Query(_share("neighbour_decodes", "decode"), "neighbour_decodes"),
                Query(_share("neighbour_prompts", "decode"), "neighbour_prompts"),
                Query(_share("neighbour_media", "decode"), "neighbour_media"),
            ],
            stacked=True,
            most=1,
        ),
        lines(
            "Tokens in a step",
            "Tokens in a step, 50th and 99th percentile. If they are far apart, prompts share steps with decodes.",
            "short",
            [
                Query(
                    f"histogram_quantile({q}, {rate('oaiserve_engine_step_tokens_bucket', ENGINE, 'le')})",
                    f"p{q * 100:g}",
                )
                for q in (0.5, 0.99)
            ],
        ),
    ]


def _clients() -> list[Panel]:
    texts = {
        "delayed": "Seconds per second for which requests of other clients waited for this client's, in the queue and "
        "in steps; many requests may wait at once. The server's page /clients has the command that gives the others "
        "more: oaiserve keys limit NAME --share 0.25, or --requests-per-minute.",
        "waited": "Seconds per second for which each client's requests waited for those of others. A client is the "
        "name of an API key, empty without one.",
    }
    titles = {"delayed": "Made others wait, by client", "waited": "Waited for others, by client"}
    return [
        lines(
            titles[name],
            text,
            "s",
            [Query(rate(f"oaiserve_client_{name}_seconds_total", ENGINE, "client"), "{{client}}")],
            stacked=True,
        )
        for name, text in texts.items()
    ]


def _preemption() -> list[Panel]:
    return [
        lines(
            "Share of preemption",
            "Share of prefill and decode in which requests stood still because others needed their blocks, or were "
            "computed again. Raise --kv-cache-memory, or lower --max-running.",
            "percentunit",
            [Query(_share("preemption"), "preemption")],
        ),
        lines(
            "KV cache in use",
            "Share of the KV cache's blocks in use, on the instance with the largest one. Preemptions begin at 1.",
            "percentunit",
            [Query(f"max(oaiserve_kv_cache_usage_ratio{{{ENGINE}}})", "in use")],
            most=1,
        ),
    ]


def _machine() -> list[Panel]:
    return [
        lines(
            "Share of the machine",
            "Share of prefill and decode in which the engine was ready to run and had no core, read a page from disk, "
            "or had used up its CPU limit. Find the other program, reserve cores, or raise the limit. In a standstill, "
            "something has stopped the whole process.",
            "percentunit",
            [Query(_share("machine"), "machine"), Query(_share("standstill"), "standstill")],
        ),
        lines(
            "Cores that the process uses",
            "CPU time of the process per second. Where this is below its cores while the share of the machine grows, "
            "another program has them.",
            "short",
            [Query(f"sum by (instance) (rate(process_cpu_seconds_total{{{ENGINE}}}[{RATE}]))", "{{instance}}")],
        ),
    ]


def _constraint() -> list[Panel]:
    return [
        lines(
            "Share of masks",
            "Share of prefill and decode in which steps waited for the masks of grammars. Bounds on long strings make "
            "them slow; look for such a schema among the slowest requests.",
            "percentunit",
            [Query(_share("constraint"), "constraint")],
            span=24,
        ),
    ]


def _host() -> list[Panel]:
    return [
        lines(
            "Share of the host",
            "Share of prefill and decode between steps. If it is more than a few percent, see the parts of the engine "
            "thread's time on Engine.",
            "percentunit",
            [Query(_share("host"), "host")],
        ),
        lines(
            "Time between steps",
            "Seconds per second in which there was work and no step ran.",
            "percentunit",
            [Query(rate("oaiserve_engine_idle_with_work_seconds_total", ENGINE), "between steps")],
        ),
    ]


def _trust() -> list[Panel]:
    return [
        lines(
            "Error of the expected time of steps",
            "How far steps were from what was expected of them, 50th and 95th percentile. Above 5 and 15 percent, what "
            "a request would have taken alone is a rough number.",
            "percentunit",
            [
                Query(f"histogram_quantile({q}, {rate(f'{ERROR}_bucket', ENGINE, 'le')})", f"p{q * 100:g}")
                for q in (0.5, 0.95)
            ],
            thresholds=[(None, "green"), (0.05, "orange"), (0.15, "red")],
        ),
        lines(
            "Share that is unexplained",
            "Share of prefill and decode for which no cause was found: steps took longer than expected, and neither "
            "the machine nor masks held them up; or the server had not seen such steps before (not known yet).",
            "percentunit",
            [Query(_share("unexplained"), "unexplained"), Query(_share("not_known_yet"), "not known yet")],
        ),
    ]
