"""OLMo hybrid: layers with delta nets are arranged like Llama's, and layers with attention like OLMo 2's."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.decoder.description import DeltaNet, Layer, NotKnown
from oaiserve.engine.decoder.facts import Facts, llama, with_mixers
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.mixers import delta_net
from oaiserve.engine.decoder.reader import Reader
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.names import Names

_NAMES: Names = {
    "attention_norm": ("attention_layer_norm", "input_layernorm"),
    "mlp_norm": ("feedforward_layer_norm", "post_attention_layernorm"),
    "mlp_out_norm": "post_feedforward_layernorm",
    **{f"mixer.{role}": f"linear_attn.{role}_proj" for role in ("q", "k", "v", "b", "a")},
    "mixer.z": "linear_attn.g_proj",
    **{f"mixer.conv_{role}": f"linear_attn.{role}_conv1d" for role in ("q", "k", "v")},
    "mixer.A_log": "linear_attn.A_log",
    "mixer.dt_bias": "linear_attn.dt_bias",
    "mixer.norm": "linear_attn.o_norm",
    "mixer.out": "linear_attn.o_proj",
}


def _facts(settings: Settings) -> Facts:
    facts = with_mixers(llama(settings), settings)
    rope = settings["rope_parameters"]
    if "rope_theta" not in rope:
        raise NotKnown("its rotary embeddings depend on the types of layers")
    rotates = rope["rope_theta"] is not None
    return replace(facts, rotates=(rotates,) * settings["num_hidden_layers"])


def _mixer(reader: Reader, facts: Facts, settings: Settings) -> DeltaNet:
    factor = 2.0 if settings["linear_allow_neg_eigval"] else 1.0
    return delta_net(reader, facts, settings, epsilon=1e-5, rate_factor=factor, has_float32_speeds=True)


def _with_norms_behind(layer: Layer, _reader: Reader, _facts: Facts, _settings: Settings) -> Layer:
    """Move the norm that is before the MLP in layers with a delta net, and after attention in the others."""
    if layer.attention is None:
        return layer
    return replace(layer, mlp_norm=None, attention_out_norm=layer.mlp_norm)


FAMILIES = (Family(type="olmo_hybrid", facts=_facts, other_names=_NAMES, mixer=_mixer, adjust=_with_norms_behind),)
