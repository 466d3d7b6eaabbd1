"""Families with LayerNorms. Most are older than Llama, and name their modules differently."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.decoder.description import Layer, NotKnown
from oaiserve.engine.decoder.facts import Facts, windows_of_all, with_layer_norms
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.reader import Reader
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.names import Names

_QK_NORMS: Names = {"q_norm": "self_attn.q_layernorm", "k_norm": "self_attn.k_layernorm"}
_PHI: Names = {
    **_QK_NORMS,
    "final_norm": "model.final_layernorm",
    "out": "self_attn.dense",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
_PERSIMMON: Names = {
    **_PHI,
    "qkv": "self_attn.query_key_value",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
_GPT_NEOX: Names = {
    "embedding": "gpt_neox.embed_in",
    "layers.{}": "gpt_neox.layers.{}",
    "final_norm": "gpt_neox.final_layer_norm",
    "head": ("lm_head", "embed_out"),
    "qkv": "attention.query_key_value",
    "out": "attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
_GPT2: Names = {
    "embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "layers.{}": "transformer.h.{}",
    "final_norm": "transformer.ln_f",
    "attention_norm": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_OPT: Names = {
    "embedding": "model.decoder.embed_tokens",
    "position_embedding": "model.decoder.embed_positions",
    "layers.{}": "model.decoder.layers.{}",
    "final_norm": "model.decoder.final_layer_norm",
    "attention_norm": "self_attn_layer_norm",
    "out": "self_attn.out_proj",
    "mlp_norm": "final_layer_norm",
    "up": "fc1",
    "down": "fc2",
}


def _phi(settings: Settings) -> Facts:
    return replace(with_layer_norms(settings), is_parallel=True)


def _by_head(settings: Settings) -> Facts:
    facts = with_layer_norms(settings)
    return replace(facts, kv_heads=facts.heads, qkv_parts=3)


def _gpt_neox(settings: Settings) -> Facts:
    return replace(_by_head(settings), is_parallel=settings["use_parallel_residual"])


def _stablelm(settings: Settings) -> Facts:
    if settings["qk_layernorm"]:
        raise NotKnown("the norms of its queries and keys have weights of their own for each head")
    return replace(with_layer_norms(settings), is_parallel=settings["use_parallel_residual"])


def _refuse_two_norms(layer: Layer, reader: Reader, facts: Facts, _settings: Settings) -> Layer:
    """Raise NotKnown if a layer has a norm before the MLP although its MLP reads the input of attention."""
    if facts.is_parallel and reader.has("mlp_norm"):
        raise NotKnown("its files and its use_parallel_residual disagree")
    return layer


def _nemotron(settings: Settings) -> Facts:
    facts = with_layer_norms(settings, epsilon="norm_eps")
    return replace(facts, norm=replace(facts.norm, adds_one=True))


def _starcoder2(settings: Settings) -> Facts:
    return replace(with_layer_norms(settings, epsilon="norm_epsilon"), windows=windows_of_all(settings))


def _gpt(settings: Settings) -> Facts:
    if settings["add_cross_attention"]:
        raise NotKnown("it attends to another text")
    facts = with_layer_norms(settings, epsilon="layer_norm_epsilon", function="activation_function")
    scaling = facts.scaling if settings["scale_attn_weights"] else 1.0
    return replace(facts, kv_heads=facts.heads, rotates=(False,) * facts.num_layers, scaling=scaling)


def _gpt2(settings: Settings) -> Facts:
    return replace(_gpt(settings), scaling_falls=settings["scale_attn_by_inverse_layer_idx"])


def _gpt_bigcode(settings: Settings) -> Facts:
    facts = _gpt(settings)
    if settings["multi_query"]:
        return replace(facts, kv_heads=1)
    return replace(facts, qkv_parts=3)


def _opt(settings: Settings) -> Facts:
    if not settings["do_layer_norm_before"]:
        raise NotKnown("it norms the hidden state itself")
    if settings["_remove_final_layer_norm"]:
        raise NotKnown("it has no norm behind its layers")
    if not settings["layer_norm_elementwise_affine"]:
        raise NotKnown("its norms have no weights")
    if settings["word_embed_proj_dim"] != settings["hidden_size"]:
        raise NotKnown("it projects its embedding")
    facts = with_layer_norms(settings, epsilon=1e-5, function="activation_function")
    return replace(facts, kv_heads=facts.heads, rotates=(False,) * facts.num_layers, first_position=2)


FAMILIES = (
    Family(type="gpt2", facts=_gpt2, other_names=_GPT2, is_transposed=True),
    Family(type="gpt_bigcode", facts=_gpt_bigcode, other_names=_GPT2),
    Family(type="gpt_neox", facts=_gpt_neox, other_names=_GPT_NEOX),
    Family(type="jais2", facts=with_layer_norms),
    Family(type="nemotron", facts=_nemotron),
    Family(type="opt", facts=_opt, other_names=_OPT),
    Family(type="persimmon", facts=_by_head, other_names=_PERSIMMON),
    Family(type="phi", facts=_phi, other_names=_PHI),
    Family(type="stablelm", facts=_stablelm, adjust=_refuse_two_norms),
    Family(type="starcoder2", facts=_starcoder2, other_names={"up": "mlp.c_fc", "down": "mlp.c_proj"}),
)
