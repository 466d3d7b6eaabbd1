"""Families that are described from files alone compute transformers' logits in float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from oaiserve.engine.decoder.description import Decoder, Experts, NotKnown
from oaiserve.engine.decoder.settings import settings_of
from oaiserve.engine.executors.native.library import Library
from oaiserve.engine.executors.native.native import NativeDecoder
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.model.states import StateChunk
from tests.engine.executors.native.small_models import make_model
from tests.engine.executors.test_reference import NUM_BLOCKS, Case, assert_small, case_of_model, errors
from tests.engine.model.runners import states_of
from tests.engine.model.steps import BLOCK_SIZE, CPU, batch_of_prompt
from tests.models.described import decoder_in, described
from tests.models.pinned import model_with_numbers
from tests.models.small_configs import config_of

_OUT_FACTORS = {"ssm_out_multiplier": 0.3, "attention_out_multiplier": 0.7, "mlp_multipliers": [1.5, 0.6]}
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "lfm3": (
        {},
        {"use_sandwich_norm": False, "use_attention_gate": False, "conv_bias": True},
        {"num_hidden_layers": 6, "layer_types": None, "tie_word_embeddings": False, "attention_bias": True},
        {"conv_L_cache": 3, "norm_eps": 1e-3, "sliding_window": 9, "num_key_value_heads": 4},
    ),
    "falcon_h1": (
        {},
        {"embedding_multiplier": 5.5, "lm_head_multiplier": 0.04, "key_multiplier": 0.4, **_OUT_FACTORS},
        {"attention_in_multiplier": 1.4, "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.35, 0.25, 0.2, 0.5, 0.4]},
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_conv_bias": False, **_OUT_FACTORS},
        {
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "mlp_bias": True,
            "ssm_multipliers": [2.0, 0.5, 1.0, 1.0, 3.0],
        },
        {"attention_bias": True, "key_multiplier": 0.4, "mamba_d_ssm": None, "mamba_n_groups": 1, **_OUT_FACTORS},
        {"tie_word_embeddings": True, "rms_norm_eps": 1e-3, "mamba_d_state": 32, "mlp_multipliers": [0.5, 2.0]},
    ),
    "nemotron_h": (
        {},
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]},
        {"use_bias": True, "use_conv_bias": False, "mlp_bias": True, "time_step_min": 0.3, "conv_kernel": 3},
        {"n_group": 2, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.5, "n_routed_experts": 8},
        {"layer_norm_epsilon": 1e-3},
        {"num_experts_per_tok": 3},
        {"tie_word_embeddings": True},
        {"n_groups": 1},
        {"mlp_hidden_act": "silu", "mamba_head_dim": 32, "head_dim": 32, "num_key_value_heads": 4},
    ),
    "kimi_linear": (
        {},
        {"linear_head_dim": 128, "linear_num_heads": 2, "linear_conv_kernel_dim": 3, "rms_norm_eps": 1e-3},
        {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 48, "attention_bias": True},
        {"num_experts": 8, "num_expert_group": 4, "topk_group": 2, "num_experts_per_token": 3},
        {"moe_renormalize": False, "routed_scaling_factor": 1.5, "num_shared_experts": 2},
        {"num_hidden_layers": 5, "layer_types": None, "mlp_layer_types": ["sparse", *["dense"] * 4]},
        {"tie_word_embeddings": True},
    ),
    "aria_text": (
        {"moe_num_experts": 6, "moe_topk": 3, "moe_num_shared_experts": 2, "hidden_act": "gelu"},
        {"moe_num_experts": 4, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama4_text": (
        {"attention_chunk_size": 16},
        {"attention_chunk_size": 7, "floor_scale": 8, "attn_scale": 0.5, "use_qk_norm": False},
        {"attention_chunk_size": 50, "layer_types": ["full_attention", *["chunked_attention"] * 2]},
    ),
    "gemma3n_text": (
        {},
        {"altup_num_inputs": 4, "altup_active_idx": 1, "laurel_rank": 24, "altup_correct_scale": False},
        {"activation_sparsity_pattern": [0.95, 0.0, 0.6, 0.0], "intermediate_size": [96, 64, 96, 128]},
        {"num_kv_shared_layers": 0, "final_logit_softcapping": 3.0, "rms_norm_eps": 1e-3},
        {"num_hidden_layers": 12, "layer_types": None, "num_kv_shared_layers": 5, "tie_word_embeddings": False},
        {"vocab_size_per_layer_input": 60, "hidden_size_per_layer_input": 24, "hidden_activation": "silu"},
    ),
}
WITHOUT_NATIVE_CODE = {
    "gemma3n_text": "it has several hidden states of a token",
    "llama4_text": "its layers attend in chunks",
}
SIZES: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
_CASES = [(name, changes) for name, variants in VARIANTS.items() for changes in variants]


@pytest.mark.parametrize(("name", "changes"), _CASES, ids=[f"{name} {list(changes)}" for name, changes in _CASES])
def test_the_reference_and_the_native_step_compute_the_logits_of_transformers(
    name: str, changes: dict[str, Any]
) -> None:
    case = case_with(name, changes)
    assert_small(errors(case))
    mixtures = [layer.mlp for layer in case.decoder.layers if isinstance(layer.mlp, Experts)]
    if name in WITHOUT_NATIVE_CODE:
        with pytest.raises(NotKnown, match=WITHOUT_NATIVE_CODE[name]):
            native(case.decoder)
    elif any(mixture.experts[0].gate is None for mixture in mixtures):
        with pytest.raises(NotKnown, match="its experts have no gates"):
            native(case.decoder)
    else:
        assert_small(errors(case, executor=native(case.decoder)))


@pytest.mark.parametrize(
    ("name", "stated", "reason"),
    [
        ("lfm3", {"use_sandwich_norm": False}, "its files and its use_sandwich_norm disagree"),
        ("falcon_h1", {"mamba_rms_norm": True}, "its mixers have a norm before their gates"),
        ("falcon_h1", {"attention_bias": True, "attention_in_multiplier": 2.0}, "have biases, and what they are made"),
        ("nemotron_h", {"moe_latent_size": 32}, "its experts read vectors of their own"),
        ("nemotron_h", {"layers_block_type": ["linear_attention", "conv"]}, "it has layers of type 'conv'"),
        ("kimi_linear", {"linear_attn_config": {"gate_lower_bound": -5.0}}, "its linear_attn_config has gate_lower"),
        ("kimi_linear", {"layer_types": ["sliding_attention"] * 3}, "it has layers of type 'sliding_attention'"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 3}, "it has layers of type 'sliding_attention'"),
        ("llama4_text", {"attention_chunk_size": None}, "its layers attend in chunks of None tokens"),
        ("gemma3n_text", {"altup_num_inputs": 3}, "its files have no tensor 'model.altup_projections.1"),
        ("gemma3n_text", {"altup_active_idx": 2}, "the sizes of its matrices do not fit together"),
        ("gemma3n_text", {"hidden_size_per_layer_input": 0}, "its layers have no inputs of their own"),
        ("kimi_linear", {"mla_use_nope": False}, "its attention rotates queries and keys"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "its routers have the activation softmax"),
    ],
)
def test_a_family_refuses_what_a_description_cannot_say(
    name: str, stated: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model_with_numbers(config_of(name)).save_pretrained(tmp_path)
    settings = settings_of(json.loads((tmp_path / "config.json").read_text()) | stated)
    with pytest.raises(NotKnown, match=reason):
        decoder_in(tmp_path, settings, length=128)


@pytest.mark.parametrize("changes", [{}, {"linear_head_dim": 128, "linear_num_heads": 2}], ids=len)
@pytest.mark.parametrize("executor", ["the reference", "the native step"])
def test_kimi_linear_in_16_bits_is_as_close_to_float32_as_in_transformers(
    executor: str, changes: dict[str, Any]
) -> None:
    # Without experts: where rounding changes the choice of one, errors are large.
    asked = config_of("kimi_linear", mlp_layer_types=["dense"] * 3, **changes)
    model = make_model(asked, dtype=torch.bfloat16)
    spec = described(model)
    batch = batch_of_prompt(60, wants_prompt_logprobs=True)
    states = states_of(spec)
    assert states is not None
    batch.states = states.of_step([StateChunk(0, 0, 60)])
    with torch.inference_mode():
        ids = batch.input_ids[None].long()
        own = model(ids).logits[0].float()
        exact = model.float()(ids).logits[0]
        if executor == "the native step":
            found = native(spec.decoder, torch.bfloat16).forward(batch).clone()
        else:
            found = ReferenceExecutor(spec.decoder, dtype=torch.bfloat16, device=CPU, **SIZES).forward(batch)
    found = torch.cat([found[1:], found[:1]])  # the row that samples comes first
    own_error, error = (float((logits - exact).norm() / exact.norm()) for logits in (own, found))
    assert own_error > 1e-3, "bfloat16 must make a difference"
    assert error < 1.1 * own_error


def native(decoder: Decoder, dtype: torch.dtype = torch.float32) -> NativeDecoder:
    return NativeDecoder(Library(dtype), decoder, **SIZES, num_threads=1)


def case_with(name: str, changes: dict[str, Any]) -> Case:
    return case_of_model(model_with_numbers(config_of(name, **changes)))
