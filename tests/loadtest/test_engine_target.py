"""The engine in process as target, with a small random model. Samples must agree with the engine's own stamps."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import LlamaConfig

from loadtest.arrivals import Arrivals
from loadtest.engine_target import EngineRun, EngineTarget, load_engine, submit_arrivals
from loadtest.errors import UsageError
from loadtest.measure import measure
from loadtest.prompts import Workload
from loadtest.sample import Sample
from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import StartupError
from oaiserve.facts.times import TEXT_PHASES
from tests.engine.model.runners import eager_runner
from tests.models.decoders import SMALL, byte_tokenizer, random_model


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    loaded = prepare(random_model(LlamaConfig(**(SMALL | {"vocab_size": 300}))))
    engine = Engine(
        ServedModel(
            tokenizer=Tokenizer(byte_tokenizer()),
            runner=eager_runner(loaded, num_blocks=200, block_size=4),
            num_blocks=200,
            max_model_len=64,
            vocab_size=loaded.vocab_size,
            eos_token_ids=frozenset(range(0, 300, 2)),
        ),
        EngineOptions(block_size=4),
    )
    with engine:
        yield engine


def run(
    engine: Engine, arrivals: Arrivals | None = None, workload: dict[str, Any] | None = None, **options: Any
) -> list[Sample]:
    description = {"num_requests": 6, "prompt": "ab", "prompt_repeats": 5, "max_new_tokens": "7", "stop_on_eos": False}
    target = EngineTarget(engine, Workload(**(description | (workload or {}))), EngineRun(**options))
    samples, offsets, _ = target.run(arrivals or Arrivals(arrival="at-once"), seed=0)
    assert len(samples) == len(offsets)
    return samples


def test_samples_agree_with_the_stamps_of_the_engine(engine: Engine) -> None:
    samples = run(engine, workload={"unique_prompts": True})
    metrics = measure(samples)
    assert (metrics["num_ok"], metrics["completion_tokens"], metrics["num_wrong_length"]) == (6, 42, 0)
    assert metrics["prompt_tokens"] == sum(len(f"0-{i}: " + "ab" * 5) for i in range(6))
    assert metrics["distributions"]["submit"]["n"] == 6
    for sample in samples:
        assert list(sample.phases_ns) == list(TEXT_PHASES[:-1])
        assert 1 <= len(sample.event_ns) <= 7  # a token that ends within a character has no text yet
        # The engine stamps a token before it delivers it, and stamps `received` after `sent_ns` was stamped.
        assert sample.sent_ns + sum(sample.phases_ns[name] for name in TEXT_PHASES[:5]) <= sample.event_ns[0]
        assert sample.event_ns[-1] <= sample.end_ns


def test_an_event_has_as_many_tokens_as_the_stream_interval(engine: Engine) -> None:
    samples = run(engine, stream_interval=3)
    assert all(len(sample.event_ns) <= 3 for sample in samples)  # 1 + 3 + 3 tokens
    assert all(sample.completion_tokens == 7 for sample in samples)


def test_offline_answers_are_single_events(engine: Engine) -> None:
    samples = run(engine, mode="offline")
    assert [len(sample.event_ns) for sample in samples] == [1] * 6
    assert measure(samples)["distributions"]["tpot"] is None


def test_pretok_submits_the_same_number_of_tokens(engine: Engine) -> None:
    plain, ready = run(engine), run(engine, pretok=True)
    assert [s.prompt_tokens for s in plain] == [s.prompt_tokens for s in ready]


def test_answers_may_end_early_with_stop_on_eos(engine: Engine) -> None:
    samples = run(engine, workload={"stop_on_eos": True, "max_new_tokens": "40"})
    assert all((s.completion_tokens or 0) < 40 for s in samples)
    assert measure(samples)["num_wrong_length"] == 0


def test_submits_are_due_at_fixed_times_or_one_interval_after_the_last_one_returned(engine: Engine) -> None:
    options = EngineRun(submit_interval_ms=5)
    arrivals = submit_arrivals(Arrivals(), options)
    absolute = [sample.intended_ns for sample in run(engine, arrivals, submit_interval_ms=5)]
    assert {b - a for a, b in itertools.pairwise(absolute)} == {5_000_000}
    relative = run(engine, arrivals, submit_interval_ms=5, submit_schedule="relative")
    for before, after in itertools.pairwise(relative):
        assert after.intended_ns == before.sent_ns + (before.submit_ns or 0) + 5_000_000


def test_the_submit_interval_and_the_mode_override_the_arrivals() -> None:
    poisson = Arrivals(arrival="poisson", rate=3)
    assert submit_arrivals(Arrivals(), EngineRun()).arrival == "at-once"
    assert submit_arrivals(poisson, EngineRun()) == poisson
    assert submit_arrivals(poisson, EngineRun(mode="offline")).arrival == "at-once"
    assert submit_arrivals(Arrivals(), EngineRun(submit_interval_ms=2)).rate == 500


def test_a_prompt_that_the_engine_refuses_is_recorded_as_an_error(engine: Engine) -> None:
    samples = run(engine, workload={"prompt_repeats": 100})
    assert {sample.error for sample in samples} == {"ContextLengthExceeded"}


def test_workloads_that_need_a_server_are_refused_in_process(engine: Engine) -> None:
    with pytest.raises(UsageError, match="need a server"):
        EngineTarget(engine, Workload(turns=2), EngineRun())


def test_the_engine_gets_the_options_and_its_refusal_is_reported_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: str, options: EngineOptions) -> None:
        assert (model, options.cuda_graph, options.device) == ("a-model", False, "cpu")
        raise StartupError("--no-compile is not for this.")

    monkeypatch.setattr(Engine, "from_pretrained", refuse)
    with pytest.raises(UsageError, match="--no-compile is not for this."):
        load_engine("a-model", EngineRun(cuda_graph=False, device="cpu"))
