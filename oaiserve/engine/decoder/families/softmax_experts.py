"""Mixtral and other mixtures that choose experts by a softmax of their scores."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.decoder.description import ClampedGate, NotKnown
from oaiserve.engine.decoder.experts import by_mlp_types
from oaiserve.engine.decoder.facts import Facts, Mixture, llama, windows_by_type, windows_of_all
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.families.llama import HUNYUAN_NORMS
from oaiserve.engine.decoder.families.olmo import NORMS_BEHIND
from oaiserve.engine.decoder.reader import NormKind
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.names import Names

MIXTRAL: Names = {
    "router": ("mlp.gate", "block_sparse_moe.gate"),
    "experts.{}.gate": "block_sparse_moe.experts.{}.w1",
    "experts.{}.up": "block_sparse_moe.experts.{}.w3",
    "experts.{}.down": "block_sparse_moe.experts.{}.w2",
}
QWEN: Names = {
    "shared.gate": "mlp.shared_expert.gate_proj",
    "shared.up": "mlp.shared_expert.up_proj",
    "shared.down": "mlp.shared_expert.down_proj",
    "shared_gate": "mlp.shared_expert_gate",
}
_HUNYUAN: Names = {
    **HUNYUAN_NORMS,
    "router": "mlp.gate.wg",
    "shared.gate": "mlp.shared_mlp.gate_proj",
    "shared.up": "mlp.shared_mlp.up_proj",
    "shared.down": "mlp.shared_mlp.down_proj",
}
_ARIA: Names = {
    "router": "mlp.router",
    "experts.gate_up": ("mlp.experts.fc1", "mlp.experts.gate_up_proj"),
    "experts.down": ("mlp.experts.fc2", "mlp.experts.down_proj"),
}
_ERNIE: Names = {
    "choice_bias": (
        "mlp.gate.moe_statics.e_score_correction_bias",
        "mlp.moe_statics.e_score_correction_bias",
    ),
}


def _mixtral(settings: Settings) -> Facts:
    mixture = Mixture(
        num_experts=settings["num_local_experts"],
        top_k=settings["num_experts_per_tok"],
    )
    return replace(llama(settings), windows=windows_of_all(settings), mixture=mixture)


def _qwen2_moe(settings: Settings) -> Facts:
    mixture = replace(qwen_mixture(settings), has_shared=True, has_shared_gate=True)
    return replace(llama(settings), windows=windows_by_type(settings), mixture=mixture)


def _qwen3_moe(settings: Settings) -> Facts:
    return replace(llama(settings), windows=windows_of_all(settings), mixture=qwen_mixture(settings))


def _qwen3_omni(settings: Settings) -> Facts:
    return replace(llama(settings), mixture=qwen_mixture(settings))


def _qwen3_vl(settings: Settings) -> Facts:
    mixture = replace(qwen_mixture(settings), renormalizes=True)  # regardless of the file
    return replace(llama(settings), mixture=mixture)


def qwen_mixture(settings: Settings) -> Mixture:
    """Return the facts of Qwen's mixtures of experts, without the shared MLP."""
    every = settings["decoder_sparse_step"]
    dense = settings["mlp_only_layers"]
    return Mixture(
        layers=tuple((n + 1) % every == 0 and n not in dense for n in range(settings["num_hidden_layers"])),
        num_experts=settings["num_experts"],
        top_k=settings["num_experts_per_tok"],
        renormalizes=settings.get("norm_topk_prob", True),
    )


def _mellum(settings: Settings) -> Facts:
    mixture = Mixture(
        layers=by_mlp_types(settings),
        num_experts=settings["num_experts"],
        top_k=settings["num_experts_per_tok"],
        renormalizes=settings["norm_topk_prob"],
    )
    return replace(llama(settings), windows=windows_by_type(settings), mixture=mixture)


def _olmoe(settings: Settings) -> Facts:
    if settings.get("clip_qkv") is not None:
        raise NotKnown("it limits queries, keys and values")
    mixture = Mixture(
        num_experts=settings["num_experts"],
        top_k=settings["num_experts_per_tok"],
        renormalizes=settings["norm_topk_prob"],
    )
    return replace(llama(settings), mixture=mixture)


def _hunyuan(settings: Settings) -> Facts:
    mixture = Mixture(
        num_experts=_of_all_layers(settings["num_experts"]),
        top_k=_of_all_layers(settings["moe_topk"]),
        is_float32=True,
        is_router_adaptable=True,
        has_shared=True,
    )
    return replace(llama(settings), rotates_before_norms=True, mixture=mixture)


def _of_all_layers(number: int | list[int]) -> int:
    """Return a number that files may have once for each layer. Raises NotKnown if layers differ."""
    if not isinstance(number, list):
        return number
    if len(set(number)) != 1:
        raise NotKnown("its layers choose different numbers of experts, or have different ones")
    return number[0]


def _ernie(settings: Settings) -> Facts:
    every = settings["moe_layer_interval"]
    first = settings["moe_layer_start_index"]
    last = settings["moe_layer_end_index"]
    if (settings["moe_norm_min"] or 0) > 1e-12:
        raise NotKnown("it limits what the weights of its experts are divided by")
    mixture = Mixture(
        layers=tuple((n + 1) % every == 0 and first <= n <= last for n in range(settings["num_hidden_layers"])),
        num_experts=settings["moe_num_experts"],
        top_k=settings["moe_k"],
        has_choice_bias=True,
        is_float32=True,
        has_shared=settings["moe_num_shared_experts"] > 0,
    )
    return replace(llama(settings), is_interleaved=True, mixture=mixture)


def _aria(settings: Settings) -> Facts:
    mixture = Mixture(
        num_experts=settings["moe_num_experts"],
        top_k=settings["moe_topk"],
        has_shared=True,
        activation="silu",  # regardless of `hidden_act`
    )
    return replace(llama(settings), mixture=mixture)


def _cohere2_moe(settings: Settings) -> Facts:
    has_shared = settings["num_shared_experts"] > 0
    if has_shared and settings["shared_expert_combination_strategy"] != "sum":
        raise NotKnown("it averages its experts and the MLP that they share")
    is_sigmoid = settings["expert_selection_fn"] == "sigmoid"
    mixture = Mixture(
        layers=by_mlp_types(settings),
        num_experts=settings["num_experts"],
        top_k=settings["num_experts_per_tok"],
        is_sigmoid=is_sigmoid,
        renormalizes=settings["norm_topk_prob"] or not is_sigmoid,
        has_shared=has_shared,
    )
    has_rms = settings["rms_norm_eps"] is not None
    facts = llama(settings, epsilon="rms_norm_eps" if has_rms else "layer_norm_eps")
    windows = windows_by_type(settings)
    dense_rotate = settings["prefix_dense_sliding_window_pattern"] == 1
    return replace(
        facts,
        norm=NormKind(epsilon=facts.norm.epsilon, subtracts_mean=not has_rms),
        windows=windows,
        rotates=tuple(
            window is not None or (dense_rotate and not mixture.is_in(layer)) for layer, window in enumerate(windows)
        ),
        is_interleaved=True,
        is_parallel=True,
        logits_scale=settings["logit_scale"],
        mixture=mixture,
    )


def _gpt_oss(settings: Settings) -> Facts:
    mixture = Mixture(
        num_experts=settings["num_local_experts"],
        top_k=settings["num_experts_per_tok"],
        is_in_turns=True,
        activation=ClampedGate(settings["swiglu_alpha"], settings["swiglu_limit"]),
    )
    return replace(llama(settings), windows=windows_by_type(settings), mixture=mixture)


FAMILIES = (
    Family(type="mixtral", facts=_mixtral, other_names=MIXTRAL),
    Family(type="qwen2_moe", facts=_qwen2_moe, other_names=QWEN),
    Family(type="qwen3_moe", facts=_qwen3_moe),
    Family(type="qwen3_omni_moe_text", facts=_qwen3_omni),
    Family(type="qwen3_vl_moe_text", facts=_qwen3_vl),
    Family(type="mellum", facts=_mellum),
    Family(type="olmoe", facts=_olmoe),
    Family(type="flex_olmo", facts=_olmoe, other_names=NORMS_BEHIND),
    Family(type="hunyuan_v1_moe", facts=_hunyuan, other_names=_HUNYUAN),
    Family(type="ernie4_5_moe", facts=_ernie, other_names=_ERNIE),
    Family(type="cohere2_moe", facts=_cohere2_moe),
    Family(type="aria_text", facts=_aria, other_names=_ARIA, has_transposed_experts=True),
    Family(type="gpt_oss", facts=_gpt_oss, other_names={"router": "mlp.router"}, has_transposed_experts=True),
)
