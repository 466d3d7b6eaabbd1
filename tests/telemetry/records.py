"""Random records, and the samples that every metric must have for them, computed one value at a time."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from fractions import Fraction

from hypothesis import strategies as st

from oaiserve.facts.media import MediaAccount
from oaiserve.facts.metric import Metric
from oaiserve.facts.record import (
    Cause,
    DeadlineOutcome,
    EngineAccount,
    EventKind,
    OthersTime,
    Outcome,
    ReadAgain,
    RequestEvent,
    RequestRecord,
    ToolCallOutcome,
    WaitReason,
    Whose,
)
from oaiserve.facts.times import STAMPS, TEXT_STAMPS, RequestTimes
from oaiserve.facts.trace import TraceContext
from oaiserve.telemetry import names, vllm_names
from oaiserve.telemetry.targets import Targets
from tests.telemetry.pages import Key, key

MODEL = "demo"
BOUNDS = sorted({bound for m in names.METRICS for bound in m.buckets if m.unit == "seconds"})
NS = st.one_of(
    st.integers(0, 10**10),
    st.sampled_from(BOUNDS).flatmap(lambda bound: st.integers(-1, 1).map(lambda off: round(bound * 1e9) + off)),
    st.integers(0, 10**15),
)
TOKENS = st.one_of(st.integers(0, 20), st.sampled_from([999, 1000, 1001]), st.integers(0, 3 * 10**6))


@st.composite
def causes(draw: st.DrawFn, times: RequestTimes) -> dict[str, dict[Cause, int]]:
    """Return the fields of an account with the causes of the phases that were reached, or a part of these."""
    fields: dict[str, dict[Cause, int]] = {}
    for phase in times.phases():
        if phase.name in ("prefill", "decode"):
            parts = fields.setdefault(f"{phase.name}_causes_ns", {})
            left_ns = phase.duration_ns
            for cause in draw(st.lists(st.sampled_from(Cause), unique=True, max_size=3)):
                parts[cause] = draw(st.integers(0, left_ns))
                left_ns -= parts[cause]
    return fields


@st.composite
def read_again(draw: st.DrawFn) -> dict[str, object]:
    reason = draw(st.none() | st.sampled_from(ReadAgain))
    return {"read_again_reason": reason, "read_again_tokens": 0 if reason is None else draw(TOKENS)}


OTHERS = st.lists(
    st.builds(OthersTime, st.just(Whose.OTHER_CLIENT), st.sampled_from([None, "batchjob", "carol"]), NS, NS, NS)
    | st.builds(OthersTime, st.just(Whose.SAME_CLIENT), st.none(), NS, NS, NS),
    max_size=4,
    unique_by=lambda others: others[:2],
)


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    """Return any record. Stamps may be equal, and events may be at them."""
    stamps_ns = [draw(NS)]
    has_media = draw(st.booleans())
    stamps = STAMPS if has_media else TEXT_STAMPS
    for _ in range(draw(st.integers(1, len(stamps) - 1))):
        stamps_ns.append(stamps_ns[-1] + draw(NS))
    reached = dict(zip(stamps, stamps_ns[:-1], strict=False))
    times = RequestTimes(**reached, responded=stamps_ns[-1], has_media=has_media)
    at_ns = st.sampled_from(stamps_ns) | st.integers(stamps_ns[0], stamps_ns[-1])
    details = st.dictionaries(st.sampled_from(["tokens", "start"]), NS)
    event = st.builds(RequestEvent, st.sampled_from(EventKind), at_ns, st.none() | st.integers(0, 3), details)
    num_preemptions = draw(st.integers(0, 2))
    num_drafted = draw(TOKENS)
    grammar_kind = draw(st.none() | st.sampled_from(["json_schema", "lark"]))
    compile_ns = None if grammar_kind is None else draw(st.none() | NS)
    num_images, num_sounds = (draw(st.integers(0, 3)), draw(st.integers(0, 3))) if has_media else (0, 0)
    account = EngineAccount(
        media=MediaAccount(
            num_images=num_images,
            num_sounds=num_sounds,
            image_tokens=num_images and draw(TOKENS),
            audio_tokens=num_sounds and draw(TOKENS),
            num_cached=draw(st.integers(0, num_images + num_sounds)),
            encode_ns=draw(NS) if has_media else 0,
        ),
        events=sorted(draw(st.lists(event, max_size=12)), key=lambda event: event.at_ns),
        num_choices=draw(st.integers(0, 5)),
        longest_choice_tokens=draw(TOKENS),
        waits_ns=draw(st.dictionaries(st.sampled_from(WaitReason), NS, max_size=2)),
        others_ns=draw(st.dictionaries(st.sampled_from(["queue", "prefill", "decode"]), OTHERS)),
        inter_token_ns=array("q", draw(st.lists(NS, max_size=5))),
        num_preemptions=num_preemptions,
        stalled_ns=draw(NS) if num_preemptions else 0,
        first_step=draw(st.none() | st.integers(0, 10**6)),
        num_steps=draw(st.integers(1, 10**6)),
        model_ns=draw(NS),
        num_step_sequences=draw(TOKENS),
        grammar_kind=grammar_kind,
        grammar_compile_ns=compile_ns,
        grammar_cache=None if compile_ns is None else draw(st.sampled_from(["hit", "miss"])),
        num_masked_draws=draw(TOKENS),
        num_forced_tokens=draw(TOKENS),
        num_draft_tokens=num_drafted,
        num_accepted_tokens=draw(st.integers(0, num_drafted)),
        num_loops=draw(st.integers(0, 2)),
        **draw(causes(times)),
    )
    prompt_tokens = draw(TOKENS)
    completion_tokens = draw(TOKENS)
    account.num_continued_tokens = draw(st.just(0) | st.integers(0, completion_tokens))
    return RequestRecord(
        request_id="req-1",
        trace=TraceContext(draw(st.integers(1, 2**128 - 1)), draw(st.integers(1, 2**64 - 1))),
        times=times,
        outcome=draw(st.sampled_from(Outcome)),
        operation=draw(st.sampled_from(["chat", "responses", "text_completion", "embeddings"])),
        http_method="POST",
        http_route="/v1/completions",
        http_status=draw(st.sampled_from([None, 200, 400, 429, 500])),
        model=MODEL,
        error_type=draw(st.sampled_from([None, "Overloaded", "InvalidRequest", "ContextLengthExceeded"])),
        prompt_tokens=prompt_tokens,
        cached_tokens=draw(st.integers(0, prompt_tokens)),
        **draw(read_again()),
        completion_tokens=completion_tokens,
        finish_reasons=tuple(draw(st.lists(st.sampled_from(["stop", "length", "repetition"]), max_size=3))),
        answer_reasons=draw(st.sampled_from([(), ("tool_calls",)])),
        requested_model=draw(st.sampled_from([None, "gpt-4o"])),
        stop_sequences=draw(st.sampled_from([(), ("\n", "END")])),
        reasoning_level=draw(st.sampled_from([None, "low"])),
        previous_response_id=draw(st.sampled_from([None, "resp_1"])),
        reasoning_tokens=draw(st.none() | TOKENS),
        tool_calls=draw(st.dictionaries(st.sampled_from(ToolCallOutcome), st.integers(1, 9))),
        deadline=draw(st.none() | st.sampled_from(DeadlineOutcome)),
        adapted=draw(st.sampled_from([(), ("tools[0].parameters: not is not enforced",)])),
        deadline_ns=draw(st.none() | NS),
        background=draw(st.booleans()),
        params=draw(
            st.sampled_from([{}, {"n": 2}, {"n": 5, "temperature": 0.5}, {"max_tokens": 0}, {"max_tokens": 70}])
        ),
        event_tokens=array("q", draw(st.lists(st.integers(0, 300), max_size=5))),
        event_gaps_ns=array("q", draw(st.lists(NS, max_size=5))),
        account=account,
    )


Value = Fraction | int


def expected(records: Iterable[RequestRecord]) -> dict[Key, float]:
    """Return every sample that the records make, by name and labels. Counters that are 0 are left out."""
    counters: Counter[Key] = Counter()
    by_name = {metric.name: metric for metric in (*names.METRICS, *names.GEN_AI_METRICS, *vllm_names.METRICS)}
    for record in records:
        for metric, labels, amount in counted(record):
            if is_left_out(record, metric):
                continue
            assert set(labels) == set(metric.labels)
            counters[key(metric.name, **labels)] += amount
    numbers: dict[Key, float] = {name: float(amount) for name, amount in counters.items() if amount}
    for (name, labels), values in histograms(records).items():
        for bound in (*by_name[name].buckets, float("inf")):
            number = len(values) if bound == float("inf") else sum(value <= Fraction(repr(bound)) for value in values)
            numbers[f"{name}_bucket", labels | {("le", str(bound))}] = number
        numbers[f"{name}_count", labels] = len(values)
        numbers[f"{name}_sum", labels] = float(sum(values))
    return numbers


def histograms(records: Iterable[RequestRecord]) -> dict[Key, list[Value]]:
    """Return the values of each histogram."""
    values: defaultdict[Key, list[Value]] = defaultdict(list)
    for record in records:
        for metric, labels, value in histogram_values(record):
            if not is_left_out(record, metric):
                assert set(labels) == set(metric.labels)
                values[key(metric.name, **labels)].append(value)
    return values


def is_left_out(record: RequestRecord, metric: Metric) -> bool:
    is_time = metric.unit == "seconds" and metric is not names.GRAMMAR_COMPILE_SECONDS
    return record.background and (is_time or metric is names.EVENT_TOKENS)


def seconds(ns: int) -> Fraction:
    return Fraction(ns, 10**9)


def histogram_values(record: RequestRecord) -> Iterator[tuple[Metric, dict[str, str], Value]]:
    n = names
    times = record.times
    account = record.account
    is_finished = record.outcome is Outcome.FINISHED
    own = {"outcome": str(record.outcome), "operation": record.operation, "model": MODEL}
    vllm = {"model_name": MODEL, "engine": "0"}
    gen_ai = {
        "gen_ai_operation_name": names.GEN_AI_OPERATIONS.get(record.operation, record.operation),
        "gen_ai_provider_name": "oaiserve",
        "gen_ai_request_model": MODEL,
        "gen_ai_response_model": MODEL,
    }
    vllm_phases = {"queue": vllm_names.QUEUE, "prefill": vllm_names.PREFILL, "decode": vllm_names.DECODE}
    for phase in times.phases():
        yield n.PHASE_SECONDS, own | {"phase": phase.name}, seconds(phase.duration_ns)
        if is_finished and phase.name in vllm_phases:
            yield vllm_phases[phase.name], vllm, seconds(phase.duration_ns)
    duration = seconds(times.responded - times.received)
    yield n.DURATION_SECONDS, own, duration
    yield n.GEN_AI_REQUEST_DURATION, gen_ai | {"error_type": record.error_type or ""}, duration
    if is_finished:
        yield vllm_names.DURATION, vllm, duration
    if is_finished and times.last_token is not None:
        yield vllm_names.INFERENCE, vllm, seconds(times.last_token - times.scheduled)
    if account.num_preemptions:
        stall = {"operation": record.operation, "model": MODEL}
        yield n.PREEMPTION_STALL_SECONDS, stall, seconds(account.stalled_ns)
    if account.grammar_compile_ns is not None:
        yield n.GRAMMAR_COMPILE_SECONDS, {"cache": account.grammar_cache}, seconds(account.grammar_compile_ns)
    if record.prompt_tokens:
        yield n.REQUEST_PROMPT_TOKENS, own, record.prompt_tokens
        if is_finished:
            computed = record.prompt_tokens - record.cached_tokens
            yield vllm_names.REQUEST_COMPUTED_TOKENS, vllm, computed
            yield vllm_names.REQUEST_PROMPT_TOKENS, vllm, record.prompt_tokens
    if record.operation == "embeddings":
        return
    if times.first_token is not None:
        ttft = seconds(times.first_token - times.received)
        yield n.TIME_TO_FIRST_TOKEN_SECONDS, own, ttft
        yield vllm_names.TIME_TO_FIRST_TOKEN, vllm, ttft
        if is_finished:
            yield n.GEN_AI_TIME_TO_FIRST_TOKEN, gen_ai, ttft
    generated = record.completion_tokens - account.num_continued_tokens
    per_choice = generated // max(1, account.num_choices)
    if times.last_token is not None and per_choice > 1:
        tpot = Fraction((times.last_token - times.first_token) / (per_choice - 1)) / 10**9
        yield n.TIME_PER_OUTPUT_TOKEN_SECONDS, own, tpot
        if is_finished:
            yield vllm_names.TIME_PER_OUTPUT_TOKEN, vllm, tpot
            yield n.GEN_AI_TIME_PER_OUTPUT_TOKEN, gen_ai, tpot
    for gap_ns in record.event_gaps_ns:
        yield n.INTER_TOKEN_LATENCY_SECONDS, own, seconds(gap_ns)
    for tokens in record.event_tokens:
        yield n.EVENT_TOKENS, own, tokens
    for gap_ns in filter(None, account.inter_token_ns):
        yield vllm_names.INTER_TOKEN_LATENCY, vllm, seconds(gap_ns)
    if record.prompt_tokens:
        yield n.REQUEST_GENERATION_TOKENS, own, generated
        if is_finished:
            yield vllm_names.REQUEST_GENERATION_TOKENS, vllm, generated
        for metric, vllms, value in (
            (n.REQUEST_LONGEST_CHOICE_TOKENS, vllm_names.REQUEST_LONGEST_CHOICE_TOKENS, account.longest_choice_tokens),
            (n.REQUEST_CHOICES, vllm_names.REQUEST_CHOICES, record.params.get("n", 1)),
            (n.REQUEST_MAX_TOKENS, vllm_names.REQUEST_MAX_TOKENS, record.params.get("max_tokens")),
        ):
            if value is not None:
                yield metric, own, value
                if is_finished:
                    yield vllms, vllm, value


def counted(record: RequestRecord) -> Iterator[tuple[Metric, dict[str, str], Value]]:
    n = names
    where = {"operation": record.operation, "model": MODEL}
    vllm = {"model_name": MODEL, "engine": "0"}
    status = "" if record.http_status is None else str(record.http_status)
    own = {"outcome": str(record.outcome), **where, "status": status, "error_type": record.error_type or ""}
    yield n.REQUESTS, own, 1
    if record.outcome is Outcome.REJECTED:
        reasons = {
            None: "other",
            "Overloaded": "overloaded",
            "InvalidRequest": "invalid_request",
            "ContextLengthExceeded": "context_length_exceeded",
        }
        yield n.REJECTED, {"reason": reasons[record.error_type]}, 1
    yield n.PROMPT_TOKENS, where, record.prompt_tokens
    yield vllm_names.PROMPT_TOKENS, vllm, record.prompt_tokens
    computed = record.prompt_tokens - record.cached_tokens
    yield vllm_names.TOKENS_BY_SOURCE, vllm | {"source": "local_compute"}, computed
    yield vllm_names.TOKENS_BY_SOURCE, vllm | {"source": "local_cache_hit"}, record.cached_tokens
    group = f"{record.http_status // 100}xx" if record.http_status else "none"
    yield vllm_names.HTTP_REQUESTS, {"handler": record.http_route, "method": "POST", "status": group}, 1
    if record.deadline is not None:
        yield n.DEADLINES, {"outcome": str(record.deadline)}, 1
    for judged in Targets().judge(record):
        yield n.SLO_REQUESTS, {"slo": judged.slo, "model": MODEL, "outcome": "met" if judged.is_met else "missed"}, 1
    account = record.account
    for metric, amount in (
        (n.COST_CORE_SECONDS, account.core_ns and seconds(account.core_ns)),
        (n.COST_MACHINE_SECONDS, account.machine_ns and seconds(account.machine_ns)),
        (n.COST_ALONE_SECONDS, account.alone_ns and seconds(account.alone_ns)),
        (n.COST_KV_BYTE_SECONDS, account.kv_byte_seconds),
        (n.COST_WEIGHT_BYTES, account.weight_bytes),
        (n.COST_JOULES, account.joules),
        (n.COST_PRICE, account.price),
    ):
        if amount is not None:
            yield metric, {"client": record.client or ""}, amount
    if account.machine_ns is not None:
        own = {"client": record.client or ""}
        yield n.CLIENT_WAITED_SECONDS, own, sum(seconds(ns) for ns in account.other_clients_ns.values())
        yield n.CLIENT_DELAYED_SECONDS, own, 0
        for client, ns in account.other_clients_ns.items():
            yield n.CLIENT_DELAYED_SECONDS, {"client": client}, seconds(ns)
    for reason, wait_ns in record.account.waits_ns.items():
        yield n.QUEUE_WAIT_SECONDS, {"reason": str(reason)}, seconds(wait_ns)
    for phase, causes_ns in record.causes_ns.items():
        for cause, cause_ns in causes_ns.items():
            yield n.PHASE_CAUSE_SECONDS, {"phase": phase, "cause": str(cause)}, seconds(cause_ns)
    if record.operation == "embeddings":
        return
    choices = list(record.finish_reasons)
    if record.outcome in (Outcome.CANCELLED, Outcome.FAILED):
        choices += ["abort"] * (record.account.num_choices - len(choices))
    for reason in choices:
        yield n.FINISHED_CHOICES, where | {"reason": reason}, 1
        yield vllm_names.REQUEST_SUCCESS, vllm | {"finished_reason": reason}, 1
    yield n.LOOPS, where, account.num_loops
    for outcome, number in record.tool_calls.items():
        yield n.TOOL_CALLS, {"outcome": str(outcome)}, number
    yield n.CACHED_PROMPT_TOKENS, where, record.cached_tokens
    yield vllm_names.CACHED_TOKENS, vllm, record.cached_tokens
    if record.read_again_reason is not None:
        reason = {"reason": str(record.read_again_reason)}
        yield n.READ_AGAIN_TOKENS, reason, record.read_again_tokens
        yield n.READ_AGAIN_SECONDS, reason, seconds(record.read_again_ns)
    yield n.GENERATION_TOKENS, where, record.completion_tokens - account.num_continued_tokens
    yield vllm_names.GENERATION_TOKENS, vllm, record.completion_tokens - account.num_continued_tokens
