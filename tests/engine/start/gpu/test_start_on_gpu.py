"""A start on a GPU switches off what fails there, with one warning, and the answers stay those of the plain ways."""

import logging
import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.engine import Engine
from oaiserve.engine.executors.cuda.executor import CudaWeights
from oaiserve.engine.executors.cuda.kernels import Kernels, PlainAttention, triton_kernels
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.executors.reference.products import Products
from oaiserve.engine.model import layer_operations
from oaiserve.engine.model.attention import Scoring
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.gpu.cuda_capture import Run
from oaiserve.engine.model.gpu.device_matrices import PackedMatrix, expanded_product
from oaiserve.engine.model.gpu.step_graphs import StepGraphs
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.sampling.draw_rows import DrawRow, SampledIds
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.compare import Difference
from oaiserve.engine.start.described import Described, describe_model
from oaiserve.engine.start.gpu import probe, usable
from oaiserve.engine.start.gpu.child import Order
from oaiserve.engine.start.gpu.kernels import adapters_problem, logits_problem, sampling_problem
from oaiserve.engine.start.gpu.memory import scale_for, with_measured_scales
from oaiserve.engine.start.gpu.trials import FEATURES, Trials, Verdict
from oaiserve.engine.start.options import refuse_unless_possible
from oaiserve.engine.start.request import Declined, StartRequest
from oaiserve.engine.start.started import assemble
from oaiserve.engine.start.ways import gpu as start_on_gpu
from oaiserve.engine.start.ways.gpu import OnGpu, Placed
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import StartupError
from oaiserve.files.source import find_model
from tests.engine.model.cpu.small_models import STATE_FAMILIES, make_model
from tests.engine.model.gpu.step_runs import PlainSampler, padded_attention
from tests.engine.model.runners import eager_runner, greedy, make_engine
from tests.engine.remembered import save
from tests.models.decoders import FAMILIES, LLAMA_OF_ONE_LAYER, byte_tokenizer, random_model
from tests.models.described import SmallModel, described
from tests.models.in_blocks import written
from tests.models.packed import Packing
from tests.models.pinned import pinned_model

NUM_BLOCKS = 64
BLOCK_SIZE = 4
NO_COMPILER = "Failed to find C compiler. Please specify via CC environment variable."


def place(loaded: SmallModel) -> Placed:
    """Return a model with its weights where a GPU would have them."""
    weights = CudaWeights(loaded.decoder, dtype=loaded.dtype, device=loaded.device)
    return Placed(loaded, weights, loaded.decoder.adaptable())


@pytest.fixture(scope="module")
def placed(loaded: SmallModel) -> Placed:
    return place(loaded)


def logits_differ(placed: Placed, kernels: Kernels, block_size: int = BLOCK_SIZE) -> Difference | None:
    assert isinstance(placed.weights, CudaWeights)
    return logits_problem(placed.spec, placed.weights, kernels, block_size)


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError(NO_COMPILER)


def without_the_last_key(batch: Batch) -> PlainAttention:
    """Return attention in which decodes do not see their own token."""
    lengths = batch.seq_lens.clone()
    lengths[: batch.num_decodes] -= 1
    return PlainAttention(replace(batch, seq_lens=lengths))


# -- each check by itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_attention_that_differs_by_rounding_has_no_problem(family: str) -> None:
    def rounds(batch: Batch) -> Any:
        plain = PlainAttention(batch)
        return lambda *given: plain(*given) * (1 + 1e-5)

    assert logits_differ(place(described(random_model(FAMILIES[family]))), Kernels(rounds)) is None


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")  # from rows that are not finite
def test_triton_kernels_have_no_problem() -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")
    placed = place(described(random_model(LLAMA_OF_ONE_LAYER)))
    from oaiserve.engine.model.sampling import triton_sampling

    assert logits_differ(placed, triton_kernels(), 16) is None
    assert sampling_problem(placed.spec, triton_sampling) is None


def test_attention_that_computes_something_else_is_found(placed: Placed) -> None:
    found = str(logits_differ(placed, Kernels(without_the_last_key)))
    assert found.startswith("the outputs would differ by ")
    assert found.endswith(" (allowed: 0.1%)")


def test_attention_that_leaves_the_cache_as_it_was_is_found(placed: Placed) -> None:
    def forgets(batch: Batch) -> Any:
        def attend(query: Any, key: Any, value: Any, cache: Any, scoring: Scoring) -> torch.Tensor:
            copies = type(cache)(cache.keys.clone(), cache.values.clone())
            return PlainAttention(batch)(query, key, value, copies, scoring)

        return attend

    assert logits_differ(placed, Kernels(forgets)) is not None


def test_products_with_packed_weights_that_are_wrong_are_found(tmp_path: Path) -> None:
    written(tmp_path, Packing("awq"))
    options = EngineOptions(dtype="float32", max_model_len=128)
    found = describe_model(find_model(tmp_path), options, device=torch.device("meta"))
    weights = CudaWeights(found.decoder, dtype=torch.float32, device=torch.device("cpu"))
    assert weights.packed
    packed = Placed(replace(found.spec, device=weights.device), weights, {})

    def doubled(x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
        return 2 * expanded_product(x, matrix, bias)

    assert logits_differ(packed, Kernels()) is None
    assert logits_differ(packed, Kernels(multiply=doubled)) is not None


def test_draws_and_masks_that_are_others_are_found(loaded: SmallModel) -> None:
    class NextIds(PlainSampler):
        def sample_ids(self, logits: torch.Tensor, rows: list[DrawRow]) -> SampledIds:
            ids, are_finite = super().sample_ids(logits, rows)
            return (ids + 1) % logits.shape[1], are_finite

    class NoMasks(PlainSampler):
        def apply_masks(self, *_: object) -> None:
            pass

    assert sampling_problem(loaded, PlainSampler()) is None
    assert "of 1 draws, 1 would be others" in str(sampling_problem(loaded, NextIds()))
    assert "masks" in str(sampling_problem(loaded, NoMasks()))


def test_adapters_of_triton_have_no_problem_and_others_do(placed: Placed) -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")
    from oaiserve.engine.model.gpu.triton_adapters import TritonAdapters

    shapes = placed.adaptable
    kernels = TritonAdapters(shapes, 2, placed.spec.device)
    assert adapters_problem(placed.spec, shapes, kernels, BLOCK_SIZE) is None

    def of_the_first_alone(batch: Batch) -> Any:
        first = batch.adapters[0]
        of_first = [adapter if adapter is first else None for adapter in batch.adapters]
        return Products(replace(batch, adapters=of_first)).add_to

    kernels.of_batch = of_the_first_alone
    assert "would differ" in str(adapters_problem(placed.spec, shapes, kernels, BLOCK_SIZE))


# -- the whole start --------------------------------------------------------------------------------------------------


class FakeGpu:
    """Replaces what a start does on a GPU by the same on a CPU. Each part can be replaced once more, to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.kernels = Kernels(padded_attention, sampling=PlainSampler())
        self.set(ModelSpec, "is_on_cpu", False)
        self.set(start_on_gpu, "gpu_sizes", lambda *_, **__: (NUM_BLOCKS, 0))
        self.set(start_on_gpu, "triton_kernels", lambda: self.kernels)
        self.set(start_on_gpu, "CudaCapture", lambda device: self.capture)
        self.set(torch.cuda, "empty_cache", lambda: None)
        self.set(torch.cuda, "mem_get_info", lambda device: (1 << 30, 2 << 30))

    def use(self, **kernels: Any) -> None:
        self.kernels = self.kernels._replace(**kernels)

    def set(self, where: Any, name: str, double: Any) -> None:
        assert hasattr(where, name)
        self._patch.setattr(where, name, double)

    @staticmethod
    def capture(run: Run) -> Run:
        run()
        return run


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")
    return FakeGpu(monkeypatch)


@contextmanager
def started(placed: Placed, **settings: Any) -> Iterator[Engine]:
    options = EngineOptions(block_size=BLOCK_SIZE, max_running=2, max_step_tokens=16, **settings)
    made = start_on_gpu.start_on_gpu(placed, options, Trials())
    with Engine(assemble(made, Tokenizer(byte_tokenizer()), options), options) as engine:
        yield engine


def answers(engine: Engine) -> list[list[int]]:
    prompts = [[5, 9, 3, 17], [7] * 9]
    drawn = SamplingParams(max_tokens=6, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True)
    return [choice.token_ids for params in (greedy(6), drawn) for choice in engine.generate(prompts, params)]


ON = frozenset({"kernels", "graphs"})


def on(engine: Engine) -> set[str]:
    """Return the fast paths that are on. Each of the others has a reason."""
    assert engine.features.keys() == {*FEATURES, "exact", "drafts"}
    return {name for name in FEATURES if not engine.features[name]}


class WrongSampler(PlainSampler):
    def sample_ids(self, logits: torch.Tensor, rows: list[DrawRow]) -> SampledIds:
        return logits.argmin(-1), logits.isfinite()[:, 0]


WRONG_LAYERS = SimpleNamespace(add_and_norm=lambda hidden, *_: (hidden, hidden), activate=layer_operations.activate)


@pytest.mark.parametrize(
    ("fail", "off", "name"),
    [
        (lambda device: None, set(), None),
        (lambda device: device.use(attention=broken), {"kernels", "graphs"}, f".*{re.escape(NO_COMPILER)}"),
        (lambda device: device.use(sampling=WrongSampler()), {"kernels", "graphs"}, ".*draws"),
        (lambda device: device.use(operations=WRONG_LAYERS), {"kernels", "graphs"}, ".* the outputs would differ"),
        (lambda device: device.set(start_on_gpu, "triton_kernels", broken), {"kernels", "graphs"}, ""),
        (lambda device: device.set(device, "capture", lambda run: run() or (lambda: None)), {"graphs"}, ""),
    ],
    ids=["nothing", "attention", "sampling", "wrong layers", "broken kernels", "graphs"],
)
def test_what_fails_at_the_start_is_off_with_one_warning_and_the_answers_are_right(
    device: FakeGpu,
    loaded: SmallModel,
    placed: Placed,
    caplog: pytest.LogCaptureFixture,
    fail: Callable[[FakeGpu], None],
    off: set[str],
    name: str | None,
) -> None:
    fail(device)
    with caplog.at_level(logging.WARNING), started(placed) as engine:
        assert on(engine) == ON - off
        found = answers(engine)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == (name is not None), warnings
    if name is not None:
        what = "Triton's kernels" if "kernels" in off else "CUDA graphs"
        assert re.match(f"{what}: off, {name}", warnings[0])
    with make_engine(loaded, eager_runner(loaded, num_blocks=NUM_BLOCKS, block_size=16)) as plain:
        assert found == answers(plain)


def test_graphs_can_be_switched_off(device: FakeGpu, placed: Placed) -> None:
    with started(placed, cuda_graph=False) as engine:
        assert on(engine) == {"kernels"}
        assert engine.features["graphs"] == "--no-cuda-graph"


def test_without_triton_a_model_starts_in_plain_torch(
    device: FakeGpu, placed: Placed, caplog: pytest.LogCaptureFixture
) -> None:
    device.set(start_on_gpu, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING), started(placed) as engine:
        assert not on(engine)
        assert engine.features["kernels"] == "Triton is not installed"
        assert answers(engine)
    assert not caplog.messages


def test_kernels_whose_adapters_are_wrong_are_off(
    device: FakeGpu, placed: Placed, caplog: pytest.LogCaptureFixture
) -> None:
    from oaiserve.engine.model.gpu.triton_adapters import Addition

    device.set(Addition, "__call__", lambda *_: None)
    with caplog.at_level(logging.WARNING), started(placed, lora_dir=Path("unread")) as engine:
        assert not on(engine)
    (message,) = caplog.messages
    assert re.match(r"Triton's kernels: off, .*: products of '.*' would differ by 100", message)


@pytest.mark.parametrize("is_right", [True, False])
def test_decodes_with_adapters_are_captured_only_if_they_compute_the_same(device: FakeGpu, is_right: bool) -> None:
    from oaiserve.engine.model.gpu.triton_adapters import TritonAdapters

    if not is_right:
        device.set(TritonAdapters, "upload", lambda *_: None)
    with started(place(described(random_model(LLAMA_OF_ONE_LAYER))), lora_dir=Path("unread")) as engine:
        assert on(engine) == {"kernels", *["graphs"] * is_right}
        assert is_right or "with adapters would differ" in engine.features["graphs"]


def test_decodes_of_a_model_with_states_are_replayed(device: FakeGpu) -> None:
    hybrid = place(described(make_model(STATE_FAMILIES["bamba"])))
    device.set(start_on_gpu, "gpu_sizes", lambda *_, **__: (NUM_BLOCKS, 4))
    replay = Mock(wraps=StepGraphs.launch)
    device.set(StepGraphs, "launch", lambda *given, **named: replay(*given, **named))
    with started(hybrid) as engine:
        assert on(engine) == ON
        replay.reset_mock()
        found = answers(engine)
        assert replay.call_count > 8
    with started(hybrid, cuda_graph=False) as engine:
        assert found == answers(engine)


def test_a_cache_in_eight_bits_has_the_scales_that_a_prompt_needs(device: FakeGpu, placed: Placed) -> None:
    in_eight_bits = Placed(placed.spec.with_cache("fp8"), placed.weights, placed.adaptable)
    assert 2 * in_eight_bits.spec.kv_bytes_per_token <= placed.spec.kv_bytes_per_token
    assert isinstance(placed.weights, CudaWeights)
    measured = with_measured_scales(in_eight_bits.spec, placed.weights, BLOCK_SIZE)
    assert all(shape.scales is not None and max(shape.scales) < 1 for shape in measured.kv_shapes.values())
    assert [scale_for(largest) for largest in (112.0, 113.0, 7.0, 0.0, math.inf)] == [1.0, 2.0, 0.0625, 1.0, 1.0]
    with started(in_eight_bits, kv_cache_dtype="fp8") as engine:
        assert on(engine) == ON
        found = answers(engine)
    with started(in_eight_bits, kv_cache_dtype="fp8", cuda_graph=False) as engine:
        assert found == answers(engine)


@pytest.fixture
def from_files(device: FakeGpu) -> Callable[..., ServedModel]:
    """Return a function that starts a model from its files on the double of a GPU."""

    def described(source: Any, options: EngineOptions, device: torch.device) -> Described:
        return describe_model(source, replace(options, compile=False), device=device)

    def probed(order: Order) -> Verdict:
        trials = Trials()
        probe.probe(order, trials)
        device.set(start_on_gpu, "kernels_problem", pytest.fail)  # only probes may call it
        return trials.results

    device.set(start_on_gpu, "select_device", lambda name: torch.device("cpu"))
    device.set(start_on_gpu, "describe_model", described)
    device.set(probe, "describe_model", described)
    device.set(usable, "probed", probed)
    device.set(torch.cuda, "get_device_name", lambda device: "a double")

    def start(folder: Path, **settings: Any) -> ServedModel:
        options = EngineOptions(block_size=BLOCK_SIZE, max_running=2, max_step_tokens=16, dtype="float32", **settings)
        return OnGpu().start(StartRequest(find_model(folder), options))

    return start


@pytest.mark.parametrize("settings", [{}, {"compile": False}], ids=["kernels", "--no-compile"])
def test_a_model_starts_from_its_files(
    settings: dict[str, Any], from_files: Callable[..., ServedModel], loaded: SmallModel, tmp_path: Path
) -> None:
    save(loaded.model, tmp_path)
    served = from_files(tmp_path, **settings)
    is_plain = isinstance(served.runner._executor, ReferenceExecutor)
    assert is_plain == (settings == {"compile": False})
    assert {name for name, reason in served.features.items() if not reason} == (set() if is_plain else ON)
    if is_plain:
        assert set(served.features.values()) == {"--no-compile"}
    with Engine(served, EngineOptions(block_size=BLOCK_SIZE, max_running=2, max_step_tokens=16)) as engine:
        found = answers(engine)
    with make_engine(loaded, eager_runner(loaded, num_blocks=NUM_BLOCKS, block_size=16)) as plain_engine:
        assert found == answers(plain_engine)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3_text", "bamba"])
def test_a_probe_has_each_kind_of_layer(name: str, device: FakeGpu, tmp_path: Path) -> None:
    pinned_model(name).save_pretrained(tmp_path)
    model = describe_model(find_model(tmp_path), EngineOptions(compile=False))
    few = probe.first_layers(model)
    assert {*map(probe.kind_of, few.decoder.layers)} == {*map(probe.kind_of, model.decoder.layers)}
    assert len(few.decoder.layers) == 2 < len(model.decoder.layers)
    assert {*few.spec.kv_shapes, *few.spec.state_shapes} == {0, 1}


def test_a_model_without_a_description_is_declined(
    from_files: Callable[..., ServedModel], loaded: SmallModel, tmp_path: Path
) -> None:
    save(loaded.model, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"nanochat"'))
    with pytest.raises(Declined, match="models of type 'nanochat' have no description"):
        from_files(tmp_path)


@pytest.mark.parametrize("flag", ["--exact", "--quantize int8"])
def test_flags_of_cpus_are_refused(flag: str, placed: Placed) -> None:
    spec = replace(placed.spec, device=torch.device("meta"))
    options = EngineOptions(exact=True) if flag == "--exact" else EngineOptions(quantize="int8")
    with pytest.raises(StartupError, match=f"^{flag} is for --device cpu; the model is on meta"):
        refuse_unless_possible(spec, options, {})


def test_the_engines_thread_warms_up_before_the_first_request(device: FakeGpu, placed: Placed) -> None:
    threads: list[str] = []
    launch = ModelRunner.launch

    def noting(runner: Any, step: Any) -> Any:
        threads.append(threading.current_thread().name)
        return launch(runner, step)

    device.set(ModelRunner, "launch", noting)
    with started(placed, cuda_graph=False) as engine:
        assert threads
        assert set(threads) == {"engine"}
        assert engine.is_ready


def test_a_warm_up_that_fails_ends_the_engine(loaded: SmallModel) -> None:
    failures: list[BaseException] = []

    def note(error: BaseException) -> bool:
        failures.append(error)
        return True

    engine = Engine(
        ServedModel(
            tokenizer=Tokenizer(byte_tokenizer()),
            runner=SimpleNamespace(is_asynchronous=False, is_exact=True),
            num_blocks=1,
            max_model_len=4,
            vocab_size=97,
            warm_up=broken,
            failed=note,
        )
    )
    engine.start()
    assert NO_COMPILER in str(engine.failure)
    assert failures == [engine.failure]
    assert not engine.is_ready
    engine.stop()
