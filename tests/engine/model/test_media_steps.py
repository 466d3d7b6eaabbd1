"""Steps of prompts with images give transformers' own logits, however the prompts are cut into chunks."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from oaiserve.checkpoints.source import find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.states import StateChunk, States
from oaiserve.engine.scheduling.limits import Limits
from oaiserve.engine.scheduling.scheduler import Scheduler
from oaiserve.engine.sequences.blocks import BlockPool
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.engine.start.described import describe_model
from oaiserve.engine.types.media import Encoded
from tests.engine.executors.native.small_models import native_of
from tests.engine.model.media_prompts import IMAGE, logits_by_transformers, media_of, sequence_with_media
from tests.engine.model.runners import eager_runner, reference_of, states_of
from tests.engine.model.steps import CPU, sequence_of
from tests.models.described import SmallModel, described_files
from tests.models.wrappers import random_wrapper

BLOCK_SIZE = 16
NUM_BLOCKS = 16
OPTIONS = EngineOptions(dtype="float32")
# The kinds of media of a family whose text model differs from others in what it does with them.
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {"has_axes": True} for name in ("qwen2_vl", "qwen2_5_vl", "glm4v", "qwen3_5")},
    "qwen3_vl": {"has_axes": True, "num_deep": 2},
    **{name: {"has_runs": True} for name in ("gemma3", "gemma4")},
    **{name: {} for name in ("llava", "mistral3", "smolvlm")},
}


def cut(rng: Random, sequence: Sequence) -> list[Chunk]:
    """Return a sequence in random chunks, none of which ends inside a run."""
    runs = sequence.media.runs if sequence.media else ()
    ends = [i for i in range(1, len(sequence.token_ids)) if not any(first < i < end for first, end in runs)]
    ends = [0, *sorted(rng.sample(ends, min(len(ends), rng.randrange(6)))), len(sequence.token_ids)]
    return [Chunk(sequence, start, end - start) for start, end in pairwise(ends)]


@torch.inference_mode()
def logits_of(executor: Executor, chunks: list[list[Chunk]], states: States | None = None) -> list[torch.Tensor]:
    """Return the logits of all tokens of sequences, whose chunks are computed side by side."""
    places = {of_one[0].sequence: place for place, of_one in enumerate(chunks)}
    logits_of_sequence: dict[Sequence, list[torch.Tensor]] = {of_one[0].sequence: [] for of_one in chunks}
    waiting = [list(of_one) for of_one in chunks]
    while any(waiting):
        step = Step(sorted((of_one.pop(0) for of_one in waiting if of_one), key=lambda chunk: chunk.num_tokens > 1))
        batch = build_batch(step, BLOCK_SIZE, CPU)
        batch.logits_rows = torch.arange(len(batch.input_ids))
        if states is not None:
            batch.states = states.of_step([StateChunk(places[c.sequence], c.start, c.num_tokens) for c in step.chunks])
        for chunk, logits in zip(step.chunks, executor.forward(batch).clone().split(batch.query_lens), strict=True):
            logits_of_sequence[chunk.sequence].append(logits)
    return [torch.cat(parts) for parts in logits_of_sequence.values()]


def sequences_of(rng: Random, kinds: dict[str, Any]) -> list[Sequence]:
    return [
        sequence_with_media(rng, rng.randint(1, 50), rng.randint(0, 6), range(4 * i, 4 * i + 4), **kinds)
        for i in range(3)
    ]


def random_pair(name: str, folder: Path) -> tuple[PreTrainedModel, SmallModel]:
    """Return a multimodal model, and its text model as it is served."""
    wrapper = random_wrapper(name)
    if name == "gemma4":
        wrapper.config.text_config.use_bidirectional_attention = "vision"
    if name == "qwen3_vl":
        wrapper.config.vision_config.deepstack_visual_indexes = [0, 0]  # to the outputs of two layers
    wrapper.save_pretrained(folder)
    return wrapper, described_files(folder, dtype="float32")


def check(
    wrapper: PreTrainedModel,
    loaded: SmallModel,
    make: Callable[[], Executor],
    kinds: dict[str, Any],
    num_tries: int = 6,
) -> None:
    """Compare the logits of prompts that are cut at random with those of the multimodal model, which cuts none."""
    rng = Random(1)
    for _ in range(num_tries):
        sequences = sequences_of(rng, kinds)
        got = logits_of(make(), [cut(rng, sequence) for sequence in sequences], states_of(loaded))
        for sequence, logits in zip(sequences, got, strict=True):
            atol = 5e-3 if loaded.state_shapes else 5e-4  # a state rounds by how a prompt is cut
            torch.testing.assert_close(logits, logits_by_transformers(wrapper, sequence), atol=atol, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_the_multimodal_model(name: str, tmp_path: Path) -> None:
    wrapper, loaded = random_pair(name, tmp_path)
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
    check(wrapper, loaded, lambda: reference_of(loaded, **sizes), FAMILIES[name])


@pytest.mark.compiler
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "glm4v", "qwen3_5", "gemma3", "gemma4", "llava"])
def test_so_do_those_of_the_native_step_which_are_the_same_in_any_chunks(name: str, tmp_path: Path) -> None:
    wrapper, loaded = random_pair(name, tmp_path)
    described = describe_model(find_model(tmp_path), OPTIONS)
    native = native_of(described, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_threads=2)
    check(wrapper, loaded, lambda: native, FAMILIES[name])
    rng = Random(2)
    sequences = sequences_of(rng, FAMILIES[name])
    several = [logits_of(native, [cut(rng, one) for one in sequences], states_of(loaded)) for _ in range(3)]
    alone = [logits_of(native, [cut(rng, one)], states_of(loaded))[0] for one in sequences]
    for logits in several:
        assert all(torch.equal(one, other) for one, other in zip(logits, alone, strict=True))


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_answers_are_the_same_with_prefixes_drafts_choices_and_preemptions(
    name: str, overlap: bool, tmp_path: Path
) -> None:
    """Cached prefixes end inside images, and prompts with other images and the same ids have none in common."""
    wrapper, loaded = random_pair(name, tmp_path)
    scheduler = Scheduler(BlockPool(24, 4), Limits(5, 9))
    runner = eager_runner(loaded, num_blocks=24, block_size=4)
    rng = Random(9)
    length = 28
    media, encoded = media_of(rng, length, **FAMILIES[name])
    assert length - 1 not in media.places
    ids = [IMAGE if i in media.places else rng.randrange(IMAGE) for i in range(length - 1)]
    other = tuple(Encoded(one.vectors.flip(0), tuple(deep.flip(0) for deep in one.deep)) for one in encoded)
    sequences: list[Sequence] = []
    for i in range(12):  # two choices of each prompt
        content = i // 2 % 2
        params = {"temperature": 0.0, "logit_bias": {IMAGE: -100.0}} | ({"prompt_logprobs": 0} if i == 4 else {})
        sequence = sequence_of([*ids, i // 4], name=str(i // 2), max_len=36, **params)
        keyed = tuple(replace(one, key=bytes([content]) + one.key[1:]) for one in media.media)
        sequence.media = replace(media, media=keyed)
        sequence.encoded = (encoded, other)[content]
        sequence.wants_prompt_logprobs = i == 4
        sequences.append(sequence)
        scheduler.add(sequence, sequences[i - 1] if i % 2 else None)
    logprobs: dict[int, float] = {}  # by the token before; after a preemption, they are computed again
    num_drafted = 0
    under_way = None
    while True:
        for sequence in sequences:
            sequence.draft = [rng.randrange(IMAGE) for _ in range(rng.randrange(3))]
        step = scheduler.schedule()
        launched = None
        if step is None and under_way is None:
            break
        if step is not None:
            num_drafted += step.num_draft_tokens
            if step.copies:
                runner.copy_blocks(step.copies)
            launched = runner.launch(step)
            scheduler.advance(step)
        ended, under_way = (under_way, launched) if overlap else (launched, None)
        if ended is not None:
            for chunk, result in zip(ended.step.chunks, runner.collect(ended).chunks, strict=True):
                scheduler.commit(chunk, result.token_ids)
                rows = enumerate(result.prompt_logprobs or (), start=chunk.start)
                logprobs |= {index: row.logprob for index, row in rows}
        scheduler.check_integrity()
    assert overlap or num_drafted > 10
    assert scheduler.foreground.num_preemptions > 0
    cached = {sequence.num_cached for sequence in sequences[2:] if sequence.num_cached < length - 1}
    assert any(end - 1 in media.places and end in media.places for end in cached), "no prefix ends inside an image"
    for sequence in sequences:
        logits = logits_by_transformers(wrapper, sequence)
        assert sequence.generated_ids == logits[length - 1 : -1, :IMAGE].argmax(dim=-1).tolist()
    of_prompt = logits_by_transformers(wrapper, sequences[4])[: length - 1].log_softmax(dim=-1)
    expected = of_prompt.gather(1, torch.tensor(sequences[4].token_ids[1:length])[:, None])[:, 0]
    actual = torch.tensor([logprobs[index] for index in range(length - 1)])
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)
