"""Models whose weights are in blocks: their files, and the numbers that transformers computes of the same weights.

The native step rounds what its matrices read to eight bits, and so do these models of transformers.
"""

import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from tokenizers import pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedModel

from oaiserve.checkpoints.source import find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.description import Decoder
from oaiserve.engine.executors.native.library import Library
from oaiserve.engine.model.adapters import Adapter, AdapterPart
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.rehearsal import prompt
from oaiserve.engine.start.described import describe_model
from tests.engine.executors.native.small_models import BLOCK_SIZE, config, make_model, native_of
from tests.models.decoders import byte_tokenizer
from tests.models.gguf_files import round_as_in_a_file, write_gguf
from tests.models.packed import Packing, write_checkpoint

OPTIONS = EngineOptions(block_size=BLOCK_SIZE, kv_blocks=8, dtype="float32", cpu_threads=1)
SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "initializer_range": 0.2,
}  # fmt: skip
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "initializer_range": 0.2}
FAMILIES = {
    "llama": config("llama", **WIDE),
    "llama, tied": config("llama", **WIDE, tie_word_embeddings=True),
    "qwen2": config("qwen2", **WIDE),
    "qwen3": config("qwen3", **WIDE, head_dim=128),  # the file does not say how wide, for transformers
    "phi3": config("phi3", **WIDE | {"vocab_size": 32064}),  # its padding is token 32,000
    "gemma2": config("gemma2", **WIDE, sliding_window=6, query_pre_attn_scalar=16),
    "gemma3": config("gemma3_text", **WIDE, sliding_window=6),
}
# As llama.cpp mixes them: some matrices have more bits, and some are not quantized.
MIX = {"attn_v": Kind.Q8_0, "ffn_down": Kind.Q5_1, "token_embd": Kind.Q8_0, "attn_output": Kind.F16}
# The tokenizer of a GGUF file.
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell", "<end>"]
TOKENIZER: dict[str, Any] = {
    "model": "gpt2", "tokens": TOKENS, "token_type": [1] * (len(TOKENS) - 1) + [3],
    "merges": ["h e", "l l", "he ll"], "eos_token_id": len(TOKENS) - 1,
}  # fmt: skip


def file_of(
    asked: PreTrainedConfig,
    folder: Path,
    mix: dict[str, Kind] = MIX,
    rest: Kind = Kind.Q4_0,
    rope_factors: NDArray[np.float32] | None = None,
    tokenizer: dict[str, Any] | None = None,
    most_tensors: int = 0,
) -> Path:
    """Write a model with random weights as one GGUF file or, with `most_tensors`, several. Return the first."""
    path = folder / "model.gguf"
    model = make_model(asked)
    parameters = [(name, parameter.detach().float().numpy()) for name, parameter in model.named_parameters()]
    write_gguf(path, asked, parameters, partial(_kind, mix, rest), tokenizer, rope_factors, most_tensors=most_tensors)
    return min(folder.glob("model*.gguf")) if most_tensors else path


def model_of_file(asked: PreTrainedConfig, mix: dict[str, Kind] = MIX, rest: Kind = Kind.Q4_0) -> PreTrainedModel:
    """Return the model with the numbers of its file."""
    model = make_model(asked)
    round_as_in_a_file(model, partial(_kind, mix, rest))
    return model


def _kind(mix: dict[str, Kind], rest: Kind, name: str) -> Kind:
    return next((kind for part, kind in mix.items() if part in name), rest)


def write_gpt2(path: Path, kind: Kind) -> PreTrainedModel:
    """Write a GGUF file of a small GPT-2, and return its model."""
    # The writer asks for the other sizes.
    sizes = {"max_position_embeddings": 128, "n_positions": 128, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}
    sizes["n_inner"] = 96
    model = make_model(config("gpt2", **sizes, rope_parameters={"rope_theta": 1e4}))
    parameters = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    turned = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    in_file = ((name, values.T if name.endswith(turned) else values) for name, values in parameters.items())
    write_gguf(path, model.config, in_file, lambda _: kind)
    return model


def written(folder: Path, packing: Packing, family: str = "llama", **changes: Any) -> PreTrainedModel:
    """Write a checkpoint, and return the model with the weights that its integers stand for."""
    model = make_model(config(family, **SIZES | changes))
    write_checkpoint(folder, model, packing)
    byte_tokenizer(256).save_pretrained(folder)
    return model


def batch_of(num_tokens: int, vocab_size: int, adapter: Adapter | None = None) -> Batch:
    batch = build_batch(prompt(num_tokens, vocab_size, BLOCK_SIZE), BLOCK_SIZE, torch.device("cpu"))
    batch.adapters = [] if adapter is None else [adapter]
    return batch


def in_eight_bits(_: torch.nn.Module, inputs: tuple[torch.Tensor], together: int = 32) -> torch.Tensor:
    """Round what a linear layer reads as the native step does: in groups of so many that share a scale."""
    groups = inputs[0].unflatten(-1, (-1, together))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127  # the padding token's embedding is zeros
    if together == 256:
        scales = scales / finer(groups, in_tiles=Library(torch.float32).has_integer_tiles())
    return ((groups / scales).round() * scales).flatten(-2)


def finer(groups: torch.Tensor, *, in_tiles: bool = False) -> torch.Tensor:
    """Return how much finer than the largest of 256 numbers each is rounded: by a power of two for each 32 of them.

    In the tiles of AMX, none is.
    """
    most = groups.abs().unflatten(-1, (8, 32)).amax(-1)
    powers = sum((most * 2**i <= most.amax(-1, keepdim=True)).int() for i in (1, 2, 3))
    powers = powers * (powers.sum(-1, keepdim=True) >= (25 if in_tiles else 4))
    return torch.exp2(powers.float()).repeat_interleave(32, -1)


def round_inputs(module: torch.nn.Module, rounded: Callable[..., torch.Tensor] = in_eight_bits) -> None:
    """Have a linear layer multiply its input rounded. Adapters, which hooks add, multiply what comes in."""
    product = module.forward
    module.forward = lambda x: product(rounded(module, (x,)))


@torch.inference_mode()
def own_logits(model: PreTrainedModel, num_tokens: int, adapter: Adapter | None = None) -> torch.Tensor:
    """The logits that transformers' own code computes of the prompt of `batch_of`."""

    def added(part: AdapterPart) -> Callable[..., torch.Tensor]:
        return lambda _, inputs, out: out + part.added(inputs[0])

    parts = {} if adapter is None else adapter.parts
    hooks = [model.get_submodule(name).register_forward_hook(added(part)) for name, part in parts.items()]
    ids = prompt(num_tokens, model.config.vocab_size, BLOCK_SIZE).chunks[0].sequence.token_ids
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1:]
    for hook in hooks:
        hook.remove()
    return logits


def kept_logits(path: Path, num_tokens: int, adapter: Adapter | None = None, **changes: Any) -> torch.Tensor:
    """Return the logits that the native step computes of the files in a folder, or of a GGUF file."""
    described = describe_model(find_model(path), replace(OPTIONS, **changes))
    sizes = {"num_blocks": 8, "block_size": BLOCK_SIZE, "num_threads": 1}
    native = native_of(described, **sizes, has_adapters=adapter is not None)
    prepared = None if adapter is None else native.prepare(adapter)
    return native.forward(batch_of(num_tokens, described.spec.vocab_size, prepared)).clone()


def with_expanded_blocks(decoder: Decoder) -> Decoder:
    """Return a description in which tensors in float32 take the place of blocks. What is shared stays shared."""
    known: dict[int, Any] = {}

    def expand(part: Any) -> Any:
        if id(part) in known:
            return known[id(part)]
        result = part
        if isinstance(part, Blocks):
            result = part.expand()
        elif isinstance(part, list):
            result = [expand(one) for one in part]
        elif is_dataclass(part) and not isinstance(part, type):
            result = replace(part, **{field.name: expand(getattr(part, field.name)) for field in fields(part)})
        known[id(part)] = result
        return result

    expanded: Decoder = expand(decoder)
    return expanded


def with_plain_experts(model: PreTrainedModel, *, in_blocks: bool, together: int = 32) -> None:
    """Have a model compute its experts token by token, and round what these read if they are in blocks."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return in_eight_bits(model, (x,), together) if in_blocks else x

    def plain(experts: Any) -> Any:
        def product(x: torch.Tensor, name: str, expert: int) -> torch.Tensor:
            weight = getattr(experts, name)[expert]
            result = x @ (weight if experts.is_transposed else weight.T)
            return result + getattr(experts, f"{name}_bias")[expert] if experts.has_bias else result

        def forward(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(x)
            for token, of_token in enumerate(chosen.tolist()):
                for place, expert in enumerate(of_token):
                    inner = experts._apply_gate(product(rounded(x[token]), "gate_up_proj", expert))
                    out[token] += product(rounded(inner), "down_proj", expert) * weights[token, place]
            return out

        return forward

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.forward = plain(module)


def dequantized(asked: PreTrainedConfig, mix: dict[str, Kind]) -> PreTrainedModel:
    """Return the model of `file_of` with the numbers that its file has: experts as `mix` says, and Q8_0."""

    def there_and_back(tensor: torch.Tensor, kind: Kind) -> torch.Tensor:
        return torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.detach().numpy(), kind), kind))

    model = make_model(asked)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("experts.gate_up_proj"):
                halves = zip(parameter.chunk(2, dim=1), (mix["gate_exps"], mix["up_exps"]), strict=True)
                parameter.copy_(torch.cat([there_and_back(*half) for half in halves], dim=1))
            elif name.endswith("experts.down_proj"):
                parameter.copy_(there_and_back(parameter, mix["down_exps"]))
            elif parameter.dim() == 2 and not re.search("mlp.gate|expert_gate", name):
                parameter.copy_(there_and_back(parameter, Kind.Q8_0))
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "expert_gate" not in name:
            module.register_forward_pre_hook(in_eight_bits)
    return model
