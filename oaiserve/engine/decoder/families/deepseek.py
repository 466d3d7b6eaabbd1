"""DeepSeek V2 and V3, and other models with latent attention."""

from __future__ import annotations

import math
from dataclasses import replace

from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.experts import after_dense_layers, by_mlp_types, grouped_mixture
from oaiserve.engine.decoder.facts import Facts, Latent, Mixture, llama
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.rotary import scaling_with_yarn
from oaiserve.engine.decoder.settings import Settings


def latent_sizes(settings: Settings) -> Latent:
    return Latent(
        query_rank=settings["q_lora_rank"],
        rank=settings["kv_lora_rank"],
        own_dim=settings["qk_nope_head_dim"],
        shared_dim=settings["qk_rope_head_dim"],
        value_dim=settings["v_head_dim"],
    )


def _latent(settings: Settings) -> Facts:
    return replace(
        llama(settings),
        scaling=scaling_with_yarn(settings, settings["qk_head_dim"] ** -0.5),
        latent=latent_sizes(settings),
    )


def _deepseek_v2(settings: Settings) -> Facts:
    method = settings["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise NotKnown(f"it chooses experts by the method '{method}'")
    has_groups = method == "group_limited_greedy"
    groups = settings["n_group"]  # has no effect if the method is "greedy"
    top_groups = settings["topk_group"]
    mixture = Mixture(
        layers=after_dense_layers(settings),
        num_experts=settings["n_routed_experts"],
        top_k=settings["num_experts_per_tok"],
        groups=groups if has_groups else 1,
        top_groups=top_groups if has_groups else 1,
        renormalizes=False,  # regardless of `norm_topk_prob`
        scale=float(settings["routed_scaling_factor"]),
        is_float32=True,
        has_shared=True,
    )
    return replace(_latent(settings), is_interleaved=True, mixture=mixture)


def _deepseek_v3(settings: Settings) -> Facts:
    return replace(
        _latent(settings),
        mtp_layers=settings["num_mtp_layers"] or 0,
        is_interleaved=settings["rope_interleave"],
        mixture=grouped_mixture(settings, after_dense_layers(settings), settings["n_routed_experts"]),
    )


def _glm4_moe_lite(settings: Settings) -> Facts:
    return replace(
        _latent(settings),
        mtp_layers=1,
        is_interleaved=settings["rope_interleave"],
        mixture=grouped_mixture(settings, by_mlp_types(settings), settings["n_routed_experts"]),
    )


def _youtu(settings: Settings) -> Facts:
    return replace(_latent(settings), is_interleaved=settings["rope_interleave"])


def _minicpm3(settings: Settings) -> Facts:
    return replace(
        _latent(settings),
        embedding_scale=float(settings["scale_emb"]),
        rounds_embedding_scale=True,
        residual_scale=settings["scale_depth"] / math.sqrt(settings["num_hidden_layers"]),
        logits_scale=1 / (settings["hidden_size"] / settings["dim_model_base"]),
    )


FAMILIES = (
    Family(type="deepseek_v2", facts=_deepseek_v2),
    Family(type="deepseek_v3", facts=_deepseek_v3),
    Family(type="glm4_moe_lite", facts=_glm4_moe_lite),
    Family(type="minicpm3", facts=_minicpm3),
    Family(type="youtu", facts=_youtu),
)
