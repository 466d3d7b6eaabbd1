"""Experts and latent attention are described from the files that models have."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oaiserve.engine.decoder.description import Decoder, NotKnown
from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.keys import refuse_ignored
from oaiserve.engine.decoder.settings import settings_of
from oaiserve.engine.executors.native.library import Library
from oaiserve.engine.executors.native.native import NativeDecoder
from tests.models.decoders import random_model
from tests.models.described import decoder_in
from tests.models.pinned import pinned_model
from tests.models.small_configs import config_of

LENGTH = 32


def written(name: str, folder: Path, changes: dict[str, torch.Tensor | None], **settings: Any) -> Decoder:
    """Write a pinned model, change its tensors and settings, and describe the files. None takes a tensor away."""
    pinned_model(name).save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, path)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    return decoder_in(folder, length=LENGTH)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "glm4_moe_lite"])
def test_a_layer_that_guesses_further_tokens_is_left_out(name: str, tmp_path: Path) -> None:
    extra = {"model.layers.3.eh_proj.weight": torch.zeros(64, 128)}
    assert len(written(name, tmp_path, extra).layers) == 3


def test_a_layer_behind_the_one_that_guesses_declines_the_description(tmp_path: Path) -> None:
    with pytest.raises(NotKnown, match=r"'model\.layers\.4\.eh_proj\.weight'"):
        written("deepseek_v3", tmp_path, {"model.layers.4.eh_proj.weight": torch.zeros(64, 128)})


def test_tensors_of_ernie_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    extra = {"model.mtp_emb_norm.0.weight": torch.zeros(64), "mtp.norm.weight": torch.zeros(64)}
    assert len(written("ernie4_5_moe", tmp_path, extra).layers) == 3


_EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"


@pytest.mark.parametrize(
    ("name", "changes", "settings", "reason"),
    [
        ("qwen2_moe", {_EXPERT.format(3, "down"): None}, {}, "4 gates, 4 ups and 3 downs"),
        (
            "qwen2_moe",
            {_EXPERT.format(0, "gate"): None},
            {},
            r"no tensor 'model\.layers\.1\.mlp\.experts\.0\.gate_proj'",
        ),
        (
            "qwen2_moe",
            {"model.layers.1.mlp.gate.weight": torch.zeros(3, 64)},
            {},
            "states 4 experts, but its files have 3",
        ),
        ("qwen2_moe", {"model.layers.1.mlp.shared_expert_gate.weight": None}, {}, "no tensor '.*shared_expert_gate'"),
        ("qwen3_moe", {}, {"mlp_only_layers": []}, r"no tensor 'model\.layers\.1\.mlp\.gate'"),
        ("qwen3_moe", {}, {"mlp_only_layers": [0, 1]}, r"no tensor 'model\.layers\.0\.mlp\.down_proj'"),
        ("mixtral", {}, {"num_local_experts": 8}, "states 8 experts, but its files have 4"),
        ("olmoe", {}, {"clip_qkv": 8.0}, "it limits queries, keys and values"),
        ("hunyuan_v1_moe", {}, {"moe_topk": [1, 2, 2]}, "choose different numbers of experts"),
        ("ernie4_5_moe", {}, {"moe_num_shared_experts": 0}, "a tensor 'model.layers.1.mlp.shared_experts"),
        ("cohere2_moe", {}, {"num_shared_experts": 1}, "it averages its experts and the MLP that they share"),
        ("glm4_moe", {}, {"use_qk_norm": False}, "sets use_qk_norm to False, but a layer has such tensors"),
        ("glm4_moe", {}, {"topk_group": 8}, "sizes of its matrices do not fit"),
        ("glm4_moe", {"model.layers.1.mlp.gate.e_score_correction_bias": None}, {}, "no tensor '.*_correction_bias'"),
        ("gpt_oss", {"model.layers.1.mlp.experts.down_proj_bias": torch.zeros(3, 64)}, {}, "4 experts with 3 biases"),
        ("deepseek_v2", {}, {"topk_method": "noaux_tc"}, "by the method 'noaux_tc'"),
        ("deepseek_v3", {}, {"topk_method": "greedy"}, "by the method 'greedy'"),
        ("deepseek_v3", {}, {"q_lora_rank": None}, r"no tensor 'model\.layers\.0\.self_attn\.q_proj'"),
        ("deepseek_v3", {}, {"v_head_dim": 64}, "sizes of its matrices do not fit"),
        ("deepseek_v3", {"model.layers.1.self_attn.kv_b_proj.bias": torch.zeros(320)}, {}, "vectors with a bias"),
    ],
)
def test_files_and_settings_that_do_not_fit_the_family_decline_the_description(
    name: str, changes: dict[str, torch.Tensor | None], settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(NotKnown, match=reason):
        written(name, tmp_path, changes, **settings)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        (
            "deepseek_v3",
            {"qk_nope_head_dim": 40, "qk_rope_head_dim": 8},
            "its latent vectors have sizes that are no multiples of 16",
        ),
        ("llama4_text", {"layer_types": ["full_attention"] * 3}, "the weights of its experts multiply what these"),
    ],
)
def test_native_code_refuses_descriptions_that_it_cannot_run(
    name: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    random_model(config_of(name, **changes)).save_pretrained(tmp_path)
    decoder = decoder_in(tmp_path, length=LENGTH)
    with pytest.raises(NotKnown, match=reason):
        NativeDecoder(Library(torch.float32), decoder, num_threads=1, num_blocks=4, block_size=16)


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("qwen3_moe", {"num_experts": 8}),
        ("granitemoe", {"num_local_experts": 40}),
        ("deepseek_v3", {"n_routed_experts": 8, "topk_method": "noaux_tc", "num_nextn_predict_layers": 1}),
        ("mixtral", {"num_experts": 16}),
    ],
)
def test_settings_of_published_files_are_not_taken_for_those_of_others(name: str, stated: dict[str, Any]) -> None:
    settings = settings_of({"model_type": name, **stated})
    FAMILIES[name].facts(settings)
    refuse_ignored(settings)
