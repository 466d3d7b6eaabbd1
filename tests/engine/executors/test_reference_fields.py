"""The reference obeys every field of a description: another value gives other logits, or is refused."""

import inspect
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oaiserve.engine.decoder import description
from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.description import Decoder, HeadRows, NotKnown
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.states import StateChunk
from oaiserve.engine.sequences.step import Chunk, Step
from tests.engine.executors.native.small_models import FAMILIES, load
from tests.engine.executors.test_described_families import case_with
from tests.engine.executors.test_reference_steps import reference
from tests.engine.model.runners import states_of
from tests.engine.model.steps import BLOCK_SIZE, CPU, sequence_of

NUM_TOKENS = 60
# Together with models that only their files describe, they have a value for each field.
COVERING = (
    *("gemma4_text", "gemma2", "gpt_oss", "cohere", "granite", "gpt2", "ministral3", "smollm3", "hunyuan_v1_moe"),
    *("deepseek_v3", "gemma4_text with experts", "qwen3_next", "bamba", "lfm2"),
)
UNSEEN = {
    # adapters, which test_reference_steps.py covers, and quantized files
    *("Matrix.module", "Matrix.first_row", "Matrix.heads", "Matrix.parts", "Router.module"),
    *(f"{one.__name__}.{field.name}" for one in (Blocks, HeadRows) for field in fields(one)),
    # media, which test_media_steps.py covers
    *("Decoder.vector_scale", "Decoder.padding_id", "Decoder.num_deep"),
    *("RotaryTable.axes", "AttentionParameters.looks_ahead"),
    # caches in eight bits
    *("KVShape.scales", "Attention.key_sizes"),
    "LayerInputs.scale",  # the norm of InputGate divides it out
}


def mutants(part: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the part with another value in one field, for each field of it and of its parts. Before it come the names
    of the fields that lead to the value, the outermost first."""
    if isinstance(part, list):
        for place, one in enumerate(part):
            for names, changed in mutants(one):
                yield names, [*part[:place], changed, *part[place + 1 :]]
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            value = getattr(part, field.name)
            name = f"{type(part).__name__}.{field.name}"
            if (other := other_value(value)) is not None:
                yield (name,), replace(part, **{field.name: other})
            for inner_names, changed in mutants(value):
                yield (name, *inner_names), replace(part, **{field.name: changed})


def other_value(value: Any) -> Any:
    """Return another value of a field, or None for one that has other fields below it, or no value."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1 if value < 2 else value - 1
    if isinstance(value, float):
        return value + 0.7 if math.isfinite(value) else 0.1
    if isinstance(value, str):
        return "gelu" if value == "silu" else "silu"
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.flip(0) * 1.5 + 0.1
    return None


@torch.inference_mode()
def logits_of(executor: Executor, spec: ModelSpec) -> Tensor:
    """Return the logits of a prompt, and of its last token in a step of its own."""
    states = states_of(spec)
    sequence = sequence_of([(7 * place + 3) % 97 for place in range(NUM_TOKENS)], range(4))
    found = []
    for start, count in ((0, NUM_TOKENS - 1), (NUM_TOKENS - 1, 1)):
        batch = build_batch(Step([Chunk(sequence, start, count)]), BLOCK_SIZE, CPU)
        batch.logits_rows = torch.arange(count)
        batch.states = None if states is None else states.of_step([StateChunk(0, start, count)])
        found.append(executor.forward(batch))
    return torch.cat(found)


def has_effect(mutant: Decoder, spec: ModelSpec, logits: Tensor) -> bool:
    try:
        return not torch.allclose(logits_of(reference(mutant), spec), logits, rtol=1e-4, atol=1e-4)
    except (AssertionError, IndexError, KeyError, NotKnown, RuntimeError, ValueError):
        return True  # sizes do not fit together any more


def covering_models() -> Iterator[tuple[Decoder, ModelSpec]]:
    for family in COVERING:
        loaded = load(FAMILIES[family])
        yield loaded.decoder, loaded
    of_files: dict[str, dict[str, Any]] = {  # families that only their files describe
        "falcon_h1": {},
        "kimi_linear": {},
        "llama4_text": {"attention_chunk_size": 16},
        "gemma3n_text": {"activation_sparsity_pattern": [0.6, 0.0, 0.0, 0.0]},
    }
    for family, changes in of_files.items():
        case = case_with(family, changes)
        yield case.decoder, case.loaded


def test_each_field_has_an_effect() -> None:
    classes = [found for _, found in inspect.getmembers(description, is_dataclass) if isinstance(found, type)]
    left = {f"{one.__name__}.{field.name}" for one in classes for field in fields(one)} - UNSEEN
    for decoder, spec in covering_models():
        logits = logits_of(reference(decoder), spec)
        for names, mutant in mutants(decoder):
            if not left.isdisjoint(names) and has_effect(mutant, spec, logits):
                left.difference_update(names)
    assert not left
