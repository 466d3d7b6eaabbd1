"""Latent attention over a cache of latent vectors computes what transformers' code does over keys and values."""

import ctypes
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from oaiserve.config import EngineOptions
from oaiserve.engine.executors.native.kv_layout import LANES
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.sequences.step import Step
from oaiserve.errors import StartupError
from tests.engine.executors.native.small_models import LATENT, compiled_for, config, load, make_model, native, with_nan
from tests.engine.model.runners import greedy_answers
from tests.engine.model.steps import BLOCK_SIZE, CPU, NUM_BLOCKS, two_steps
from tests.engine.remembered import save, started
from tests.models.decoders import generate

pytestmark = [pytest.mark.kernels, pytest.mark.compiler]
# Without experts, which are chosen differently where numbers are rounded differently.
SIZES: dict[str, Any] = {
    **LATENT,
    "first_k_dense_replace": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    },
}
DENSE = {"rope_parameters": None, "first_k_dense_replace": None, "q_lora_rank": 48}  # models without experts
DEEPSEEKS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "head_dim": 64, "v_head_dim": 128}
MODELS = {
    "v2": config("deepseek_v2", **SIZES, q_lora_rank=None),
    "v3": config("deepseek_v3", **SIZES, q_lora_rank=48),
    "v3 with pairs of halves": config("deepseek_v3", **SIZES, q_lora_rank=None, rope_interleave=False),
    "v3 of DeepSeek's sizes": config("deepseek_v3", **SIZES | DEEPSEEKS, q_lora_rank=48),
    "glm4_moe_lite": config(
        "glm4_moe_lite", **SIZES | {"rope_parameters": None}, q_lora_rank=48, mlp_layer_types=["dense"] * 2
    ),
    "youtu": config("youtu", **SIZES | DENSE),
    "minicpm3": config(  # with scaled embeddings, residuals and logits
        "minicpm3", **SIZES | {**DENSE, "scale_depth": 0.7, "dim_model_base": 16}
    ),
}
PROMPTS = [[5, 9, 3, 17], list(range(20, 75)), [90], [7] * 20]
NUM_TOKENS = 12
MEMORY = 2**20


@torch.inference_mode()
def logits(executor: Executor, steps: list[Step]) -> torch.Tensor:
    """Return the logits of all tokens of the last step."""
    for step in steps:
        batch = build_batch(step, BLOCK_SIZE, CPU)
        batch.logits_rows = torch.arange(len(batch.input_ids))
        found = executor.forward(batch).clone()
    return found


@torch.inference_mode()
def own_logits(model: PreTrainedModel, step: Step) -> torch.Tensor:
    """Return the logits that transformers' own code computes of all tokens of a step."""
    found = [
        model(torch.tensor([chunk.sequence.token_ids]), use_cache=False).logits[0, chunk.start : chunk.end]
        for chunk in step.chunks
    ]
    return torch.cat(found).float()


@pytest.mark.parametrize(("dtype", "pack"), [(torch.bfloat16, 2), (torch.float32, 1)])
@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_a_panel_of_keys_is_turned_into_one_of_values(
    exports: ctypes.CDLL, dtype: torch.dtype, pack: int, count: int
) -> None:
    value_dim = 48
    key_dim = 64
    keys = torch.arange(LANES * key_dim).view(LANES, key_dim)  # as integers, so that no rounding makes two equal
    integers = torch.int16 if pack == 2 else torch.int32
    panel = keys.to(integers).view(LANES, key_dim // pack, pack).transpose(0, 1).contiguous()
    values = torch.full((LANES // pack, value_dim, pack), -1, dtype=integers)
    turn = exports.run_turn_panel if dtype == torch.bfloat16 else exports.run_turn_float_panel
    turn(ctypes.c_void_p(panel.data_ptr()), ctypes.c_long(count), ctypes.c_long(value_dim),
         ctypes.c_void_p(values.data_ptr()))  # fmt: skip
    seen = keys[:, :value_dim] * (torch.arange(LANES) < count)[:, None]
    assert torch.equal(values.transpose(1, 2).flatten(0, 1), seen.to(integers))


@pytest.mark.parametrize(
    ("name", "instructions"), [*((name, "native") for name in MODELS), ("v3", "x86-64-v3")], ids=lambda value: value
)
def test_logits_equal_those_of_transformers_code(name: str, instructions: str) -> None:
    loaded = load(MODELS[name])
    with compiled_for(instructions):
        decoder = with_nan(native(loaded, num_blocks=NUM_BLOCKS))
    for shape in ([(15, 1), (16, 1), (17, 1), (255, 1), (256, 1)], [(600, 1), (3, 290), (255, 2), (1, 128)]):
        steps = two_steps(shape, torch.Generator().manual_seed(len(shape)))
        expected = own_logits(loaded.model, steps[-1])
        torch.testing.assert_close(logits(decoder, steps), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["v2", "v3 of DeepSeek's sizes"])
def test_bfloat16_is_as_close_to_float32_as_in_transformers(name: str) -> None:
    exact = dict(make_model(MODELS[name]).named_buffers())
    rounded = load(MODELS[name], dtype=torch.bfloat16)
    for buffer_name, buffer in rounded.model.named_buffers():  # rotary frequencies, as those of a loaded model
        buffer.data = exact[buffer_name].data
    steps = two_steps([(290, 20), (40, 1)], torch.Generator().manual_seed(2))
    found = logits(with_nan(native(rounded, num_blocks=NUM_BLOCKS)), steps)
    own = own_logits(rounded.model, steps[-1])
    expected = own_logits(rounded.model.float(), steps[-1])
    error, own_error = (float((one - expected).norm() / expected.norm()) for one in (found, own))
    assert own_error > 1e-3, "bfloat16 must make a difference"
    assert error < 1.1 * own_error


@pytest.mark.parametrize(("name", "numbers"), [("v2", 48), ("v3 of DeepSeek's sizes", 576)])
def test_a_layer_keeps_the_vector_and_the_shared_numbers_of_a_token(name: str, numbers: int) -> None:
    loaded = load(MODELS[name])
    assert loaded.kv_bytes_per_token == 2 * numbers * 4
    caches = native(loaded, num_blocks=3).caches
    assert sum(blocks.nbytes for cache in caches for blocks in cache) == 3 * BLOCK_SIZE * loaded.kv_bytes_per_token


@pytest.fixture
def folder(tmp_path: Path, empty_cache: Path) -> Path:
    """Return a folder with a small model."""
    return save(make_model(MODELS["v3"]), tmp_path / "model")


def answers(folder: Path, **options: Any) -> list[list[int]]:
    options = {"device": "cpu", "cpu_threads": 1, "kv_cache_memory": MEMORY, **options}
    with started(folder, EngineOptions(**options)) as engine:
        return greedy_answers(engine, PROMPTS, NUM_TOKENS)


def test_a_server_has_such_a_cache_from_its_first_start_on(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "oaiserve")
    expected = generate(make_model(MODELS["v3"]), PROMPTS, NUM_TOKENS)
    assert answers(folder) == expected
    assert answers(folder) == expected, "from what is remembered"
    num_blocks = MEMORY // (2 * 48 * 4 * BLOCK_SIZE)
    line = f": {num_blocks} KV blocks of 16 tokens (0.00 GiB of latent vectors), "
    assert sum(line in record.message for record in caplog.records) == 2


def test_eight_bits_are_refused(folder: Path) -> None:
    with pytest.raises(
        StartupError,
        match=r"^--kv-cache-dtype int8 is for keys and values, in place of which the KV cache of "
        r"'DeepseekV3ForCausalLM' has latent vectors, of 48 numbers for a token and layer\.$",
    ):
        answers(folder, kv_cache_dtype="int8")


def test_without_native_code_the_cache_has_vectors_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("OAISERVE_CACHE", str(folder.parent / "other"))
    caplog.set_level(logging.DEBUG, "oaiserve")
    assert answers(folder) == generate(make_model(MODELS["v3"]), PROMPTS, NUM_TOKENS)
    num_blocks = MEMORY // (2 * 48 * 4 * BLOCK_SIZE)
    lines = [record.message for record in caplog.records]
    assert any(f": {num_blocks} KV blocks of 16 tokens (0.00 GiB of latent vectors), " in line for line in lines)
    assert any(line.startswith("The model runs without native code, which is slower: the compiler") for line in lines)
