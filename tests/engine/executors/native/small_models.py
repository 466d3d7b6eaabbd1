"""Small random models whose sizes the native step supports, and the runners that tests run them with."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from oaiserve.checkpoints.source import find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.executors.native import build, prebuilt, variants
from oaiserve.engine.executors.native.native import NativeDecoder
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.start.described import Described, describe_model
from tests.engine.model.runners import states_of
from tests.engine.model.steps import BLOCK_SIZE
from tests.models import small_sizes
from tests.models.decoders import SMALL, random_model
from tests.models.described import SmallModel, described
from tests.models.small_configs import config_of

EMULATOR = Path(__file__).parent / "amx_emulator.h"
EMULATED_AMX = "emulated AMX"
AVX_VNNI = "alderlake"  # the compiler's name of the first CPU that has these instructions without AVX-512
_SIZES = {**SMALL, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
_MIXED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
MOE = {"num_experts_per_tok": 2, "num_experts": 6, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
GROUPED_MOE = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
# Keys and values that come from latent vectors, and a first layer without experts.
LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "head_dim": 16,  # for rotary tables
    "v_head_dim": 48,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
GEMMA4 = {**_MIXED, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def config(model_type: str, **values: Any) -> PreTrainedConfig:
    sizes = {**_SIZES, **values}
    return AutoConfig.for_model(model_type, **{name: size for name, size in sizes.items() if size is not None})


# The families that the native step must support. Comments say what a family has that the others do not have.
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": config("llama", attention_bias=True, mlp_bias=True, rope_parameters=_LLAMA3_ROPE),
    "one key head": config(
        "llama", hidden_size=48, num_key_value_heads=1, num_attention_heads=3, tie_word_embeddings=True
    ),
    "mistral": config("mistral", sliding_window=6),
    "qwen2": config("qwen2"),  # biases of queries, keys and values
    "qwen3": config("qwen3", head_dim=32),  # norms of queries and keys
    "gemma": config("gemma"),  # scaled embeddings, norms that store the weight minus 1
    "gemma2": config(  # norms after attention and MLP, softcaps of scores and logits
        "gemma2", **_MIXED, attn_logit_softcapping=5.0, final_logit_softcapping=3.0, query_pre_attn_scalar=8
    ),
    "gemma3_text": config("gemma3_text", **_MIXED, query_pre_attn_scalar=8),  # two rotary tables
    "gemma4_text": config(  # layers with the cache of others, inputs of layers; a part of wide heads is rotated
        "gemma4_text",
        **GEMMA4,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=97,
        global_head_dim=64,
        final_logit_softcapping=3.0,
    ),
    "gemma4_text with experts": config(  # next to an MLP; heads of 512, whose values are their keys
        "gemma4_text",
        **GEMMA4,
        global_head_dim=512,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=32,
    ),
    "phi3": config("phi3", sliding_window=6),  # fused projections
    "gpt2": config_of("gpt2"),  # LayerNorm, learned positions, transposed weights
    "gpt_bigcode": config_of("gpt_bigcode"),
    "granite": config(
        "granite", embedding_multiplier=3.0, residual_multiplier=0.3, attention_multiplier=0.2, logits_scaling=2.0
    ),
    "smollm3": config("smollm3", no_rope_layers=[1, 0, 1]),  # a layer without rotary embedding
    "starcoder2": config("starcoder2", sliding_window=6),
    "arcee": config("arcee"),  # the square of relu
    "olmo2": config("olmo2"),  # norms only after attention and MLP, and norms across all heads
    "olmo3": config("olmo3", **_MIXED),
    "exaone4": config("exaone4", **_MIXED),  # no rotary embedding in layers without a window
    "cohere": config("cohere", logit_scale=0.3),  # parallel attention and MLP, rotated pairs of neighbours
    "cohere2": config("cohere2", **_MIXED),
    "phi": config_of("phi", qk_layernorm=True),  # parallel, with biases; half of each head is rotated
    "gpt_neox": config_of("gpt_neox"),  # parallel, with two norms; projections sorted by head
    "gpt_neox in turn": config_of("gpt_neox", use_parallel_residual=False),
    "persimmon": config_of("persimmon"),
    "glm": config("glm"),  # rotated pairs of neighbours, in half of each head
    "glm4": config("glm4"),  # four norms under other names
    "helium": config("helium"),
    "ernie4_5": config("ernie4_5"),
    "ministral": config("ministral", **_MIXED),
    "seed_oss": config("seed_oss"),
    "mixtral": config_of("mixtral", sliding_window=6),
    "qwen3_moe": config_of("qwen3_moe", norm_topk_prob=True, head_dim=32, mlp_only_layers=[1]),
    # an expert that all tokens share, of which a gate decides how much
    "qwen2_moe": config_of("qwen2_moe", shared_expert_intermediate_size=48),
    "olmoe": config_of("olmoe", intermediate_size=32),
    "granitemoe": config_of("granitemoe", embedding_multiplier=3.0, residual_multiplier=0.3, logits_scaling=2.0),
    "glm4_moe": config_of(  # groups of experts, chosen by sigmoids with a bias, and a shared expert
        "glm4_moe", **GROUPED_MOE, num_experts_per_tok=3, routed_scaling_factor=1.5, use_qk_norm=True
    ),
    "deepseek_v2": config("deepseek_v2", **LATENT, **GROUPED_MOE, num_experts_per_tok=3, q_lora_rank=None),
    "deepseek_v3": config("deepseek_v3", **LATENT, **GROUPED_MOE, num_experts_per_tok=3, q_lora_rank=24),
    "ernie4_5_moe": config_of("ernie4_5_moe"),
    # sinks, biases of routers and experts, a clamped gate; another rotary table
    "gpt_oss": config_of("gpt_oss", **_MIXED, swiglu_limit=1.5),
    "hunyuan_v1_moe": config_of("hunyuan_v1_moe"),  # norms of queries and keys after their rotation
    "minimax_m2": config_of("minimax_m2"),  # a router that is given its bias
    "granitemoeshared": config_of("granitemoeshared", residual_multiplier=0.3),
    "stablelm": config_of("stablelm"),  # LayerNorm, a quarter of each head is rotated
    "nemotron": config("nemotron"),  # LayerNorm whose weight is stored minus 1
    "olmo": config("olmo"),  # LayerNorm without weights
    "ministral3": config_of("ministral3"),  # queries that grow with their positions
    "opt": config("opt", ffn_dim=96, word_embed_proj_dim=64),  # positions from 2 on, queries that are scaled before
}
DELTA = {**small_sizes.DELTA, "linear_value_head_dim": 32}
MAMBA2 = {**small_sizes.MAMBA2, "mamba_d_state": 32}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"]}
# Families with layers that keep a state.
STATE_FAMILIES: dict[str, PreTrainedConfig] = {
    # projections sorted by head
    "qwen3_next": config_of("qwen3_next", linear_value_head_dim=32, shared_expert_intermediate_size=48),
    "qwen3_5_text": config_of("qwen3_5_text", linear_value_head_dim=32),
    "lfm2": config_of("lfm2"),  # a convolution alone
    "lfm2_moe": config_of("lfm2_moe", conv_L_cache=5),
    "mamba2": config_of("mamba2"),  # no attention, and no MLP
    "bamba": config_of("bamba", mamba_d_state=32),
    "granitemoehybrid": config_of("granitemoehybrid", shared_intermediate_size=48),
    "granitemoehybrid without experts": config_of("granitemoehybrid", num_local_experts=0, residual_multiplier=0.3),
    "olmo_hybrid": config("olmo_hybrid", **DELTA, linear_allow_neg_eigval=True),  # norms before and behind
}
FAMILIES |= STATE_FAMILIES
WITHOUT_STEP = config("apertus")  # a family of which the native library supports only attention


def make_model(asked: PreTrainedConfig, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a model with random biases and norms.

    New ones are zeros and ones, with which a mix-up of two of them would not be seen.
    """
    model = random_model(deepcopy(asked), dtype=dtype)  # the model changes its config
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_bias"):
                parameter += 0.4 * torch.randn(parameter.shape, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith(("layer_scalar", "e_score_correction_bias", "expert_bias")):
                buffer += 0.4 * torch.rand(buffer.shape, generator=generator)
    return model


def load(asked: PreTrainedConfig, *, dtype: torch.dtype = torch.float32) -> SmallModel:
    return described(make_model(asked, dtype=dtype))


@contextmanager
def emulated_amx() -> Iterator[None]:
    """Compile native code that calls an emulator in place of AMX's instructions.

    The rest of that code is not emulated and needs a CPU with AVX512-BF16: AMD's since Zen 4, Intel's since Sapphire
    Rapids. Change AMX's code on one of these. On others, the tests of the code that they have remain.
    """
    has_bf16 = "avx512_bf16" in prebuilt.cpu_features(prebuilt.CPUINFO)
    if not has_bf16 or torch.backends.cpu.get_cpu_capability() != "AVX512":  # `make test-avx2` limits torch's
        pytest.skip("code with AMX also needs AVX512-BF16, which this CPU lacks: run it on a Zen 4 or Sapphire Rapids")
    digest = hashlib.sha256(EMULATOR.read_bytes()).hexdigest()  # so that a changed emulator makes another library
    with pytest.MonkeyPatch.context() as patch:
        flags = ["-O1" if flag == "-O3" else flag for flag in build.FLAGS]  # compiles in half the time
        patch.setattr(build, "FLAGS", [*flags, variants.AMX_FLAG, f"-DEMULATOR={digest}", "-include", EMULATOR.name])
        patch.setenv("CPLUS_INCLUDE_PATH", str(EMULATOR.parent))  # A flag would compile it again in each checkout.
        yield


@contextmanager
def compiled_for(instructions: str) -> Iterator[None]:
    """Compile native code for another CPU, whose instructions this one must have too, except for AMX.

    On a CPU without them, such tests are left out. One with AVX-512 (Intel has it since 2017, AMD since Zen 4) runs
    them all, one of another architecture those of its own. The own code of one with AVX2 is that of x86-64-v3.
    """
    if instructions == EMULATED_AMX:
        with emulated_amx():
            yield
        return
    capability = torch.backends.cpu.get_cpu_capability()
    if (instructions, capability) == ("x86-64-v3", "AVX2"):
        instructions = "native"
    if instructions != "native" and capability != "AVX512":
        pytest.skip(f"code for {instructions} does not run on this CPU: run it on one with AVX-512")
    if instructions == AVX_VNNI and "avx_vnni" not in prebuilt.usable_features():
        pytest.skip("this CPU has no AVX-VNNI: run it on an Intel CPU since Sapphire Rapids, or on a Zen 5")
    replaced = {"-march=native": f"-march={instructions}", "-O3": "-O1"} if instructions != "native" else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", [replaced.get(flag, flag) for flag in build.FLAGS])
        yield


def described_by_files(loaded: SmallModel, **options: Any) -> Described:
    """Describe a model by its files, which it writes, with the KV cache that it has."""
    is_int8 = any(shape.is_int8 for shape in loaded.kv_shapes.values())
    settings: dict[str, Any] = {
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "kv_cache_dtype": "int8" if is_int8 else "auto",
        "max_model_len": loaded.max_model_len,
    }
    with TemporaryDirectory() as folder:
        loaded.model.save_pretrained(folder)
        return describe_model(find_model(folder), EngineOptions(**settings | options))


def native_of(found: Described, **options: Any) -> NativeDecoder:
    assert found.library is not None
    return NativeDecoder(found.library, found.decoder, **options)


def native_decoder(loaded: SmallModel, **options: Any) -> NativeDecoder:
    return native_of(described_by_files(loaded), **options)


def native(loaded: SmallModel, *, num_blocks: int = 64, num_threads: int = 1) -> NativeDecoder:
    """Return the native step. That it computes the same with several threads is in test_same_numbers.py."""
    return native_decoder(loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE, num_threads=num_threads)


def with_nan(decoder: NativeDecoder) -> NativeDecoder:
    """Return the decoder with a cache in which nothing has been written, which must not matter."""
    with torch.inference_mode():
        for cache in decoder.caches:
            cache.keys.fill_(torch.nan)
            cache.values.fill_(torch.nan)
    return decoder


def native_runner(loaded: SmallModel, *, num_blocks: int = 64) -> ModelRunner:
    executor = native(loaded, num_blocks=num_blocks)
    return ModelRunner(executor, loaded.device, BLOCK_SIZE, states=states_of(loaded))
