"""Small random encoders of each of transformers' types that embed or score texts."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

_SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 258, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
_XLM = {"vocab_size": 300, "emb_dim": 32, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 258, "pad_index": 0}
_RELATIVE = {**_SIZES, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}

# Whose attention runs packed, and is that of transformers.
PACKED: dict[str, dict[str, Any]] = {
    "albert": _SIZES | {"embedding_size": 16},
    "bert": _SIZES,
    "bert-generation": _SIZES,
    "camembert": _SIZES | {"pad_token_id": 1},
    "data2vec-text": _SIZES | {"pad_token_id": 1},
    "distilbert": {"vocab_size": 300, "dim": 32, "hidden_dim": 64, "n_layers": 3, "n_heads": 4},
    "electra": _SIZES | {"embedding_size": 16},
    "ernie": _SIZES,
    "eurobert": _SIZES,
    "gte": _SIZES,
    "jina_embeddings_v3": _SIZES | {"pad_token_id": 1},
    "modernbert": _SIZES | {"cls_token_id": 2, "sep_token_id": 3, "local_attention": 16},
    "nomic_bert": _SIZES,
    "roberta": _SIZES | {"pad_token_id": 1},
    "roberta-prelayernorm": _SIZES | {"pad_token_id": 1},
    "roc_bert": _SIZES | {"pronunciation_vocab_size": 10, "shape_vocab_size": 10},
    "xlm-roberta": _SIZES | {"pad_token_id": 1},
    "xlm-roberta-xl": _SIZES | {"pad_token_id": 1},
}
# Their positions are distances alone.
ROTARY = {"eurobert", "gte", "jina_embeddings_v3", "modernbert", "nomic_bert"}
# Which run in transformers' own code.
OWN: dict[str, dict[str, Any]] = {
    "big_bird": _SIZES | {"block_size": 16, "num_random_blocks": 2},  # full attention up to 144 tokens
    "convbert": _SIZES | {"embedding_size": 32},
    "deberta": _RELATIVE,
    "deberta-v2": _RELATIVE,
    "esm": _SIZES | {"mask_token_id": 4},
    "flaubert": _XLM,
    "fnet": _SIZES,
    "ibert": _SIZES,
    "layoutlm": _SIZES,
    "longformer": _SIZES | {"attention_window": 16, "pad_token_id": 1},
    "luke": _SIZES | {"pad_token_id": 1, "entity_vocab_size": 10},
    "megatron-bert": _SIZES,
    "mobilebert": _SIZES | {"embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    "mpnet": _SIZES | {"pad_token_id": 1},
    "mra": _SIZES,
    "nystromformer": _SIZES,
    "rembert": _SIZES | {"input_embedding_size": 16, "output_embedding_size": 16},
    "roformer": _SIZES,
    "splinter": _SIZES,
    "squeezebert": _SIZES | {"embedding_size": 32},
    "tapas": _SIZES,
    "xlm": _XLM,
    "xlnet": {"vocab_size": 300, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 64},
    "yoso": _SIZES,
}


def encoder_config(name: str) -> PreTrainedConfig:
    return CONFIG_MAPPING[name](**(PACKED | OWN)[name])
