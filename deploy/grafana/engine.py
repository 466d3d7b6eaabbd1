"""The dashboard Engine: what limits the server? It shows steps, batch, KV cache, queue, and the process."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.panels import ENGINE, RATE, REQUESTS, Panel, Query, board, buckets, lines, rate

STEP = "oaiserve_engine_step_seconds"


def dashboard() -> Dashboard:
    return board(
        "oaiserve-engine",
        "oaiserve / Engine",
        "Steps, KV cache, queue and process of the engine. These metrics have no model label: choose an instance.",
        [
            ("Device and host", _host()),
            ("Steps", _steps()),
            ("Drafts", _drafts()),
            ("KV cache", _cache()),
            ("Grammars and tools", _grammars()),
            ("Images and sounds", _media()),
            ("Queue", _queue()),
            ("Process", _process()),
        ],
        collapsed=("Drafts", "Grammars and tools", "Images and sounds", "Queue"),
    )


def _mean(histogram: str) -> str:
    return f"{rate(f'{histogram}_sum', ENGINE, 'instance')} / {rate(f'{histogram}_count', ENGINE, 'instance')}"


def _host() -> list[Panel]:
    """Return the panel of device and host time. It shows means over the instances, so that the parts add up to 1."""

    def mean(counter: str, by: str = "") -> str:
        grouping = f" by ({by})" if by else ""
        return f"avg{grouping} (rate({counter}{{{ENGINE}}}[{RATE}]))"

    return [
        lines(
            "Is the device busy? What does the engine thread do?",
            "Share of time, as the mean over the instances. Lines: the time in which the device computes steps, or "
            "waits although there is work. Areas: what the engine thread does; they add up to 1. If wait is large, the "
            "device is the limit. If another area is large and the device waits, the host is the limit; "
            "docs/telemetry.md says what helps.",
            "percentunit",
            [Query(mean("oaiserve_engine_host_seconds_total", "part"), "{{part}}")],
            overlay=[
                Query(mean("oaiserve_engine_model_seconds_total"), "device busy"),
                Query(mean("oaiserve_engine_idle_with_work_seconds_total"), "device waits with work"),
            ],
            stacked=True,
            span=24,
            most=1,
        )
    ]


def _steps() -> list[Panel]:
    model = rate("oaiserve_engine_model_seconds_total", ENGINE, "instance")
    idle = rate("oaiserve_engine_idle_with_work_seconds_total", ENGINE, "instance")
    return [
        lines(
            "Time of the engine",
            "Share of time. Near 100 % in the model with requests waiting means that the machine is the limit. Idle "
            "with work above a few percent means that the engine thread waits for a core or for the interpreter; look "
            "for other busy programs.",
            "percentunit",
            [Query(model, "in the model {{instance}}"), Query(idle, "idle with work {{instance}}")],
            most=1,
        ),
        lines(
            "Sequences in a step",
            "Mean number of sequences in a step. At --max-running, requests wait for a place. If it is far below "
            "--max-running and requests wait, the KV cache is too small.",
            "short",
            [Query(_mean("oaiserve_engine_step_sequences"), "{{instance}}")],
        ),
        lines(
            "Tokens in a step",
            "Mean number of tokens in a step. At --max-step-tokens, prompts wait for room in a step.",
            "short",
            [Query(_mean("oaiserve_engine_step_tokens"), "{{instance}}")],
        ),
        lines(
            "Time of a step, p99",
            "99th percentile of the step time, by kind of step. Every stream waits for the end of a step, so long "
            "mixed steps make streams stutter. A lower --max-step-tokens or --itl-target-seconds makes them shorter.",
            "s",
            [Query(f"histogram_quantile(0.99, {rate(f'{STEP}_bucket', ENGINE, 'kind, le')})", "{{kind}}")],
        ),
        lines(
            "Steps by kind",
            "Steps per second. prefill: only prompts; decode: only answers; mixed: both.",
            "short",
            [Query(rate(f"{STEP}_count", ENGINE, "kind"), "{{kind}}")],
            stacked=True,
        ),
        buckets(
            "Time of a step",
            "Distribution of the step time. Two bands are usual: decode steps below, steps with prompts above.",
            "s",
            STEP,
            ENGINE,
        ),
    ]


def _drafts() -> list[Panel]:
    tokens = "oaiserve_draft_tokens_total"
    drafts = rate("oaiserve_drafts_total", ENGINE)
    accepted = rate(tokens, f'outcome="accepted", {ENGINE}')
    drafted = rate(tokens, ENGINE)
    return [
        lines(
            "Draft tokens",
            "Tokens of drafts per second: guesses at the next tokens, which steps verify. accepted: they came true, "
            "and made an answer faster. rejected: they were computed for nothing, in steps that take hardly longer.",
            "short",
            [Query(rate(tokens, ENGINE, "outcome"), "{{outcome}}")],
            stacked=True,
        ),
        lines(
            "Draft tokens that come true",
            "Share of the tokens of drafts that came true. High where answers repeat their prompts or themselves.",
            "percentunit",
            [Query(f"{accepted} / ({drafted} > 0)", "accepted")],
            most=1,
        ),
        lines(
            "Tokens of a draft",
            "Mean number of accepted tokens of a draft, which a step yields in addition to its own token.",
            "short",
            [Query(f"{accepted} / ({drafts} > 0)", "accepted")],
        ),
    ]


def _reuse(offset: str) -> str:
    """Return a query for the share of prompt tokens that the prefix cache had, as of `offset`."""
    hits, queries = (
        f"sum(rate(oaiserve_prefix_cache_{name}_tokens_total{{{ENGINE}}}[{RATE}]{offset}))" for name in ("hit", "query")
    )
    return f"{hits} / ({queries} > 0)"


def _cache() -> list[Panel]:
    hits = rate("oaiserve_prefix_cache_hit_tokens_total", ENGINE, "instance")
    queries = rate("oaiserve_prefix_cache_query_tokens_total", ENGINE, "instance")
    unused = rate("oaiserve_prefix_cache_evicted_unused_seconds_total", ENGINE, "instance")
    evicted = rate("oaiserve_prefix_cache_evicted_blocks_total", ENGINE, "instance")
    return [
        lines(
            "KV blocks",
            "used: referenced by sequences. cached: unused, but a prompt may reuse their content. free: without "
            "content. If nearly all are used and there are preemptions, raise --kv-cache-memory.",
            "short",
            [Query(f"sum by (state) (oaiserve_kv_blocks{{{ENGINE}}})", "{{state}}")],
            stacked=True,
        ),
        lines(
            "Prefix cache, hit rate",
            "Share of prompt tokens that the prefix cache had, so that they are not computed. If it is low although "
            "prompts have a common prefix, the cache is too small, or the prefixes differ early.",
            "percentunit",
            [Query(f"{hits} / ({queries} > 0)", "{{instance}}")],
            most=1,
        ),
        lines(
            "Reuse, now and before",
            "Share of prompt tokens that the prefix cache had, of all instances: now, an hour ago and a day ago. If it "
            "falls, the cache has become too small for the clients, or their prompts differ earlier: the dashboard Why "
            "says which.",
            "percentunit",
            [
                Query(_reuse(offset), legend)
                for offset, legend in (("", "now"), (" offset 1h", "an hour ago"), (" offset 1d", "a day ago"))
            ],
            most=1,
        ),
        lines(
            "Age of cached blocks at eviction",
            "Mean time since the last use of the blocks that the prefix cache evicts. If it is "
            "shorter than clients take between the turns of a conversation, raise --kv-cache-memory, or add a tier: "
            "--prefix-cache-dir, --kv-offload.",
            "s",
            [Query(f"{unused} / ({evicted} > 0)", "{{instance}}")],
        ),
        lines(
            "Blocks of the prefix cache on disk",
            "Per second, with --prefix-cache-dir. skipped: memory had lost them before they were written, or the disk "
            "failed, as the log then says.",
            "short",
            [
                Query(
                    rate(f"oaiserve_prefix_cache_{what}_blocks_total", ENGINE, "instance"), f"{what} {{{{instance}}}}"
                )
                for what in ("read", "written", "skipped")
            ],
        ),
        lines(
            "KV blocks to and from host memory",
            "Bytes per second, with --kv-offload, and the prefixes that were found there. Many bytes out and few in: "
            "prompts have nothing in common, and the memory is of no use.",
            "Bps",
            [
                Query(rate(f"oaiserve_kv_offload_{way}_bytes_total", ENGINE, "instance"), f"{way} {{{{instance}}}}")
                for way in ("out", "in")
            ],
            span=12,
        ),
        lines(
            "Prefixes in host memory",
            "Prefixes per second that were found in the host memory of --kv-offload, and the KV blocks there.",
            "short",
            [
                Query(rate("oaiserve_kv_offload_hits_total", ENGINE, "instance"), "found {{instance}}"),
                Query(f"sum by (instance) (oaiserve_kv_offload_blocks{{{ENGINE}}})", "blocks {{instance}}"),
            ],
            span=12,
        ),
        lines(
            "Preemptions, steps out of memory",
            "Per second. A preempted sequence is computed again: if preemptions do not stop, raise --kv-cache-memory "
            "or lower --max-running. Steps that do not fit into the GPU's memory are computed in parts: lower "
            "--gpu-memory-utilization.",
            "short",
            [
                Query(rate("oaiserve_preemptions_total", ENGINE, "instance"), "preemptions {{instance}}"),
                Query(rate("oaiserve_engine_out_of_memory_total", ENGINE, "instance"), "out of memory {{instance}}"),
            ],
        ),
    ]


def _grammars() -> list[Panel]:
    compiled = "oaiserve_grammar_compile_seconds"
    drawn = rate("oaiserve_grammar_masked_draws_total", ENGINE)
    forced = rate("oaiserve_grammar_forced_tokens_total", ENGINE)
    generated = rate("oaiserve_generation_tokens_total", REQUESTS)
    requests = rate(f"{compiled}_count", ENGINE)
    hits = rate(f"{compiled}_count", f'cache="hit", {ENGINE}')
    masks = rate("oaiserve_engine_host_seconds_total", f'part="masks", {ENGINE}')
    return [
        lines(
            "Time to compile a grammar, p95",
            "95th percentile, within the phase tokenize. hit: an earlier request had the same grammar; it is long only "
            "where it waited for that one. miss: the grammar was compiled, which takes longer for large schemas.",
            "s",
            [
                Query(
                    f"histogram_quantile(0.95, {rate(f'{compiled}_bucket', ENGINE, 'cache, le')})",
                    "{{cache}}",
                    exemplars=True,
                )
            ],
        ),
        lines(
            "Grammar cache, hit rate",
            "Share of requests with a grammar whose grammar had been compiled before. If it is low, clients send ever "
            "new schemas: what changes from request to request belongs into the prompt.",
            "percentunit",
            [Query(f"({hits} or vector(0)) / ({requests} > 0)", "hits")],
            most=1,
        ),
        lines(
            "Share of masked draws",
            "Share of generated tokens that were drawn among those that a grammar lets come next. Where drafts are "
            "rejected, it may be above 1. Generated tokens are counted when their request ends: look at minutes.",
            "percentunit",
            [Query(f"{drawn} / ({generated} > 0)", "masked")],
        ),
        lines(
            "Tokens under grammars",
            "Tokens per second. drawn: by the model, among those that a grammar lets come next. forced: not drawn, "
            "because the grammar left no other; these make an answer faster.",
            "short",
            [Query(drawn, "drawn"), Query(forced, "forced")],
            stacked=True,
        ),
        lines(
            "Time for a mask",
            "Mean time to find which tokens a grammar lets come next, for each draw. On a GPU it passes while the GPU "
            "computes; on a CPU it makes the step longer. Above a millisecond, some grammar is hard, such as a regex "
            "with long bounded repetitions.",
            "s",
            [Query(f"{masks} / ({drawn} > 0)", "mean")],
        ),
        lines(
            "Tool calls by outcome",
            "Calls of tools per second in answers that ended. called: the client got the call. unparsed: it began like "
            "a call but is none, or names no tool of the request, so it stayed text. If these are many, the model "
            "writes another form than --tool-call-parser reads.",
            "short",
            [Query(rate("oaiserve_tool_calls_total", ENGINE, "outcome"), "{{outcome}}")],
            stacked=True,
        ),
        lines(
            "Answers in a loop",
            "Answers per second that ended in the same tokens again and again. Small models do so, above all without a "
            "repetition penalty: set one with --default-params. A request with repetition_detection ends such an "
            "answer, and others go on up to their limit.",
            "short",
            [Query(rate("oaiserve_looping_choices_total", ENGINE, "model"), "{{model}}")],
        ),
    ]


def _media() -> list[Panel]:
    rows, seconds = (rate(f"oaiserve_media_{name}_total", ENGINE) for name in ("encoded_tokens", "encode_seconds"))
    hits, queries = (rate(f"oaiserve_media_cache_{name}_total", ENGINE) for name in ("hits", "queries"))
    return [
        lines(
            "Time to encode a token of an image or a sound",
            "Mean time of the engine, between steps. If it grew, the machine does something else, or media are small.",
            "s",
            [Query(f"{seconds} / ({rows} > 0)", "mean")],
        ),
        lines(
            "Media that are not encoded",
            "Requests in the phase encode_media, and their tokens of media. If these do not return to zero, add an "
            "instance.",
            "short",
            [
                Query(f"oaiserve_media_requests_waiting{{{ENGINE}}}", "requests {{instance}}"),
                Query(f"oaiserve_media_waiting_tokens{{{ENGINE}}}", "tokens {{instance}}"),
            ],
            span=6,
        ),
        lines(
            "Cache of media, hit rate",
            "Share of images and sounds whose vectors were in the cache: those of earlier turns should be.",
            "percentunit",
            [Query(f"{hits} / ({queries} > 0)", "hits")],
            most=1,
            span=6,
        ),
        lines(
            "Images and sounds encoded",
            "Per second, without those of the cache.",
            "short",
            [Query(rate("oaiserve_media_encoded_total", ENGINE, "instance"), "{{instance}}")],
        ),
        lines(
            "Cache of media",
            "Bytes of the vectors in the cache, by instance.",
            "bytes",
            [Query(f"oaiserve_media_cache_bytes{{{ENGINE}}}", "{{instance}}")],
        ),
    ]


def _queue() -> list[Panel]:
    return [
        lines(
            "Running and waiting",
            "Sequences by instance. If they differ much, the load balancer does not see the load.",
            "short",
            [
                Query(f"oaiserve_requests_running{{{ENGINE}}}", "running {{instance}}"),
                Query(f"oaiserve_requests_waiting{{{ENGINE}}}", "waiting {{instance}}"),
                Query(f"oaiserve_background_running{{{ENGINE}}}", "in the background {{instance}}"),
                Query(f"oaiserve_background_waiting{{{ENGINE}}}", "waiting in the background {{instance}}"),
            ],
            span=8,
        ),
        lines(
            "Prompt tokens that wait",
            "Prompt tokens of requests that have not entered a step.",
            "short",
            [Query(f"oaiserve_waiting_prompt_tokens{{{ENGINE}}}", "{{instance}}")],
            span=8,
        ),
        lines(
            "Leaving the queue",
            "Requests per second that leave the queue, last measured while any waited. The retry-after of refusals is "
            "computed from it.",
            "reqps",
            [Query(f"oaiserve_drain_rate_requests_per_second{{{ENGINE}}}", "{{instance}}")],
            span=4,
        ),
        lines(
            "Tokenizer's queue",
            "Requests that no tokenize worker has taken. If there are more than a few, raise --tokenize-workers.",
            "short",
            [Query(f"oaiserve_tokenize_queue_depth{{{ENGINE}}}", "{{instance}}")],
            span=4,
        ),
        lines(
            "Adapters",
            "Sequences by adapter (LoRA), the 20 largest numbers. All adapters that are loaded may be in one step, so "
            "those that wait do so for a place or for blocks, as sequences without an adapter do.",
            "short",
            [
                Query(
                    f"topk(20, sum by (model, state) (oaiserve_adapter_requests{{{ENGINE}}}) > 0)",
                    "{{model}} {{state}}",
                )
            ],
            span=8,
        ),
    ]


def _process() -> list[Panel]:
    lag = rate("oaiserve_event_loop_lag_seconds_bucket", ENGINE, "instance, le")
    left_out = rate("oaiserve_log_messages_total", f'result="left_out", {ENGINE}')
    lost = rate("oaiserve_spans_total", f'result=~"failed|dropped", {ENGINE}')
    return [
        lines(
            "Event loop, lag p99",
            "99th percentile of how late the event loop wakes up. Every stream is late by as much. Above 0.1 s, see "
            "OaiserveEventLoopLag in the runbook.",
            "s",
            [Query(f"histogram_quantile(0.99, {lag})", "{{instance}}")],
            thresholds=[(None, "transparent"), (0.1, "red")],
        ),
        lines(
            "Tokens of a request, median",
            "Median number of tokens of requests that ended. Longer prompts or answers explain most slow requests.",
            "short",
            [
                Query(
                    f"histogram_quantile(0.5, {rate(f'oaiserve_request_{kind}_tokens_bucket', REQUESTS, 'le')})", kind
                )
                for kind in ("prompt", "generation")
            ],
        ),
        lines(
            "Connections",
            "Open connections, and those refused per second by reason. `all` and `address`: the limits of connections. "
            "`header_timeout`, `handshake` and `invalid`: clients that sent nothing, too slowly, or no HTTP. If `all` "
            "is not zero, see OaiserveConnectionsFull in the runbook. `held back`: seconds per second that the 4xx of "
            "clients with many refusals wait.",
            "short",
            [
                Query(f"oaiserve_connections{{{ENGINE}}}", "open {{instance}}"),
                Query(rate("oaiserve_connections_refused_total", ENGINE, "reason"), "{{reason}}"),
                Query(rate("oaiserve_refusal_delay_seconds_total", ENGINE), "held back, s/s"),
            ],
        ),
        lines(
            "Replicas",
            "Sequences of each replica of --replicas, running and waiting, the share of its KV cache in use, and "
            "requests per second for which it was chosen, by the reason. The router keeps the loads alike; many "
            "`spilled` mean that the replicas with a prefix are busy. If one is down, see OaiserveEngineDown in the "
            "runbook.",
            "short",
            [
                Query(f"oaiserve_replica_sequences{{{ENGINE}}}", "{{replica}} {{state}}"),
                Query(f"oaiserve_replica_kv_used_ratio{{{ENGINE}}}", "{{replica}} KV cache"),
                Query(
                    rate("oaiserve_replica_choices_total", ENGINE, "instance, replica, reason"),
                    "{{replica}} {{reason}}",
                ),
                Query(f"count(oaiserve_replica_up{{{ENGINE}}} == 0)", "down"),
            ],
            span=24,
        ),
        lines(
            "Telemetry lost",
            "Per second: spans that did not reach the collector, and records that telemetry failed on. Both should be "
            "zero: see OaiserveTelemetryDropping in the runbook. And messages left out of the log, of which there were "
            "many of the same kind.",
            "short",
            [
                Query(f"{lost} or vector(0)", "spans"),
                Query(f"{rate('oaiserve_telemetry_errors_total', ENGINE)} or vector(0)", "errors"),
                Query(f"{left_out} or vector(0)", "log messages"),
            ],
            span=4,
        ),
        lines(
            "Time of a scrape",
            "Mean time to render /metrics. Requests do not wait for it.",
            "s",
            [
                Query(
                    f"rate(oaiserve_scrape_duration_seconds_sum{{{ENGINE}}}[{RATE}])"
                    f" / rate(oaiserve_scrape_duration_seconds_count{{{ENGINE}}}[{RATE}])",
                    "{{instance}}",
                )
            ],
            span=4,
        ),
        lines(
            "Stored responses",
            "Answers of /v1/responses in the store, and those dropped per second by reason. age: too old. room: others "
            "needed it, so --response-store-number or --response-store-bytes is reached. size: larger than the store.",
            "short",
            [
                Query(f"oaiserve_stored_responses{{{ENGINE}}}", "stored {{instance}}"),
                Query(rate("oaiserve_stored_responses_dropped_total", ENGINE, "reason"), "{{reason}}"),
            ],
        ),
        lines(
            "Size of the stored responses",
            "Bytes of the answers in the store, and of their inputs.",
            "bytes",
            [Query(f"oaiserve_stored_response_bytes{{{ENGINE}}}", "{{instance}}")],
        ),
    ]
