"""The engine in process as target, with scripted steps. Samples must agree with the engine's own stamps."""

import gc
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.arrivals import Arrivals
from loadtest.client_health import ProcessHealth
from loadtest.engine_experiment import EngineExperiment
from loadtest.engine_target import EngineResult, EngineRun, EngineTarget, engine_facts, load_engine
from loadtest.errors import UsageError
from loadtest.experiment import describe_run
from loadtest.measure import measure
from loadtest.prompts import Workload
from oaiserve.config import EngineOptions, OptionError
from oaiserve.engine.engine import Engine
from oaiserve.engine.request import TERMINAL, ChatPrompt, Deliver, Event, Prompt, Request, Terminal, TextPrompt
from oaiserve.engine.start.request import ON_GPU
from oaiserve.errors import DeviceLost, InvalidRequest, StartupError
from oaiserve.facts.times import TEXT_PHASES
from tests.engine.doubles import BlockedTokenizer, Gate, ScriptedRunner, SimulatedEngine, make_engine
from tests.loadtest import samples
from tests.missing_plugins import has_plugin

AT_ONCE = Arrivals(arrival="at-once")
WORKLOAD = Workload(num_requests=6, prompt="ab", prompt_repeats=5, max_new_tokens="7", stop_on_eos=False)
UNIQUE = replace(WORKLOAD, unique_prompts=True)


class SubmittedTo(SimulatedEngine):
    """An engine that keeps what was submitted to it and how it ended, and calls `submitted` after each submit."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.requests: list[Request] = []
        self.consumers: set[Deliver] = set()
        self.ended: dict[str, Terminal] = {}
        self.submitted: Any = lambda: None

    def submit(self, request: Request, deliver: Deliver) -> None:
        def delivered(events: list[Event]) -> None:
            self.ended |= {event.request_id: event for event in events if isinstance(event, TERMINAL)}
            deliver(events)

        self.consumers.add(deliver)
        super().submit(request, delivered)
        self.requests.append(request)
        self.submitted()


class KeepingTokenizer(BlockedTokenizer):
    """A tokenizer that keeps the texts that it encodes."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, TextPrompt):
            self.texts.append(prompt.text)
        return super().encode(prompt)


class GatedTokenizer(KeepingTokenizer):
    """A tokenizer that waits for its gate before it encodes a text."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def live_in(self, runtime: Any) -> None:
        super().live_in(runtime)
        self.gate.live_in(runtime)

    def encode(self, prompt: Prompt) -> list[int]:
        self.gate.wait()
        return super().encode(prompt)


def new_engine(**options: Any) -> Any:
    return make_engine(kind=SubmittedTo, **{"kv_blocks": 200, "max_step_tokens": 64, **options})


def run(
    engine: Any, arrivals: Arrivals = AT_ONCE, workload: Workload = WORKLOAD, seed: int = 0, **options: Any
) -> EngineResult:
    return EngineTarget(engine, workload, EngineRun(**options), engine.world).run(arrivals, seed)


def test_samples_have_the_stamps_of_spans_and_histograms() -> None:
    with new_engine() as engine:
        result = run(engine, workload=UNIQUE)
    metrics = measure(result.samples)
    assert (metrics["num_ok"], metrics["completion_tokens"], metrics["num_wrong_length"]) == (6, 42, 0)
    assert metrics["prompt_tokens"] == sum(event.usage.prompt_tokens for event in engine.ended.values())
    assert metrics["distributions"]["submit"]["n"] == 6
    for sample in result.samples:
        times = engine.ended[f"0-{sample.index}"].times
        assert sample.intended_ns <= sample.sent_ns <= times.submitted <= sample.sent_ns + sample.submit_ns
        assert list(sample.phases_ns) == list(TEXT_PHASES[:-1])
        assert sum(sample.phases_ns.values()) == times.last_token - times.received
        assert (sample.event_ns[0], sample.event_ns[-1]) == (times.first_token, times.last_token)
        assert sample.tpot_ns == times.time_per_output_token_ns(7)
        assert len(sample.event_ns) == 7
        assert sample.event_ns == sorted(sample.event_ns)
        assert sample.end_ns >= times.last_token


def test_an_answer_of_one_token_has_one_event_and_no_time_per_output_token() -> None:
    with new_engine() as engine:
        result = run(engine, workload=replace(WORKLOAD, max_new_tokens="1"))
    assert {(len(sample.event_ns), sample.tpot_ns) for sample in result.samples} == {(1, None)}


def test_an_event_has_as_many_tokens_as_the_stream_interval() -> None:
    with new_engine() as engine:
        result = run(engine, stream_interval=3)
    assert [len(sample.event_ns) for sample in result.samples] == [3] * 6  # 1 + 3 + 3 tokens
    assert all(sample.completion_tokens == 7 for sample in result.samples)


def test_offline_answers_are_single_events() -> None:
    with new_engine() as engine:
        result = run(engine, mode="offline")
    assert [len(sample.event_ns) for sample in result.samples] == [1] * 6
    assert measure(result.samples)["distributions"]["tpot"] is None


def test_with_tokenize_workers_submit_returns_before_encode_and_each_prompt_is_encoded_once() -> None:
    tokenizer = GatedTokenizer()
    with new_engine(tokenizer=tokenizer, tokenize_workers=4) as engine:
        engine.submitted = lambda: len(engine.requests) == 6 and tokenizer.gate.set()
        result = run(engine, workload=UNIQUE, tokenize_workers=4)
    assert measure(result.samples)["num_ok"] == 6
    assert len(tokenizer.texts) == len(set(tokenizer.texts)) == 6


def test_without_tokenize_workers_submit_encodes() -> None:
    tokenizer = KeepingTokenizer()
    encoded: list[int] = []
    with new_engine(tokenizer=tokenizer, tokenize_workers=0) as engine:
        engine.submitted = lambda: encoded.append(len(tokenizer.texts))
        run(engine, tokenize_workers=0)
    assert encoded == [1, 2, 3, 4, 5, 6]


def test_pretok_encodes_each_prompt_once_and_before_the_first_submit() -> None:
    tokenizer = KeepingTokenizer()
    encoded: list[int] = []
    with new_engine(tokenizer=tokenizer) as engine:
        plain = run(engine, workload=UNIQUE)
        tokenizer.texts.clear()
        engine.submitted = lambda: encoded.append(len(tokenizer.texts))
        pretok = run(engine, workload=UNIQUE, pretok=True)
    assert encoded == [6] * 6
    assert len(set(tokenizer.texts)) == 6
    assert [sample.prompt_tokens for sample in pretok.samples] == [sample.prompt_tokens for sample in plain.samples]


def test_all_events_of_a_step_are_handed_over_at_once() -> None:
    with new_engine() as engine:
        run(engine)
        assert len(engine.consumers) == 1


def test_submits_are_due_at_fixed_times_or_one_interval_after_the_last_one_returned() -> None:
    every_5_ms = Arrivals(arrival="constant", rate=200)
    with new_engine() as engine:
        absolute = run(engine, every_5_ms, submit_interval_ms=5)
        relative = run(engine, every_5_ms, submit_interval_ms=5, submit_schedule="relative")
    due_ns = [sample.intended_ns for sample in absolute.samples]
    assert {after - before for before, after in itertools.pairwise(due_ns)} == {5_000_000}
    assert absolute.offsets == [0, 0.005, 0.01, 0.015, 0.02, 0.025]
    for before, after in itertools.pairwise(relative.samples):
        assert before.submit_ns is not None
        assert after.intended_ns >= before.sent_ns + before.submit_ns + 5_000_000
        assert after.sent_ns >= after.intended_ns
    assert relative.offsets is None  # there is no fixed rate to compare with


def test_users_of_a_closed_loop_submit_after_their_last_answer() -> None:
    with new_engine() as engine:
        result = run(engine, Arrivals(concurrency=2))
    assert [sample.error for sample in result.samples] == [None] * 6
    for number, sample in enumerate(result.samples[2:], 2):
        assert sum(before.end_ns <= sample.sent_ns for before in result.samples[:number]) >= number - 1
    assert result.offsets is None


def test_a_closed_loop_ends_after_its_duration() -> None:
    with new_engine(runner=ScriptedRunner(computing=lambda _: engine.world.sleep(0.1))) as engine:
        start_ns = engine.world.now_ns
        result = run(engine, Arrivals(concurrency=1, duration_seconds=1.0))
    assert measure(result.samples)["num_ok"] == 2  # An answer of 7 tokens takes 7 steps.
    assert all(sample.sent_ns < start_ns + 10**9 for sample in result.samples)


def test_a_prompt_that_the_engine_refuses_is_an_error_with_its_message() -> None:
    with new_engine(kv_blocks=4) as engine:
        result = run(engine, workload=replace(WORKLOAD, prompt_repeats=100))
    metrics = measure(result.samples)
    assert metrics["errors"] == {"ContextLengthExceeded, before_first_token": 6}
    assert "16 tokens" in str(metrics["error_messages"])


def test_a_stopped_engine_fails_all_requests() -> None:
    engine = new_engine()
    result = run(engine)
    assert measure(result.samples)["errors"] == {"Unavailable, before_first_token": 6}


def test_a_request_of_a_file_has_its_messages_and_sampling(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "hi"}], "top_k": 3, "max_tokens": 2}\n')
    workload = Workload(requests=file, temperature=0.5)
    with new_engine() as engine:
        (sample,) = run(engine, workload=workload).samples
        file.write_text('{"prompt": "hi", "stop": "x", "n": 2}\n')
        with pytest.raises(UsageError, match="--requests has n, stop, for which --target http is needed."):
            run(engine, workload=workload)
    (request,) = engine.requests
    assert isinstance(request.prompts[0], ChatPrompt)
    assert (request.params.top_k, request.params.temperature, request.params.max_tokens) == (3, 0.5, 2)
    assert sample.error is None


def test_a_prompt_that_cannot_be_encoded_before_the_run_is_a_mistake_of_the_user() -> None:
    class Refusing(BlockedTokenizer):
        def encode(self, prompt: Prompt) -> list[int]:
            raise InvalidRequest("prompt is not for this model")

    with new_engine(tokenizer=Refusing()) as engine:  # noqa: SIM117
        with pytest.raises(UsageError, match="A prompt cannot be encoded: prompt is not for this model"):
            run(engine, pretok=True)


def test_each_run_of_a_point_has_other_prompts_and_the_warm_up_is_not_in_the_report() -> None:
    shown: list[str] = []
    with new_engine() as engine:
        options = EngineRun(warmup_runs=2)
        experiment = EngineExperiment(EngineTarget(engine, UNIQUE, options, engine.world), UNIQUE, options, {}, {})
        point = experiment.run_point(AT_ONCE, 3, "at-once", on_samples=lambda label, samples: shown.append(label))
    assert shown == ["online, at-once, 1 of 3", "online, at-once, 2 of 3", "online, at-once, 3 of 3"]
    assert [run["metrics"]["num_ok"] for run in point["runs"]] == [6] * 3
    assert len({request.prompts for request in engine.requests}) == 5 * 6
    assert (point["label"], point["verdict"]) == ("online, at-once", "valid")
    assert len(point["summary"]["submit_wall"]["values"]) == 3


def test_late_submits_and_a_busy_process_are_the_engines_own_but_a_rate_that_was_not_reached_is_a_doubt() -> None:
    late = [samples.sample([100], at=0, lag=50 * i, submit_ns=10) for i in range(20)]
    health = ProcessHealth(wall_ns=10**9, cpu_ns=2 * 10**9)
    run = describe_run(late, [health], AT_ONCE, [0.0] * 20, {}, None, is_in_process=True)
    assert run["client"]["verdict"] == "valid"
    run = describe_run(late, [health], AT_ONCE, [0.01 * i for i in range(20)], {}, None, is_in_process=True)
    assert run["client"]["reasons"] == ["requests were sent 80.0% slower than scheduled"]


def test_the_engine_gets_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Any] = []
    monkeypatch.setattr(
        Engine, "from_pretrained", lambda *args, ways: got.append((*args, [way.name for way in ways()]))
    )
    load_engine(
        "a-model",
        EngineRun(
            device="cpu", dtype="float32", max_batch_size=8, prefill_max_batch_size=4, tokenize_workers=3,
            prefix_cache=False, cuda_graph=False, nvtx=True,
        ),
    )  # fmt: skip
    assert got == [
        (
            "a-model",
            EngineOptions(
                device="cpu", dtype="float32", max_running=8, prefill_max_requests=4, tokenize_workers=3,
                prefix_cache=False, cuda_graph=False, nvtx=True, max_waiting=1_000_000,
            ),
            [ON_GPU] if has_plugin("cuda") else [],
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (OptionError("--device is wrong."), UsageError, "--device is wrong."),
        (DeviceLost("The GPU has failed."), UsageError, "The GPU has failed. Run the command again"),
        (StartupError("There is no model 'x'."), StartupError, "There is no model 'x'."),
    ],
)
def test_refusals_of_the_engine_are_for_the_user(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], sentence: str
) -> None:
    def refuse(*args: Any, **named: Any) -> None:
        raise error

    monkeypatch.setattr(Engine, "from_pretrained", refuse)
    with pytest.raises(kind, match=sentence):
        load_engine("x", EngineRun())
    assert gc.isenabled()


def test_the_facts_are_what_the_engine_has_made_of_its_options() -> None:
    engine = new_engine(device="cuda:0", dtype="float16", block_bytes=64, features={"graphs": ""})
    assert engine_facts(engine) == {
        "device": "cuda:0",
        "dtype": "float16",
        "paged_attention": "on",
        "cuda_graphs": "on",
    }
    engine = new_engine(features={"graphs": "--no-cuda-graph"})
    assert engine_facts(engine)["cuda_graphs"] == "off: --no-cuda-graph"
    assert engine_facts(engine)["paged_attention"] == "off: the model has no KV cache in blocks"
    assert engine_facts(new_engine())["cuda_graphs"] == "off: they are for a GPU"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_batch_size": 0}, "--max-batch-size is 0, but must be at least 1."),
        ({"prefill_max_batch_size": 0}, "--prefill-max-batch-size is 0, but must be at least 1."),
        ({"max_batch_size": 4, "prefill_max_batch_size": 5}, "must be at most --max-batch-size, which is 4."),
        ({"tokenize_workers": -1}, "--tokenize-workers is -1, but must be at least 0."),
        ({"submit_interval_ms": float("nan")}, "--submit-interval-ms is nan"),
        ({"stream_interval": 0}, "--stream-interval is 0"),
        ({"warmup_runs": -1}, "--warmup-runs is -1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        EngineRun(**options)
