"""What settings and files that no pinned model has change in the descriptions of families whose layers keep a state."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oaiserve.engine.decoder.description import Decoder, DeltaNet, Mamba2, NotKnown
from oaiserve.engine.decoder.settings import settings_of
from tests.engine.executors.test_reference import assert_small, case_of_model, errors
from tests.models.decoders import random_model
from tests.models.described import decoder_in
from tests.models.fingerprints import text_of
from tests.models.small_configs import config_of

_FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": None}
_SHARING = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
_GEMMA4_MIXTURE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 3, "moe_intermediate_size": 16}
# By type, what their files may have.
_VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "lfm2": (
        {"conv_bias": True},
        {"conv_L_cache": 5, "tie_word_embeddings": False},
        {"block_auto_adjust_ff_dim": False, "norm_eps": 1e-4},
        {"layer_types": None, "full_attn_idxs": [0, 2]},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    ),
    "lfm2_moe": (
        {"use_expert_bias": False, "norm_topk_prob": False},
        {"routed_scaling_factor": 1.5, "num_experts_per_tok": 3, "num_dense_layers": 2},
    ),
    "mamba2": (
        {"layer_norm_epsilon": 1e-3},
        {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
        {"n_groups": 1, "state_size": 32, "conv_kernel": 3, "num_heads": 8, "head_dim": 16},
    ),
    "bamba": (
        {"mamba_n_heads": 8, "mamba_d_head": 16},
        {"mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True, "mlp_bias": True},
        {"attn_layer_indices": [0, 2], "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
    ),
    "granitemoehybrid": (
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 2.0, "attention_bias": True},
        {"num_experts_per_tok": 3, "mamba_conv_bias": False, "mamba_proj_bias": True, "tie_word_embeddings": True},
        {"layer_types": ["full_attention", "linear_attention", "linear_attention"]},
    ),
    "qwen3_next": (
        _FOUR_LAYERS,
        {"norm_topk_prob": False, "decoder_sparse_step": 2, "attention_bias": True},
        {"mlp_only_layers": [0], "linear_num_value_heads": 8, "linear_conv_kernel_dim": 3},
        {"num_experts": 0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    "qwen3_5_text": (_FOUR_LAYERS, {"tie_word_embeddings": True, "linear_num_value_heads": 2, "rms_norm_eps": 1e-4}),
    "qwen3_5_moe_text": (_FOUR_LAYERS, {"num_experts_per_tok": 3, "shared_expert_intermediate_size": 32}),
    "olmo_hybrid": (
        _FOUR_LAYERS,
        {"linear_allow_neg_eigval": False, "attention_bias": True, "linear_conv_kernel_dim": 2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ),
    "gemma4_text": (
        {**_SHARING, "num_kv_shared_layers": 3},
        {**_SHARING, "num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {**_SHARING, "hidden_size_per_layer_input": 0, "sliding_window": 9},
        {**_SHARING, **_GEMMA4_MIXTURE, "use_double_wide_mlp": True, "num_kv_shared_layers": 2},
        {"layer_types": ["sliding_attention"] * 3, "num_kv_shared_layers": 0, "attention_bias": True},
        {"final_logit_softcapping": 3.0, "tie_word_embeddings": False, "rms_norm_eps": 1e-4},
        {"hidden_activation": "silu", "head_dim": 32, "global_head_dim": 64},
    ),
    "gemma4_unified_text": ({"use_double_wide_mlp": True, "attention_k_eq_v": True}, {"sliding_window": 9}),
}
_CASES = [(name, changes) for name, variants in _VARIANTS.items() for changes in variants]


@pytest.mark.parametrize(("name", "changes"), _CASES, ids=[f"{name} {list(changes)}" for name, changes in _CASES])
def test_descriptions_with_other_settings_compute_the_logits_of_transformers(
    name: str, changes: dict[str, Any]
) -> None:
    model = random_model(config_of(name, **changes))
    with torch.no_grad():  # new ones are ones and zeros, with which a mix-up would not be seen
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.arange(len(parameter)) / len(parameter)
    assert_small(errors(case_of_model(model)))


def test_keys_and_values_of_layers_that_share_others_are_left_out(tmp_path: Path) -> None:
    random_model(config_of("gemma4_text", **_SHARING, num_kv_shared_layers=2)).save_pretrained(tmp_path)
    before = text_of(read(tmp_path))
    place = "model.layers.4.self_attn."
    unused = {"k_proj.weight": [32, 64], "k_proj.bias": [32], "v_proj.weight": [32, 64], "k_norm.weight": [16]}
    change_tensors(tmp_path, lambda old: old | {f"{place}{name}": torch.ones(size) for name, size in unused.items()})
    assert text_of(read(tmp_path)) == before


def test_layers_of_a_type_that_has_no_keys_are_refused(tmp_path: Path) -> None:
    random_model(config_of("gemma4_text", **_SHARING, num_kv_shared_layers=2)).save_pretrained(tmp_path)
    with pytest.raises(NotKnown, match="layer 2 has no keys and values, and none before it of the same type has"):
        read(tmp_path, num_kv_shared_layers=4)


def test_a_factor_that_a_file_lacks_is_one(tmp_path: Path) -> None:
    random_model(config_of("gemma4_text")).save_pretrained(tmp_path)
    change_tensors(tmp_path, lambda old: {name: old[name] for name in old if not name.endswith("layer_scalar")})
    assert [layer.factor for layer in read(tmp_path).layers] == [1.0] * 3


def test_names_of_olmo_hybrid_may_be_those_of_its_modules(tmp_path: Path) -> None:
    """transformers reads norms by either name, and joins convolutions of any numbers of channels."""
    random_model(config_of("olmo_hybrid", linear_value_head_dim=32)).save_pretrained(tmp_path)
    before = text_of(read(tmp_path))
    change_tensors(tmp_path, _with_names_of_modules)
    assert text_of(read(tmp_path)) == before


def _with_names_of_modules(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in tensors.items():
        place, is_norm, _ = name.partition("attention_layer_norm")
        name = f"{place}input_layernorm.weight" if is_norm else name
        renamed[name.replace("feedforward_layer_norm", "post_attention_layernorm")] = tensor
    for layer in (0, 2):
        place = f"model.layers.{layer}.linear_attn."
        names = [f"{place}{part}_conv1d.weight" for part in "qkv"]
        channels = torch.cat([renamed[name] for name in names])
        renamed |= dict(zip(names, (part.contiguous() for part in channels.split([32, 32, 128])), strict=True))
    return renamed


def test_each_kind_of_time_limit_is_read(tmp_path: Path) -> None:
    random_model(config_of("mamba2")).save_pretrained(tmp_path)
    for limits, expected in (
        ([0.0, {"__float__": "Infinity"}], (0.0, float("inf"))),
        ([0.0, float("inf")], (0.0, float("inf"))),
        ([0.25, 0.5], (0.25, 0.5)),
    ):
        mixer = read(tmp_path, time_step_limit=limits).layers[0].mixer
        assert isinstance(mixer, Mamba2)
        assert (mixer.least_time, mixer.most_time) == expected


def test_rows_of_qwen3_next_are_sorted_by_key_head(tmp_path: Path) -> None:
    model = random_model(config_of("qwen3_next"))
    model.save_pretrained(tmp_path)
    net = read(tmp_path).layers[0].mixer
    assert isinstance(net, DeltaNet)
    stored = model.model.layers[0].linear_attn.in_proj_qkvz.weight.detach().view(2, 96, 64)  # [key heads, rows, width]
    parts = [stored[:, rows].flatten(0, 1) for rows in (slice(16), slice(16, 32), slice(32, 64), slice(64, 96))]
    assert torch.equal(torch.as_tensor(net.projections[0].weight), torch.cat(parts))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("bamba", {"time_step_limit": None}, "its time_step_limit is null"),
        ("mamba2", {"hidden_act": "gelu"}, "the activation of its convolutions is gelu"),
        ("lfm2", {"conv_L_cache": 9}, "its convolutions look at 9 tokens, and not at 2 to 8"),
        ("qwen3_next", {"linear_num_key_heads": 4}, "its projections have 192 rows for 4 heads of 64"),
        ("qwen3_5_text", {"num_attention_heads": 2}, "its queries and gates have 128 rows for 2 heads"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "its tokens see those behind them"),
        ("gemma4_text", {"head_dim": 32}, r"its projections do not have \[128, 64, 64\] rows"),
        ("mamba2", {"n_groups": 4}, "the sizes of its matrices do not fit together"),
    ],
)
def test_a_family_refuses_what_a_description_cannot_say(
    name: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    own = {key: value for key, value in changes.items() if key == "conv_L_cache"}  # visible in shapes
    random_model(config_of(name, **own)).save_pretrained(tmp_path)
    with pytest.raises(NotKnown, match=reason):
        read(tmp_path, **changes)


def read(folder: Path, **changes: Any) -> Decoder:
    settings = settings_of(json.loads((folder / "config.json").read_text()) | changes)
    return decoder_in(folder, settings, length=128)


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file)
