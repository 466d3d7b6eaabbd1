"""A start on a GPU switches off what fails there, with one warning, and the answers stay those of the plain ways."""

import importlib
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

from oaiserve.checkpoints.source import find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.engine import Engine
from oaiserve.engine.engine_parts import EngineParts
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model import device as choosing
from oaiserve.engine.model import layer_operations
from oaiserve.engine.model.sampling.sampled_ids import SampledIds
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequences.draw_columns import DrawRow
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.described import Described, describe_model
from oaiserve.engine.start.options import refuse_unless_possible
from oaiserve.engine.start.plan import start_model
from oaiserve.engine.start.request import Declined, StartRequest
from oaiserve.engine.start.start_times import StartTimes
from oaiserve.engine.start.started import assemble
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import StartupError
from oaiserve.plugin_loading import ways_of
from oaiserve.plugins.cuda import plugin
from oaiserve.plugins.cuda.executor.cuda_capture import Run
from oaiserve.plugins.cuda.executor.executor import CudaWeights
from oaiserve.plugins.cuda.executor.kernels import Kernels
from oaiserve.plugins.cuda.executor.step_graphs import StepGraphs
from oaiserve.plugins.cuda.start import child, probe
from oaiserve.plugins.cuda.start import on_gpu as start_on_gpu
from oaiserve.plugins.cuda.start.child import Order
from oaiserve.plugins.cuda.start.features import BY_TORCH, FEATURES, Probed, Verdict, all_off, by_options
from oaiserve.plugins.cuda.start.memory import scale_for, with_measured_scales
from oaiserve.plugins.cuda.start.on_gpu import Placed
from oaiserve.plugins.cuda.way import OnGpu
from oaiserve.runtime import THREADS
from tests.engine.doubles import new_world
from tests.engine.executors.native.small_models import STATE_FAMILIES, make_model
from tests.engine.model.runners import eager_runner, greedy, make_engine
from tests.engine.remembered import save
from tests.models.decoders import byte_tokenizer
from tests.models.described import SmallModel, described
from tests.models.pinned import pinned_model
from tests.plugins.cuda.executor.step_runs import PlainSampler, padded_attention

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


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError(NO_COMPILER)


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
def started(placed: Placed, verdict: Verdict | None = None, runtime: Any = None, **settings: Any) -> Iterator[Engine]:
    options = EngineOptions(block_size=BLOCK_SIZE, max_running=2, max_step_tokens=16, **settings)
    made = start_on_gpu.start_on_gpu(placed, options, Probed(verdict or by_options(options)))
    runtime = runtime or new_world()
    served = assemble(made, Tokenizer(byte_tokenizer()), options, runtime)
    with Engine(EngineParts.of(served, options, runtime=runtime)) as engine:
        yield engine


def answers(engine: Engine) -> list[list[int]]:
    prompts = [[5, 9, 3, 17], [7] * 9]
    drawn = SamplingParams(max_tokens=6, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True)
    return [choice.token_ids for params in (greedy(6), drawn) for choice in engine.generate(prompts, params)]


ON = frozenset(FEATURES)
BY_KERNELS = ON - {*BY_TORCH}


def on(engine: Engine) -> set[str]:
    """Return the fast paths that are on. Each of the others has a reason."""
    assert engine.features.keys() == {*FEATURES, "exact", "drafts"}
    return {name for name in FEATURES if not engine.features[name]}


def test_features_that_a_verdict_rules_out_are_off_and_the_answers_are_right(
    device: FakeGpu, loaded: SmallModel, placed: Placed
) -> None:
    found = []
    for verdict in (
        all_off("it is broken"),
        {**dict.fromkeys(FEATURES, ""), "graphs": "a replay was wrong"},
        dict.fromkeys(FEATURES, ""),
    ):
        with started(placed, verdict) as engine:
            assert on(engine) == {name for name, reason in verdict.items() if not reason}
            found.append(answers(engine))
    with make_engine(loaded, eager_runner(loaded, num_blocks=NUM_BLOCKS, block_size=16)) as plain:
        assert found == [answers(plain)] * 3


def test_graphs_that_cannot_be_captured_are_off_with_one_warning(
    device: FakeGpu, placed: Placed, caplog: pytest.LogCaptureFixture
) -> None:
    """Though a probe could capture them, as when there is less memory."""
    device.set(device, "capture", broken)
    with caplog.at_level(logging.WARNING), started(placed) as engine:
        assert on(engine) == ON - {"graphs"}
        assert answers(engine)
    (message,) = caplog.messages
    assert re.match(f"CUDA graphs: off, .*: RuntimeError: {re.escape(NO_COMPILER)}", message)


def test_graphs_can_be_switched_off(device: FakeGpu, placed: Placed) -> None:
    with started(placed, cuda_graph=False) as engine:
        assert on(engine) == ON - {"graphs"}
        assert engine.features["graphs"] == "--no-cuda-graph"


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

    def run(order: Order, *_: Any) -> tuple[int, str, Probed | None]:
        founds: list[Probed] = []
        try:
            model = probe.describe_model(find_model(order.model), order.options, torch.device("cpu"))
            problem = probe.first_difference(model, order.options, order.verdict, founds.append)
        except RuntimeError as error:
            problem = str(error)
        return int(bool(problem)), problem or "", founds[-1] if founds else None

    device.set(start_on_gpu, "select_device", lambda name: torch.device("cpu"))
    device.set(start_on_gpu, "describe_model", described)
    device.set(probe, "describe_model", described)
    device.set(child, "_run", run)
    device.set(probe, "CudaCapture", lambda device_: device.capture)
    device.set(torch.cuda, "get_device_name", lambda device: "a double")

    def start(folder: Path, **settings: Any) -> ServedModel:
        options = EngineOptions(block_size=BLOCK_SIZE, max_running=2, max_step_tokens=16, dtype="float32", **settings)
        return OnGpu().start(StartRequest(find_model(folder), options, new_world()))

    return start


@pytest.mark.parametrize("settings", [{}, {"compile": False}], ids=["kernels", "--no-compile"])
def test_a_model_starts_from_its_files(
    settings: dict[str, Any], from_files: Callable[..., ServedModel], loaded: SmallModel, tmp_path: Path
) -> None:
    save(loaded.model, tmp_path)
    served = from_files(tmp_path, **settings)
    is_plain = isinstance(served.runner.executor, ReferenceExecutor)
    assert is_plain == (settings == {"compile": False})
    assert {name for name, reason in served.features.items() if not reason} == (set() if is_plain else BY_KERNELS)
    if is_plain:
        assert set(served.features.values()) == {"--no-compile"}
    options = EngineOptions(block_size=BLOCK_SIZE, max_running=2, max_step_tokens=16)
    with Engine(EngineParts.of(served, options, runtime=new_world())) as engine:
        found = answers(engine)
    with make_engine(loaded, eager_runner(loaded, num_blocks=NUM_BLOCKS, block_size=16)) as plain_engine:
        assert found == answers(plain_engine)


def test_a_server_with_the_plugin_starts_a_model_on_the_gpu_that_torch_sees(
    from_files: Callable[..., ServedModel], device: FakeGpu, loaded: SmallModel, tmp_path: Path
) -> None:
    save(loaded.model, tmp_path)
    device.set(choosing, "select_device", lambda name: torch.device("cuda"))
    options = EngineOptions(block_size=BLOCK_SIZE, max_running=2, max_step_tokens=16, dtype="float32")
    served = start_model(tmp_path, options, StartTimes(), lambda: None, new_world(), ways=lambda: ways_of([plugin]))
    assert {name for name in FEATURES if not served.features[name]} == BY_KERNELS


class WrongSampler(PlainSampler):
    def sample_ids(self, logits: torch.Tensor, rows: list[DrawRow], edits: Any = None) -> SampledIds:
        return logits.argmin(-1), logits.isfinite()[:, 0]


def without_work(run: Run) -> Run:
    run()
    return lambda: None


WRONG_LAYERS = SimpleNamespace(add_and_norm=lambda hidden, *_: (hidden, hidden), activate=layer_operations.activate)


@pytest.mark.parametrize(
    ("fail", "off", "reason"),
    [
        (lambda device: device.use(attention=broken), {"kernels", "graphs"}, NO_COMPILER),
        (lambda device: device.use(sampling=WrongSampler()), {"kernels", "graphs"}, "other tokens would be drawn"),
        (lambda device: device.use(operations=WRONG_LAYERS), {"kernels", "graphs"}, "the outputs would differ"),
        (lambda device: device.set(start_on_gpu, "triton_kernels", broken), {"kernels", "graphs"}, NO_COMPILER),
        (lambda device: device.set(device, "capture", without_work), {"graphs"}, "in graphs"),
    ],
    ids=["attention", "sampling", "wrong layers", "broken kernels", "graphs"],
)
def test_what_a_probe_finds_is_off_with_one_warning(
    from_files: Callable[..., ServedModel],
    device: FakeGpu,
    loaded: SmallModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fail: Callable[[FakeGpu], None],
    off: set[str],
    reason: str,
) -> None:
    save(loaded.model, tmp_path)
    fail(device)
    with caplog.at_level(logging.WARNING):
        served = from_files(tmp_path)
    found = {name: why for name, why in served.features.items() if name not in BY_TORCH}
    assert {name for name, why in found.items() if why} == off
    assert all(reason in why for why in found.values() if why)
    (message,) = caplog.messages
    assert message.startswith("Triton's kernels: off, and " if "kernels" in off else "CUDA graphs: off, and ")
    assert reason in message


@pytest.mark.parametrize(
    ("field", "module", "kernel", "part"),
    [
        ("attention", "triton_attention", "write_kernel", "attention"),
        ("operations", "triton_layers", "add_and_norm_kernel", "norms and activations"),
    ],
)
def test_plain_torch_computes_in_place_of_a_kernel_that_does_not_fit(
    from_files: Callable[..., ServedModel],
    device: FakeGpu,
    loaded: SmallModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    field: str,
    module: str,
    kernel: str,
    part: str,
) -> None:
    from tests.plugins.cuda.start.test_fitting import REASON, Unfit

    launching = importlib.import_module(f"oaiserve.plugins.cuda.executor.{module}")
    device.use(**{field: launching.TritonAttention if field == "attention" else launching})
    device.set(launching, kernel, Unfit())
    save(loaded.model, tmp_path)
    with caplog.at_level(logging.WARNING):
        served = from_files(tmp_path)
    assert {name for name, reason in served.features.items() if not reason} >= {"kernels"}
    assert served.features["graphs"] == f"plain torch computes {part}"
    assert all(part in message and REASON in message for message in caplog.messages)
    options = EngineOptions(block_size=BLOCK_SIZE, max_running=2, max_step_tokens=16)
    with Engine(EngineParts.of(served, options, runtime=new_world())) as engine:
        found = answers(engine)
    with make_engine(loaded, eager_runner(loaded, num_blocks=NUM_BLOCKS, block_size=16)) as plain_engine:
        assert found == answers(plain_engine)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3_text", "bamba"])
def test_a_probe_has_each_kind_of_layer(name: str, device: FakeGpu, tmp_path: Path) -> None:
    pinned_model(name).save_pretrained(tmp_path)
    model = describe_model(find_model(tmp_path), EngineOptions(compile=False))
    few = probe.first_layers(model)
    layers = map(probe.with_fixed_choices, model.decoder.layers)
    assert {*map(probe.kind_of, few.decoder.layers)} == {*map(probe.kind_of, layers)}
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
    with started(placed, runtime=THREADS, cuda_graph=False) as engine:
        assert threads
        assert set(threads) == {"engine"}
        assert engine.is_ready


def test_a_warm_up_that_fails_ends_the_engine(loaded: SmallModel) -> None:
    failures: list[BaseException] = []

    def note(error: BaseException) -> bool:
        failures.append(error)
        return True

    parts = EngineParts.of(
        ServedModel(
            tokenizer=Tokenizer(byte_tokenizer()),
            runner=SimpleNamespace(is_asynchronous=False, is_exact=True),
            num_blocks=1,
            max_model_len=4,
            vocab_size=97,
            warm_up=broken,
            failed=note,
        ),
        runtime=new_world(),
    )
    engine = Engine(parts)
    engine.start()
    assert NO_COMPILER in str(engine.failure)
    assert failures == [engine.failure]
    assert not engine.is_ready
    engine.stop()
