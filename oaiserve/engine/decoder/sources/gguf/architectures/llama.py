"""Llama, Mistral and Mixtral, Qwen 2 and 3, and similar models, some of them with experts."""

from __future__ import annotations

from oaiserve.engine.decoder.sources.gguf.architecture import NORM_BEFORE_MLP, TURNED, Architecture
from oaiserve.engine.decoder.sources.gguf.metadata import Fields, Metadata, axes, rope
from oaiserve.engine.decoder.sources.names import Names


def _llama(metadata: Metadata) -> Fields:
    """Read the fields of Llama or Mixtral. Their files name the same architecture."""
    fields = {"head_dim": metadata.get("attention.key_length", metadata.get("rope.dimension_count"))}
    if not metadata.has(r"^blk\.0\.ffn_gate_exps\.weight$"):
        return fields
    return fields | {"model_type": "mixtral", "num_experts_per_tok": metadata["expert_used_count"]}


def _mistral3(metadata: Metadata) -> Fields:
    """Read the fields of Ministral 3 or Mistral Small 3.1. Their files name the same architecture."""
    fields = {"head_dim": metadata.head_dim}
    beta = metadata.get("attention.temperature_scale")
    if beta is None:
        return fields | {"model_type": "llama"}
    scaled = rope(metadata, metadata.head_dim) | {"llama_4_scaling_beta": beta}
    if all_dim := metadata.get("rope.scaling.yarn_log_multiplier"):
        scaled |= {"mscale": 1.0, "mscale_all_dim": all_dim}  # llama.cpp uses 1 for mscale, too
    return fields | {"rope_parameters": scaled}


def _deep(metadata: Metadata) -> Fields:
    return axes(metadata) | {"num_deep_layers": metadata.get("n_deepstack_layers", 0)}


def _deep_with_experts(metadata: Metadata) -> Fields:
    return _deep(metadata) | {"norm_topk_prob": True}


def _phi3(metadata: Metadata) -> Fields:
    """Read the fields of Phi-3. In files of Phi-4, the window is 0.

    Models for long texts have tensors with frequency factors: those for texts up to the original length, which are
    read, and those for longer texts.
    """
    fields: Fields = {"sliding_window": metadata.get("attention.sliding_window") or None}
    original = metadata.get("rope.scaling.original_context_length")
    if original is None:
        return fields
    fields["original_max_position_embeddings"] = original
    if (factors := metadata.shape(r"^rope_factors_short\.weight$")) is not None:
        ones = [1.0] * factors[0]
        long: Fields = {"rope_type": "longrope", "short_factor": ones, "long_factor": ones}
        long["original_max_position_embeddings"] = original
        if (scale := metadata.get("rope.scaling.attn_factor")) is not None:
            long["attention_factor"] = scale
        fields["rope_parameters"] = rope(metadata, metadata.head_dim) | long
    return fields


_UP_HAS_BOTH: Names = {"gate_up": "ffn_up", "up": ()}
_PHI3: Names = {**_UP_HAS_BOTH, "frequency_factors": ("rope_freqs.weight", "rope_factors_short.weight")}
ARCHITECTURES = (
    *(Architecture(name=name, type="llama", fields=_llama, rows=TURNED) for name in ("llama", "mistral")),
    Architecture(name="mistral3", type="ministral3", fields=_mistral3, rows=TURNED),
    Architecture(name="qwen2", type="qwen2"),
    Architecture(name="qwen2vl", type="qwen2", fields=axes),
    Architecture(name="qwen2moe", type="qwen2_moe"),
    Architecture(name="qwen3", type="qwen3"),
    Architecture(name="qwen3vl", type="qwen3", fields=_deep),
    Architecture(name="qwen3moe", type="qwen3_moe", fields=lambda _: {"norm_topk_prob": True}),
    Architecture(name="qwen3vlmoe", type="qwen3_moe", fields=_deep_with_experts),
    Architecture(name="phi3", type="phi3", fields=_phi3, names=_PHI3, unused=("rope_factors_long.weight",)),
    Architecture(name="arcee", type="arcee", rows=TURNED),
    Architecture(name="seed_oss", type="seed_oss", names=NORM_BEFORE_MLP),
    Architecture(name="smollm3", type="smollm3", rows=TURNED),
    Architecture(name="ernie4_5", type="ernie4_5"),
    Architecture(name="hunyuan-dense", type="hunyuan_v1_dense"),
    Architecture(name="glm4", type="glm4", names=_UP_HAS_BOTH),
)
