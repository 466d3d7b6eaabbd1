"""Measures decodes and a prompt of models in few bits, and of a KV cache in FP8, next to the same layers in 16 bits.

The start of each times its products with 1 to 2,048 rows in all ways, as a server does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import GptOssConfig, PreTrainedConfig

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.description import Decoder, Experts
from oaiserve.engine.sequences.step import Step
from oaiserve.engine.start.started import Started
from tests.models.decoders import real_shape
from tests.models.packed import Packing
from tools.bench.floor import DecoderShape, Work, step_work
from tools.engine_load import random_step
from tools.gpu.models import Packed, described_on
from tools.gpu.parts import Found, in_turn
from tools.gpu.profiles import needed, profiled
from tools.gpu.sections import Target
from tools.gpu.steps import UTILIZATION, timed_steps
from tools.gpu.workload import BLOCK_SIZE, PRODUCTS, blocks_for, release, started

VOCAB = 16_384  # few, so that layers take most of a step
LAYERS = 8
BATCHES = (16, 1, 64, 256)
PROMPT = 2048  # tokens
PROFILED = 16
STEPS = 12


@dataclass(frozen=True, slots=True)
class Case:
    family: str
    packing: Packed = None
    options: dict[str, Any] = field(default_factory=dict)

    def config(self, *, quick: bool) -> PreTrainedConfig:
        if self.family == "gpt-oss":  # the sizes of that with 20 billion weights
            sizes = {"vocab_size": VOCAB, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 4}
            tiny = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
            tiny |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
            return GptOssConfig(**tiny if quick else sizes, num_local_experts=4 if quick else 32)
        config = real_shape("llama-3.1-8b", tiny=quick)
        if not quick:
            config.num_hidden_layers = LAYERS
            config.vocab_size = VOCAB
        return config


_AWQ = Packing("awq", group_size=128)
_OF_32 = Packing("awq")  # the tiny model has 64 columns
CASES = {
    "BF16": Case("llama"),
    "AWQ": Case("llama", _AWQ),
    "FP8": Case("llama", "fp8"),  # with scales of blocks
    "FP8 by row": Case("llama", None, {"quantize": "fp8"}),
    "MXFP4, 32 experts": Case("gpt-oss", "mxfp4"),
    "BF16, cache in FP8": Case("llama", None, {"kv_cache_dtype": "fp8"}),
}


def run(target: Target) -> Iterator[Found]:
    yield from in_turn({name: partial(measured, name, case, target) for name, case in CASES.items()})


def measured(name: str, case: Case, target: Target) -> Iterator[Found]:
    quick = target.quick
    batches, context, prompt = ((4, 1), 40, 20) if quick else (BATCHES, 512, PROMPT)
    packing = _OF_32 if quick and case.packing is _AWQ else case.packing
    config = case.config(quick=quick)
    described = described_on(config, target.device, packing=packing)
    decoder = described.decoder
    options = EngineOptions(
        compile=not described.spec.is_on_cpu,
        max_running=max(batches),
        max_step_tokens=max(64, *batches),
        kv_blocks=blocks_for(max(batches), context),
        gpu_memory_utilization=UTILIZATION,
        **{} if described.spec.is_on_cpu else case.options,
    )
    made = started(described, options, target)
    rows = []
    result: Found = {"weight_bytes": made.weight_bytes, "kv_bytes_per_token": made.spec.kv_bytes_per_token}
    result["products"] = dict(PRODUCTS)
    for batch in batches:
        step = random_step([(context - 1, 1)] * batch, BLOCK_SIZE, made.spec.vocab_size)
        with target.turn():
            timed_steps(made.runner, [step] * 3, overlaps=True)
            found = timed_steps(made.runner, [step] * (2 if quick else STEPS), overlaps=True)
        weights = made.weight_bytes - unread_bytes(decoder, batch)
        read = weights + batch * context * made.spec.kv_bytes_per_token
        rows.append({"sequences": batch, "bytes": read, "weight_bytes": weights, "operations": 0, **found})
        yield {name: result | {"decode": rows}}
    step = random_step([(0, prompt)], BLOCK_SIZE, made.spec.vocab_size)
    with target.turn():
        timed_steps(made.runner, [step] * 2, overlaps=True)
        found = timed_steps(made.runner, [step] * (2 if quick else STEPS), overlaps=True)
    # The shape of a decoder has no experts.
    operations = 0.0 if case.family == "gpt-oss" else step_work(DecoderShape.of(made.spec, config), [(0, prompt)]).flops
    result["prompts"] = [{"tokens": prompt, "bytes": made.weight_bytes, "operations": operations, **found}]
    yield {name: result | {"decode": rows}}
    step = random_step([(context - 1, 1)] * min(PROFILED, max(batches)), BLOCK_SIZE, made.spec.vocab_size)
    least = {} if case.family == "gpt-oss" else needed_in_few_bits(made, config, step)
    with target.turn():
        found = profiled(made.runner, step, target.device, least)
    yield {name: result | {"decode": rows, "profile": found}}
    del made, described
    release()


def needed_in_few_bits(made: Started, config: PreTrainedConfig, step: Step) -> dict[str, Work]:
    """Return the least work of the parts of a step, in which the matrices of layers have fewer bits than the head."""
    shape = DecoderShape.of(made.spec, config)
    least = needed(shape, step)
    layers = {"qkv", "output", "gate and up", "down"}
    share = (made.weight_bytes - least["logits"].num_bytes) / sum(least[part].num_bytes for part in layers)
    return {
        part: one._replace(num_bytes=one.num_bytes * (share if part in layers else 1)) for part, one in least.items()
    }


def unread_bytes(decoder: Decoder, tokens: int) -> float:
    """Return the bytes in MXFP4 of the experts that a step of few tokens is not expected to choose."""
    unread = 0.0
    for layer in decoder.layers:
        if isinstance(layer.mlp, Experts):
            experts = layer.mlp.experts
            share = (1 - layer.mlp.router.top_k / len(experts)) ** tokens
            for expert in experts:
                matrices = (expert.gate, expert.up, expert.down)
                unread += share * sum(one.weight.nbytes for one in matrices if one is not None)
    return unread
