"""Makes the configurations of families whose GGUF files transformers does not read, or not whole, of their numbers.

Each family is a row of a table: the architecture that a file names, and what the fields of transformers' configuration
are in its numbers. Most fields are the same number in all families (`_FIELDS`); a row has those that are not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from oaiserve.files.gguf import GgufTensor, architecture
from oaiserve.files.metadata_limits import BadFile

# Fields of configurations, and the number of a file that is all of each. One that is missing keeps its default.
_FIELDS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "logit_scale": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "first_k_dense_replace": "leading_dense_block_count",
    "num_dense_layers": "leading_dense_block_count",
    "conv_L_cache": "shortconv.l_cache",
}
_TOKENIZER = "tokenizer.ggml."
_DEFAULT_THETA = 10000.0


class Numbers:
    """The numbers of a file, by the names that they have behind that of the architecture, and its tensors."""

    def __init__(self, values: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
        found = architecture(values)
        if found is None:
            raise BadFile("it does not say how many layers its model has")
        self.architecture, self._values, self.tensors = found, values, tensors

    def get(self, name: str, default: Any = None) -> Any:
        found = self._values.get(f"{self.architecture}.{name}")
        return default if found is None else found

    def __getitem__(self, name: str) -> Any:
        """Return a number. Raises BadFile if there is none of this name."""
        if (found := self.get(name)) is None:
            raise BadFile(f"it has no number {self.architecture}.{name}")
        return found

    def token(self, name: str) -> int | None:
        return self._values.get(f"{_TOKENIZER}{name}_token_id")

    def has(self, pattern: str) -> bool:
        """Return whether a tensor's name has this pattern."""
        return any(re.search(pattern, name) for name in self.tensors)

    def shape(self, pattern: str) -> tuple[int, ...] | None:
        """Return the shape of the first tensor whose name has this pattern, or None if there is none."""
        return next((tensor.shape for name, tensor in self.tensors.items() if re.search(pattern, name)), None)

    @property
    def vocab_size(self) -> int:
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise BadFile("it has no embedding")
        return embedding.shape[0]

    @property
    def num_layers(self) -> int:
        """Return the number of layers, without those behind them that only guess further tokens."""
        return int(self["block_count"] - self.get("nextn_predict_layers", 0))

    def of_layers(self, name: str) -> list[Any]:
        """Return a number of each layer, of which a file has one for all, or a list."""
        found = self[name]
        return found[: self.num_layers] if isinstance(found, list) else [found] * self.num_layers

    @property
    def head_dim(self) -> int:
        heads = self.get("attention.head_count") or 1  # a model without attention has none
        return int(self.get("attention.key_length") or self["embedding_length"] // heads)


Fields = dict[str, Any]


def _rope(numbers: Numbers) -> Fields:
    """Return the parameters of rotary embeddings."""
    rope: Fields = {"rope_type": "default", "rope_theta": numbers.get("rope.freq_base", _DEFAULT_THETA)}
    rotated = numbers.get("rope.dimension_count", numbers.head_dim)
    if rotated < numbers.head_dim:
        rope["partial_rotary_factor"] = rotated / numbers.head_dim
    return rope | _scaling(numbers)


def _scaling(numbers: Numbers) -> Fields:
    kind, factor = numbers.get("rope.scaling.type"), numbers.get("rope.scaling.factor")
    if kind == "linear" and factor is not None:
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn" or factor is None:
        return {}
    names = {
        "original_max_position_embeddings": "original_context_length",
        "attention_factor": "attn_factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    found = {field: numbers.get(f"rope.scaling.{name}") for field, name in names.items()}
    return {"rope_type": "yarn", "factor": factor} | {field: n for field, n in found.items() if n is not None}


def _windows(numbers: Numbers) -> Fields:
    """Return which layers have a sliding window, if the file says it."""
    pattern = numbers.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        return {}
    return {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern]}


def _mamba2(numbers: Numbers) -> Fields:
    return {
        "mamba_d_conv": numbers["ssm.conv_kernel"],
        "mamba_d_state": numbers["ssm.state_size"],
        "mamba_n_groups": numbers["ssm.group_count"],
        "mamba_n_heads": numbers["ssm.time_step_rank"],
        "mamba_d_head": numbers["ssm.inner_size"] // numbers["ssm.time_step_rank"],
        "mamba_conv_bias": numbers.has(r"ssm_conv1d\.bias$"),
        "mamba_proj_bias": numbers.has(r"ssm_(in|out)\.bias$"),
    }


def _granite(numbers: Numbers) -> Fields:
    return {
        "attention_multiplier": numbers.get("attention.scale", 1.0),
        "embedding_multiplier": numbers.get("embedding_scale", 1.0),
        "residual_multiplier": numbers.get("residual_scale", 1.0),
        "logits_scaling": numbers.get("logit_scale", 1.0),
    }


def _granite_moe(numbers: Numbers) -> Fields:
    shared = numbers.get("expert_shared_feed_forward_length")
    kind = {} if shared is None else {"model_type": "granitemoeshared", "shared_intermediate_size": shared}
    return _granite(numbers) | kind


def _granite_hybrid(numbers: Numbers) -> Fields:
    heads = numbers.of_layers("attention.head_count_kv")
    shared = numbers.get("expert_shared_feed_forward_length", numbers.get("feed_forward_length"))
    return (
        _granite(numbers)
        | _mamba2(numbers)
        | {
            "num_key_value_heads": max(heads) or numbers["attention.head_count"],
            "layer_types": ["full_attention" if number else "linear_attention" for number in heads],
            "num_local_experts": numbers.get("expert_count", 0),
            "shared_intermediate_size": shared,
            "position_embedding_type": "rope" if numbers.get("rope.scaling.finetuned") else None,
            "mamba_expand": numbers["ssm.inner_size"] // numbers["embedding_length"],
        }
    )


def _falcon_h1(numbers: Numbers) -> Fields:
    """Return what Falcon H1 has beside the rest. Its multipliers are part of the weights in a file."""
    return _mamba2(numbers) | {
        "mamba_d_ssm": numbers["ssm.inner_size"],
        "mamba_rms_norm": numbers.has(r"ssm_norm\.weight$"),
        "mamba_norm_before_gate": False,
    }


def _nemotron_h(numbers: Numbers) -> Fields:
    heads, widths = numbers.of_layers("attention.head_count_kv"), numbers.of_layers("feed_forward_length")
    is_mixture = [f"blk.{layer}.ffn_gate_inp.weight" in numbers.tensors for layer in range(len(heads))]
    has_mlp = [f"blk.{layer}.ffn_up.weight" in numbers.tensors for layer in range(len(heads))]
    kinds = [
        "full_attention" if of_keys else "moe" if mixture else "mlp" if mlp else "linear_attention"
        for of_keys, mixture, mlp in zip(heads, is_mixture, has_mlp, strict=True)
    ]
    inner = numbers.shape(r"ffn_up\.weight$")
    return {
        "layers_block_type": kinds,
        "num_key_value_heads": max(heads) or numbers["attention.head_count"],
        "intermediate_size": max(widths) if inner is None else inner[0],
        "ssm_state_size": numbers["ssm.state_size"],
        "n_groups": numbers["ssm.group_count"],
        "mamba_num_heads": numbers["ssm.time_step_rank"],
        "mamba_head_dim": numbers["ssm.inner_size"] // numbers["ssm.time_step_rank"],
        "conv_kernel": numbers["ssm.conv_kernel"],
        "layer_norm_epsilon": numbers.get("attention.layer_norm_rms_epsilon")
        or numbers["attention.layer_norm_epsilon"],
        "moe_shared_expert_intermediate_size": numbers.get("expert_shared_feed_forward_length", 0),
        "moe_latent_size": numbers.get("moe_latent_size"),
        "use_conv_bias": numbers.has(r"ssm_conv1d\.bias$"),
        "attention_bias": numbers.has(r"attn_q\.bias$"),
        "mlp_bias": numbers.has(r"ffn_up\.bias$"),
        "use_bias": numbers.has(r"ssm_(in|out)\.bias$"),
        "norm_topk_prob": numbers.get("expert_weights_norm", False),
    }


def _mamba(numbers: Numbers) -> Fields:
    return {
        "state_size": numbers["ssm.state_size"],
        "conv_kernel": numbers["ssm.conv_kernel"],
        "expand": numbers["ssm.inner_size"] // numbers["embedding_length"],
        "layer_norm_epsilon": numbers["attention.layer_norm_rms_epsilon"],
        "use_conv_bias": numbers.has(r"ssm_conv1d\.bias$"),
        "use_bias": numbers.has(r"ssm_(in|out)\.bias$"),
    }


def _mamba1(numbers: Numbers) -> Fields:
    kind = {"model_type": "falcon_mamba"} if numbers.get("ssm.dt_b_c_rms") else {}
    return _mamba(numbers) | kind | {"time_step_rank": numbers["ssm.time_step_rank"]}


def _mamba2_alone(numbers: Numbers) -> Fields:
    return _mamba(numbers) | {
        "num_heads": numbers["ssm.time_step_rank"],
        "head_dim": numbers["ssm.inner_size"] // numbers["ssm.time_step_rank"],
        "n_groups": numbers["ssm.group_count"],
    }


def _convolutions(numbers: Numbers) -> Fields:
    """Return what LFM2 has beside the rest: layers without keys are short convolutions."""
    heads = numbers.of_layers("attention.head_count_kv")
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if number else "conv" for number in heads],
        "conv_bias": numbers.has(r"shortconv\.in_proj\.bias$"),
        "block_auto_adjust_ff_dim": False,  # the file has the width that the configuration would be adjusted to
        "use_expert_bias": numbers.has(r"exp_probs_b"),
    }


def _delta(numbers: Numbers) -> Fields:
    """Return what Qwen3-Next and Qwen3.5 have beside the rest."""
    interval, heads = numbers.get("full_attention_interval", 4), numbers["ssm.time_step_rank"]
    keeps_state = numbers.get("attention.recurrent_layers")
    if not isinstance(keeps_state, list):
        keeps_state = [(layer + 1) % interval != 0 for layer in range(numbers.num_layers)]
    return {
        "layer_types": ["linear_attention" if keeps else "full_attention" for keeps in keeps_state],
        "linear_conv_kernel_dim": numbers["ssm.conv_kernel"],
        "linear_key_head_dim": numbers["ssm.state_size"],
        "linear_num_key_heads": numbers["ssm.group_count"],
        "linear_num_value_heads": heads,
        "linear_value_head_dim": numbers["ssm.inner_size"] // heads,
    }


def _deepseek(numbers: Numbers) -> Fields:
    """Return what DeepSeek V2 and V3 have beside the rest. GLM-4.7 Flash and Kimi K2 have the same files."""
    rotated, width = numbers["rope.dimension_count"], numbers.get("attention.key_length_mla")
    values = numbers.get("attention.value_length_mla")
    if width is None or values is None:  # older files have the widths of heads in these
        width, values = numbers["attention.key_length"], numbers["attention.value_length"]
    has_bias = numbers.has(r"exp_probs_b")
    rope = {"rope_type": "default", "rope_theta": numbers.get("rope.freq_base", _DEFAULT_THETA)} | _scaling(numbers)
    if (log_factor := numbers.get("rope.scaling.yarn_log_multiplier")) is not None:
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), round(log_factor * 10, 6))
    groups = numbers.get("expert_group_count", 1)
    return {
        "model_type": "deepseek_v3" if has_bias else "deepseek_v2",
        "topk_method": "greedy" if groups == 1 else "group_limited_greedy",
        "num_key_value_heads": numbers["attention.head_count"],
        "head_dim": rotated,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": values,
        "kv_lora_rank": numbers["attention.kv_lora_rank"],
        "q_lora_rank": numbers.get("attention.q_lora_rank"),
        "rope_parameters": rope,
        "norm_topk_prob": numbers.get("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": numbers.get("expert_group_used_count", 1),
    }


def _glm4_moe(numbers: Numbers) -> Fields:
    return {"use_qk_norm": numbers.has("attn_q_norm"), "norm_topk_prob": numbers.get("expert_weights_norm", True)}


def _dots1(numbers: Numbers) -> Fields:
    return {"norm_topk_prob": numbers.get("expert_weights_norm", False), "sliding_window": None}


def _ernie_moe(numbers: Numbers) -> Fields:
    return {
        "moe_num_experts": numbers["expert_count"],
        "moe_k": numbers["expert_used_count"],
        "moe_layer_start_index": numbers["leading_dense_block_count"],
        "moe_layer_interval": numbers.get("interleave_moe_layer_step", 1),
        "moe_num_shared_experts": numbers.get("expert_shared_count", 0),
    }


def _stablelm(numbers: Numbers) -> Fields:
    return {
        "use_qkv_bias": numbers.has(r"attn_q\.bias$"),
        "qk_layernorm": numbers.has("attn_q_norm"),
        "use_parallel_residual": numbers.get("use_parallel_residual", False),
        "partial_rotary_factor": numbers["rope.dimension_count"] / numbers.head_dim,
    }


def _nemotron(numbers: Numbers) -> Fields:
    return {"norm_eps": numbers["attention.layer_norm_epsilon"]}


def _olmo2(numbers: Numbers) -> Fields:
    if numbers.get("attention.sliding_window") is None:
        return {}
    return {"model_type": "olmo3"} | _windows(numbers)


def _exaone4(numbers: Numbers) -> Fields:
    slides = numbers.get("attention.sliding_window")
    return {"sliding_window": slides} | (
        _windows(numbers) if slides else {"layer_types": ["full_attention"] * numbers.num_layers}
    )


def _gemma3n(numbers: Numbers) -> Fields:
    sparsity = numbers["activation_sparsity_scale"]
    layer_inputs = numbers.shape(r"^per_layer_token_embd")
    return _windows(numbers) | {
        "intermediate_size": numbers.of_layers("feed_forward_length"),
        "num_kv_shared_layers": numbers["attention.shared_kv_layers"],
        "altup_num_inputs": numbers["altup.num_inputs"],
        "altup_active_idx": numbers["altup.active_idx"],
        "hidden_size_per_layer_input": numbers["embedding_length_per_layer_input"],
        "vocab_size_per_layer_input": 0 if layer_inputs is None else layer_inputs[0],
        "laurel_rank": (numbers.shape(r"laurel_l\.weight$") or (64,))[0],
        # The file has what a normal distribution's inverse makes of the part of a layer's gates that are 0.
        "activation_sparsity_pattern": [
            0.5 * math.erfc(-scale / math.sqrt(2)) if math.isfinite(scale) else 0.0 for scale in sparsity
        ],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": numbers["rope.freq_base"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": numbers.get("rope.freq_base_swa", 1e4)},
        },
    }


def _gemma4(numbers: Numbers) -> Fields:
    """Return what Gemma 4 has beside the rest. Of wide heads, a quarter is rotated in all published models."""
    slides = numbers.of_layers("attention.sliding_window_pattern")
    heads, widths = numbers.of_layers("attention.head_count_kv"), numbers.of_layers("feed_forward_length")
    shared = numbers.get("attention.shared_kv_layers", 0)
    wide = [layer for layer, own in enumerate(slides) if not own]
    with_values = [layer for layer in wide if layer < numbers.num_layers - shared]
    of_windows = [number for number, own in zip(heads, slides, strict=True) if own] or heads
    layer_inputs = numbers.shape(r"^per_layer_token_embd")
    return _windows(numbers) | {
        "head_dim": numbers["attention.key_length_swa"],
        "global_head_dim": numbers["attention.key_length"],
        "num_key_value_heads": of_windows[0],
        "num_global_key_value_heads": heads[wide[0]] if wide else None,
        "attention_k_eq_v": any(f"blk.{layer}.attn_v.weight" not in numbers.tensors for layer in with_values),
        "intermediate_size": min(widths),
        "use_double_wide_mlp": max(widths) > min(widths),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": numbers.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": numbers.vocab_size if layer_inputs is None else layer_inputs[0],
        "enable_moe_block": numbers.has("ffn_gate_inp"),
        "top_k_experts": numbers.get("expert_used_count"),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": numbers["rope.freq_base"],
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": numbers.get("rope.freq_base_swa", 1e4)},
        },
    }


# By architecture: transformers' type of the model, and its fields beside the common ones.
_FAMILIES: dict[str, tuple[str, Callable[[Numbers], Fields]]] = {
    "apertus": ("apertus", lambda _: {}),
    "arcee": ("arcee", lambda _: {}),
    "cohere2": ("cohere2", lambda _: {}),
    "command-r": ("cohere", lambda numbers: {"use_qk_norm": numbers.has("attn_q_norm")}),
    "deepseek2": ("deepseek_v2", _deepseek),
    "dots1": ("dots1", _dots1),
    "ernie4_5": ("ernie4_5", lambda _: {}),
    "ernie4_5-moe": ("ernie4_5_moe", _ernie_moe),
    "exaone4": ("exaone4", _exaone4),
    "falcon-h1": ("falcon_h1", _falcon_h1),
    "gemma": ("gemma", lambda _: {}),
    "gemma4": ("gemma4_text", _gemma4),
    "gemma3n": ("gemma3n_text", _gemma3n),
    "glm4": ("glm4", lambda _: {}),
    "glm4moe": ("glm4_moe", _glm4_moe),
    "granite": ("granite", _granite),
    "granitehybrid": ("granitemoehybrid", _granite_hybrid),
    "granitemoe": ("granitemoe", _granite_moe),
    "hunyuan-dense": ("hunyuan_v1_dense", lambda _: {}),
    "hunyuan-moe": ("hunyuan_v1_moe", lambda numbers: {"moe_topk": numbers["expert_used_count"]}),
    "lfm2": ("lfm2", _convolutions),
    "lfm2moe": ("lfm2_moe", _convolutions),
    "mamba": ("mamba", _mamba1),
    "mamba2": ("mamba2", _mamba2_alone),
    "minimax-m2": ("minimax_m2", lambda _: {}),
    "nemotron": ("nemotron", _nemotron),
    "nemotron_h": ("nemotron_h", _nemotron_h),
    "nemotron_h_moe": ("nemotron_h", _nemotron_h),
    "olmo": ("olmo", lambda numbers: {"clip_qkv": numbers.get("attention.clamp_kqv")}),
    "olmo2": ("olmo2", _olmo2),
    "olmoe": ("olmoe", lambda _: {"norm_topk_prob": False}),
    "qwen35": ("qwen3_5_text", _delta),
    "qwen35moe": ("qwen3_5_moe_text", _delta),
    "qwen3next": ("qwen3_next", _delta),
    "seed_oss": ("seed_oss", lambda _: {}),
    "smollm3": ("smollm3", lambda _: {}),
    "stablelm": ("stablelm", _stablelm),
    "starcoder2": ("starcoder2", lambda _: {}),
}


ARCHITECTURES = _FAMILIES.keys()  # whose numbers are read here


def read_numbers(values: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> PreTrainedConfig:
    """Return the configuration of a file's model. Raises BadFile for a file that does not have all that it needs."""
    numbers = Numbers(values, tensors)
    model_type, of_family = _FAMILIES[numbers.architecture]
    own = of_family(numbers)
    kind: Any = CONFIG_MAPPING[own.pop("model_type", model_type)]
    fields = {field: numbers.get(name) for field, name in _FIELDS.items()}
    ends = {end for name in ("eos", "eot", "eom") if (end := numbers.token(name)) is not None}
    fields |= {
        "vocab_size": numbers.vocab_size,
        "num_hidden_layers": numbers.num_layers,
        "rope_parameters": _rope(numbers),
        "attention_bias": numbers.has(r"attn_(q|qkv)\.bias$"),
        "attention_out_bias": numbers.has(r"attn_output\.bias$"),
        "mlp_bias": numbers.has(r"ffn_up\.bias$"),
        "use_bias": numbers.has(r"ffn_up\.bias$"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": numbers.token("bos"),
        "eos_token_id": sorted(ends) if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": numbers.token("padding"),
    }
    if (downs := numbers.shape(r"ffn_down_exps\.weight$")) is not None:
        fields["moe_intermediate_size"] = downs[-1]
    if (downs := numbers.shape(r"ffn_down_shexp\.weight$")) is not None:
        fields["shared_expert_intermediate_size"] = downs[-1]
    known = {field: value for field, value in fields.items() if value is not None and hasattr(kind, field)}
    if "head_dim" in known:
        known["head_dim"] = numbers.head_dim
    found: PreTrainedConfig = kind(**known | own)
    return found
