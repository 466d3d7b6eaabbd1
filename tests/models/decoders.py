"""Makes models with random weights: small ones of every family for correctness, and real shapes for speed.

The tests and the GPU check use the same models.
"""

import copy
from itertools import chain, islice, product
from string import ascii_lowercase
from typing import Any

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

_RANGE = {"initializer_range": 0.3}  # far from uniform, so that a wrong position or window changes the answer
_TOKENS = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {
    **_TOKENS, "pad_token_id": 0, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, **_RANGE,
}  # fmt: skip
_SMALL_GPT2 = {**_TOKENS, "n_positions": 128, "n_embd": 32, "n_layer": 3, "n_head": 4, **_RANGE}
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
LLAMA_OF_ONE_LAYER = LlamaConfig(**SMALL | {"num_hidden_layers": 1})

_OF_STATES = ("A_log", "conv.weight", "conv1d.weight", "dt_bias", "dt_proj.bias")
# The sizes of the published configs, without the weights.
REAL_SHAPES: dict[str, PreTrainedConfig] = {
    "smollm2-135m": LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
    "llama-3.2-1b": LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, tie_word_embeddings=True,
    ),
    "llama-3.1-8b": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, tie_word_embeddings=False,
    ),
    "gpt2-124m": GPT2Config(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12),
}  # fmt: skip
_TINY = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TINY_LLAMA = {"intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16}


def real_shape(name: str, *, tiny: bool = False) -> PreTrainedConfig:
    """Return one of REAL_SHAPES; for a dry run, a tiny model of the same family and positions."""
    config = copy.deepcopy(REAL_SHAPES[name])
    if tiny:
        for key, value in (_TINY if isinstance(config, GPT2Config) else _TINY | _TINY_LLAMA).items():
            setattr(config, key, value)
    return config


def random_model(
    config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        # A model changes its config.
        own = copy.deepcopy(config)
        model = AutoModelForCausalLM.from_config(own, dtype=dtype, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if name.endswith(_OF_STATES):  # or else what is in a state hardly changes an answer
            torch.nn.init.normal_(parameter, std=0.5)
    return model.to(device=device, dtype=dtype).eval()  # type: ignore[no-any-return]


@torch.inference_mode()
def continued(model: PreTrainedModel, prompt: list[int], num_tokens: int, **inputs: Any) -> list[int]:
    """Return transformers' own greedy answer to one prompt."""
    ids = torch.tensor([prompt], device=model.device)
    sizes = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **sizes, **inputs)
    return out[0, len(prompt) :].tolist()


def generate(model: PreTrainedModel, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return transformers' own greedy answers, computed one prompt at a time."""
    return [continued(model, prompt, num_tokens) for prompt in prompts]


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """Return the token that transformers' model finds best at each place of these answers, given all before it.

    They are the answers if, and only if, these are what `generate` returns, which takes a forward for each token: this
    takes one for each prompt.
    """
    results = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer[:-1]]], device=model.device)
        results.append(model(ids, use_cache=False).logits[0, len(prompt) - 1 :].argmax(dim=-1).tolist())
    return results


def vocabulary(first: list[str], size: int) -> dict[str, int]:
    """Return a vocabulary of these tokens and, as far as there is room, words of a few letters."""
    words = ("".join(letters) for length in range(2, 6) for letters in product(ascii_lowercase, repeat=length))
    return {token: place for place, token in enumerate(islice(chain(first, words), size))}


def byte_tokenizer(vocab_size: int = 256) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per byte, for models with random weights.

    Further tokens are words of a few letters. No text is encoded to them, but a model draws them, so that an answer has
    about as much text as usual.
    """
    vocab = vocabulary(sorted(pre_tokenizers.ByteLevel.alphabet()), max(256, vocab_size))
    tokenizer = RustTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
