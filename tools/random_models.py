"""Models with random weights: small ones of every family for correctness, and the shapes of real ones for speed.

The tests and the device check use the same ones.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # far from uniform, so that a wrong position or window changes the answer
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SMALL_GPT2 = {
    "vocab_size": 97,
    "n_positions": 128,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "gpt2": GPT2Config(**_SMALL_GPT2),
    "qwen3": Qwen3Config(**SMALL),
    "mistral": MistralConfig(**SMALL, sliding_window=6),
    "gemma2": Gemma2Config(
        **SMALL, sliding_window=6, layer_types=_MIXED, attn_logit_softcapping=5.0, query_pre_attn_scalar=8
    ),
    "gemma3": Gemma3TextConfig(**SMALL, sliding_window=6, layer_types=_MIXED, query_pre_attn_scalar=8),
}

# Shapes only: the numbers of the published configs, none of the weights.
REAL_SHAPES: dict[str, PreTrainedConfig] = {
    "smollm2-135m": LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
    "llama-3.2-1b": LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
    "qwen3-8b": Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=8192, tie_word_embeddings=False,
    ),
}  # fmt: skip


def random_model(
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attn_implementation: str = "eager",
    seed: int = 0,
) -> PreTrainedModel:
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    return model.to(device=device, dtype=dtype).eval()  # type: ignore[no-any-return]


@torch.inference_mode()
def generate(model: PreTrainedModel, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """transformers' own greedy answers, one prompt at a time."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, for models whose weights mean nothing anyway."""
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = RustTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
