"""The reference executor computes transformers' own logits in float32, however prompts are cut and packed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oaiserve.checkpoints.gguf import read_head
from oaiserve.engine.decoder.description import Decoder
from oaiserve.engine.decoder.spec import LayerStateShapes, ModelSpec
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.states import StateChunk
from oaiserve.engine.model.transformers_files.empty_model import named_parameters
from oaiserve.engine.model.transformers_files.gguf_weights import GgufWeights
from oaiserve.engine.sequences.step import Chunk, Step
from tests.engine.executors.native.small_models import FAMILIES, make_model
from tests.engine.model.runners import states_of
from tests.engine.model.steps import BLOCK_SIZE, CPU, sequence_of
from tests.models.described import described
from tests.models.gguf_records import model_of, parameters_of, records
from tests.models.outliers import give_outliers
from tests.models.pinned import PINNED, pinned_model, quantized

# The error of a token is the norm of the difference of its logits, relative to their norm. Sums in another order differ
# in the last bits of float32, 6e-8, which a few layers of random weights multiply by some 50 for most tokens, and
# by more where scores are large. Over all tokens, transformers' float32 is up to 1.4e-5 from its own float64.
MEDIAN_ERROR = 1e-5
LARGEST_ERROR = 2e-3
MOST_TOKENS = 128  # beyond the windows of all models, and the lengths from which on rotary embeddings are scaled
NUM_BLOCKS = 3 * MOST_TOKENS // BLOCK_SIZE


class Case(NamedTuple):
    """A described model, and what transformers computes of some tokens."""

    loaded: ModelSpec
    decoder: Decoder
    ids: list[list[int]]
    expected: Tensor  # float32 [sequences, tokens, vocab]


@torch.inference_mode()
def case_of(original: PreTrainedModel, loaded: ModelSpec, decoder: Decoder) -> Case:
    """Return the case of a model in float32, with states in float32, whatever the dtype of the described model is."""
    length = min(MOST_TOKENS, loaded.max_model_len)
    ids = torch.randint(loaded.vocab_size, (3, length), generator=torch.Generator().manual_seed(1))
    shapes = {index: in_float32(shape) for index, shape in loaded.state_shapes.items()}
    return Case(replace(loaded, state_shapes=shapes), decoder, ids.tolist(), original(ids, use_cache=False).logits)


def in_float32(shapes: LayerStateShapes) -> LayerStateShapes:
    """Return the shapes of a layer's states in float32."""
    assert shapes.conv is not None
    return replace(shapes, conv=replace(shapes.conv, dtype=torch.float32))


def case_of_model(model: PreTrainedModel) -> Case:
    loaded = described(model)
    return case_of(model.float(), loaded, loaded.decoder)


def chunk_ends(length: int) -> list[list[int]]:
    """Return where the chunks of three sequences of up to `length` tokens end, few of them at ends of blocks."""
    third = length // 3
    return [
        [length - 4, length - 3, length - 2, length - 1, length],
        [third // 2 + 5, third + 6, third + 7, length - 3],
        [5, 6, 7, third + 2],
    ]


@torch.inference_mode()
def errors(case: Case, decoder: Decoder | None = None, executor: Executor | None = None) -> Tensor:
    """Return the error of logits for each token, with a step for the next chunk of each sequence.

    The executor is the reference for this decoder, unless another one is given.
    """
    sizes: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
    executor = executor or ReferenceExecutor(decoder or case.decoder, dtype=torch.float32, device=CPU, **sizes)
    ends = chunk_ends(len(case.ids[0]))
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(2)).view(len(ends), -1).tolist()
    sequences = [
        sequence_of(ids[: own[-1]], own_blocks) for ids, own, own_blocks in zip(case.ids, ends, blocks, strict=True)
    ]
    states = states_of(case.loaded)
    found: list[Tensor] = []
    for turn in range(max(map(len, ends))):
        parts = [
            (place, [0, *own][turn], own[turn] - [0, *own][turn]) for place, own in enumerate(ends) if turn < len(own)
        ]
        parts.sort(key=lambda part: part[2] > 1)  # decodes come first
        step = Step([Chunk(sequences[place], start, count) for place, start, count in parts])
        batch = build_batch(step, BLOCK_SIZE, CPU)
        batch.logits_rows = torch.arange(len(batch.input_ids))
        if states is not None:
            batch.states = states.of_step([StateChunk(*part) for part in parts])
        expected = torch.cat([case.expected[place, start : start + count] for place, start, count in parts])
        found.append((executor.forward(batch) - expected).norm(dim=-1) / expected.norm(dim=-1))
    return torch.cat(found)


def assert_small(found: Tensor) -> None:
    assert found.median() < MEDIAN_ERROR
    assert found.max() < LARGEST_ERROR


@pytest.mark.parametrize("name", PINNED)
def test_logits_are_those_of_transformers(name: str) -> None:
    assert_small(errors(case_of_model(pinned_model(name))))


OUTLYING = (
    *("qwen2", "gemma2", "gemma4_text with experts", "gpt2", "cohere", "gpt_oss"),
    *("deepseek_v3", "qwen3_next", "bamba"),
)


@pytest.mark.parametrize("family", OUTLYING)
def test_so_are_those_of_models_with_the_statistics_of_trained_ones(family: str) -> None:
    found = errors(case_of_model(give_outliers(make_model(FAMILIES[family]))))
    assert found.median() < MEDIAN_ERROR  # in few tokens, large scores that are nearly equal change places


@pytest.mark.compiler
@pytest.mark.parametrize("name", records())
def test_logits_of_quantized_files_are_those_of_transformers_with_their_weights(name: str, tmp_path: Path) -> None:
    kept = quantized(name, tmp_path)
    model = model_of(name)
    path = tmp_path / "model.gguf"
    weights = GgufWeights(read_head(path), named_parameters(model))
    model.load_state_dict({parameter: weights.tensor(parameter) for parameter in parameters_of(model)}, strict=False)
    assert_small(errors(case_of(model, kept.spec, kept.decoder)))


def with_attention(decoder: Decoder, index: int, **changes: Any) -> Decoder:
    """Return a decoder whose attention of one layer has other values."""
    layers = list(decoder.layers)
    layers[index] = replace(layers[index], attention=replace(layers[index].attention, **changes))
    return replace(decoder, layers=layers)


def with_window(decoder: Decoder, added: int) -> Decoder:
    parameters = decoder.layers[0].attention.parameters
    window = parameters.sliding_window + added
    return with_attention(decoder, 0, parameters=replace(parameters, sliding_window=window))


def with_epsilon(decoder: Decoder, factor: float) -> Decoder:
    """Return a decoder with another epsilon in the first norm, whose input is small."""
    first, *others = decoder.layers
    norm = replace(first.attention_norm, epsilon=first.attention_norm.epsilon * factor)
    return replace(decoder, layers=[replace(first, attention_norm=norm), *others])


MISTAKES: dict[str, Callable[[Decoder], Decoder]] = {
    "a longer window": lambda decoder: with_window(decoder, 1),
    "a shorter window": lambda decoder: with_window(decoder, -1),
    "no rotation": lambda decoder: with_attention(decoder, 0, rotary=None),
    "another epsilon": lambda decoder: with_epsilon(decoder, 10),
}


@pytest.fixture(scope="module")
def mistral() -> Case:
    return case_of_model(pinned_model("mistral"))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_one_layer_is_seen(mistral: Case, mistake: str) -> None:
    assert errors(mistral, MISTAKES[mistake](mistral.decoder)).median() > 2 * MEDIAN_ERROR
