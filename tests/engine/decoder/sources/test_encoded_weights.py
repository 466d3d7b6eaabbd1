"""A checkpoint that is quantized when it is loaded gives transformers' logits with the weights that this makes."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from oaiserve.checkpoints.checkpoint import Checkpoint
from oaiserve.checkpoints.source import find_model
from oaiserve.config import Bytes
from oaiserve.engine.decoder.sources.encoded_weights import EncodedWeights
from oaiserve.engine.executors.native.encoder import Encoder
from oaiserve.engine.executors.native.library import Library
from oaiserve.engine.start.compare import difference
from oaiserve.engine.start.described import describe_model
from oaiserve.engine.start.start_record import recall_start
from oaiserve.errors import StartupError
from oaiserve.storage.start_cache import Subject
from tests.engine.doubles import SimulatedEngine
from tests.engine.executors.native.small_models import EMULATED_AMX, compiled_for, config, make_model
from tests.engine.remembered import answer, save
from tests.models.in_blocks import OPTIONS, SIZES, kept_logits, own_logits, round_inputs, written
from tests.models.packed import Packing
from tests.models.small_configs import config_of
from tests.models.small_sizes import HEADS_FOR_EACH

INT4 = replace(OPTIONS, quantize="int4")
# Layers whose heads differ, and tensors that are no parameters: the factors of layers.
GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "sliding_window": 6,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
}
# More layers than are compared, the last of which take the keys and values of others.
SHARED = {
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 3,
    "num_hidden_layers": 9,
    "num_kv_shared_layers": 4,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 200,
}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True}),
    "sorted by head": ("persimmon", HEADS_FOR_EACH),
    "gemma4": ("gemma4_text", {"tie_word_embeddings": True, **GEMMA4}),
    "gemma4, shared caches": (
        "gemma4_text",
        {"tie_word_embeddings": True, **SHARED, "global_head_dim": 64, "use_double_wide_mlp": True},
    ),
}


def saved(folder: Path, family: str = "llama", **changes: object) -> PreTrainedModel:
    model = make_model(config(family, **SIZES | changes))
    save(model, folder)
    return model


def with_quantized_weights(model: PreTrainedModel, folder: Path, *, in_4_bits: bool = True) -> PreTrainedModel:
    """Give the model the weights that the native step will have, and its matrices what they read there."""
    weights = EncodedWeights(Checkpoint(folder), Encoder(Library(torch.float32), 1), in_4_bits=in_4_bits)
    quantized = set()
    for name in weights.names():
        if (blocks := weights.blocks(name)) is not None:
            parameter = model.get_parameter(name)
            parameter.data = blocks.expand()
            quantized.add(id(parameter))
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and id(module.weight) in quantized:
            round_inputs(module)
    return model


def effect_of_noise(model: PreTrainedModel, num_tokens: int) -> float:
    """The largest difference between the model's logits with and without noise as small as float32's rounding.

    Each CPU adds in another order. An input between two integers of its 8 bits is then rounded up on one and down on
    another, and many layers, or activations that cut at a threshold, carry that on into the logits.
    """

    expected = own_logits(model, num_tokens)
    random = torch.Generator().manual_seed(0)

    def add_noise(_module: torch.nn.Module, _inputs: object, embedded: torch.Tensor) -> torch.Tensor:
        return embedded * (1 + 2e-6 * torch.randn(embedded.shape, generator=random))

    hook = model.get_input_embeddings().register_forward_hook(add_noise)
    effects = [difference(own_logits(model, num_tokens), expected) for _ in range(12)]
    hook.remove()
    return max(effects)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("family", "last", "embedding"),
    [
        ("llama", "down_proj", "embed_tokens"),
        ("gpt_neox", "dense_4h_to_h", "embed_in"),
        ("phi", "fc2", "embed_tokens"),
        ("starcoder2", "c_proj", "embed_tokens"),
        ("gpt_bigcode", "c_proj", "wte"),
        ("lfm2", "w2", "embed_tokens"),
        ("mamba2", None, "embeddings"),
    ],
)
def test_last_matrices_of_layers_and_embeddings_have_more_than_4_bits(
    family: str, last: str | None, embedding: str, tmp_path: Path
) -> None:
    saved(tmp_path, family, **({"num_heads": 8, "head_dim": 16, "n_groups": 1} if family == "mamba2" else {}))
    weights = EncodedWeights(Checkpoint(tmp_path), Encoder(Library(torch.float32), 1), in_4_bits=True)
    bits: dict[str, set[float]] = {}
    for name in weights.names():
        if (blocks := weights.blocks(name)) is not None:
            bits.setdefault(name.split(".")[-2], set()).add(8 * blocks.nbytes / prod(blocks.shape))
    assert bits[embedding] == {8.5}
    assert last is None or max(bits[last]) == 6
    assert 4.5 in set.union(*bits.values())


@pytest.fixture(params=["native", pytest.param(EMULATED_AMX, marks=pytest.mark.kernels)])
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compute with the code for this CPU, and with that for AMX, which rounds some inputs otherwise."""
    with compiled_for(request.param):
        yield


@pytest.mark.usefixtures("instructions")
@pytest.mark.compiler
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers_with_quantized_weights(
    case: str, quantize: Literal["int8", "int4"], tmp_path: Path
) -> None:
    family, changes = CASES[case]
    model = saved(tmp_path, family, **changes)
    whole = own_logits(model, 20)
    expected = own_logits(with_quantized_weights(model, tmp_path, in_4_bits=quantize == "int4"), 20)
    logits = kept_logits(tmp_path, 20, quantize=quantize)
    bound = max(0.02, 2 * effect_of_noise(model, 20))
    assert difference(logits, expected) < bound
    assert difference(logits, whole) > (bound if quantize == "int4" else 1e-4)


@pytest.mark.compiler
def test_what_a_start_has_quantized_is_there_for_later_ones(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, changes = CASES["gemma4, shared caches"]
    saved(tmp_path / "model", family, **changes)
    in_memory = answer(tmp_path / "model", INT4, quantized_cache=Bytes(0))
    assert not (empty_cache / "quantized").exists()
    assert answer(tmp_path / "model", INT4) == in_memory
    (file,) = (empty_cache / "quantized").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "__call__", None)
        assert answer(tmp_path / "model", INT4) == in_memory
    file.write_bytes(bytes(file.stat().st_size))  # weights that are all zero
    assert answer(tmp_path / "model", INT4) == in_memory
    (again,) = (empty_cache / "quantized").iterdir()
    assert any(again.read_bytes())


@pytest.mark.compiler
@pytest.mark.parametrize(
    "reason", ["--quantized-cache allows", "the disk has 0.0 GB free; they", "other users can write"]
)
def test_weights_that_cannot_be_stored_are_quantized_at_each_start(
    reason: str, tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path / "model")
    most_bytes = Bytes(1000 if "allows" in reason else 2**30)
    (empty_cache / "quantized").mkdir(mode=0o700)
    if "disk" in reason:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    elif "users" in reason:
        (empty_cache / "quantized").chmod(0o777)
    expected = answer(tmp_path / "model", INT4, quantized_cache=Bytes(0))
    for _ in range(2):
        caplog.clear()
        assert answer(tmp_path / "model", INT4, quantized_cache=most_bytes) == expected
        (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
        assert warning.startswith("The next start quantizes the weights again, because they could not be stored: ")
        assert reason in warning
    assert list((empty_cache / "quantized").iterdir()) == []


@pytest.mark.compiler
def test_blocks_that_another_start_removes_meanwhile_are_made_again(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "model")
    before = answer(tmp_path / "model", INT4)

    def recalled_and_removed(subject: Subject) -> Path | None:
        path = recall_start(subject)
        assert path is not None
        path.unlink()
        return path

    with monkeypatch.context() as patched:
        patched.setattr("oaiserve.engine.start.ways.described.recall_start", recalled_and_removed)
        assert answer(tmp_path / "model", INT4) == before
    (path,) = (empty_cache / "quantized").iterdir()
    written_ns = path.stat().st_mtime_ns
    assert answer(tmp_path / "model", INT4) == before
    assert path.stat().st_mtime_ns == written_ns, "the file was found again"


@pytest.mark.compiler
def test_other_weights_are_quantized_anew(tmp_path: Path, empty_cache: Path) -> None:
    model = saved(tmp_path / "model")
    before = answer(tmp_path / "model", INT4)
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.up_proj.weight").normal_()
    model.save_pretrained(tmp_path / "model")
    after = answer(tmp_path / "model", INT4)
    assert before != after == answer(tmp_path / "model", INT4) == answer(tmp_path / "model", INT4, recheck=True)


def test_weights_that_are_quantized_before_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "gptq", Packing("gptq"))
    (tmp_path / "model.gguf").touch()
    for path in (tmp_path / "gptq", tmp_path / "model.gguf"):
        with pytest.raises(StartupError, match="^--quantize int4 is for weights that are not quantized yet"):
            describe_model(find_model(path), INT4)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (config("gpt2", n_embd=64, n_layer=2, n_head=4, n_positions=128), "the matrices of this family are transposed"),
        (config_of("apertus"), "models of type 'apertus' have no description"),
        (config_of("gemma3n_text"), "it has several hidden states of a token"),
    ],
    ids=["transposed", "without a description", "without native code"],
)
def test_families_whose_weights_cannot_be_quantized_are_refused(
    asked: PreTrainedConfig, reason: str, tmp_path: Path
) -> None:
    save(make_model(asked), tmp_path)
    says = f"--quantize int4 needs the native step, which cannot be used: {reason}"
    with pytest.raises(StartupError, match=says), SimulatedEngine.from_pretrained(tmp_path, INT4):
        pass


def test_quantizing_without_a_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(StartupError, match="--quantize int4 needs the native step, which cannot be used: the compiler"):
        SimulatedEngine.from_pretrained(tmp_path, INT4).__enter__()
