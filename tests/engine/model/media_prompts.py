"""Prompts with random vectors in place of images, as a tokenize worker and a tower would make them, and what
transformers' multimodal models compute for them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.types.media import Encoded, Medium, PromptMedia
from tests.engine.model.steps import sequence_of

IMAGE = 96  # the vectors replace this token
VOCAB = 97


def media_of(
    rng: Random, prompt_len: int, *, has_axes: bool = False, has_runs: bool = False, hidden: int = 64, num_deep: int = 0
) -> tuple[PromptMedia, tuple[Encoded, ...]]:
    """Return random media of a prompt: images of several rows, which may lie at its begin or its end."""
    runs = []
    start = rng.randrange(min(4, prompt_len))
    while start < prompt_len:
        end = min(prompt_len, start + rng.randint(1, 12))
        runs.append((start, end))
        start = end + rng.randint(1, 6)
    generator = torch.Generator().manual_seed(rng.randrange(2**30))

    def vectors(run: tuple[int, int]) -> torch.Tensor:
        return torch.randn(run[1] - run[0], hidden, generator=generator)

    encoded = tuple(Encoded(vectors(run), tuple(vectors(run) for _ in range(num_deep))) for run in runs)
    media = tuple(Medium("image", bytes([i]) * 16, run[1] - run[0]) for i, run in enumerate(runs))
    places = array("i", (place for run in runs for place in range(*run)))
    axes: array[int] = array("i")
    if has_axes:
        inside = set(places)
        for _ in range(3):
            axes.extend(max(0, i - rng.randrange(8)) if i in inside else i for i in range(prompt_len))
    delta = -rng.randrange(prompt_len) if has_axes else 0
    return PromptMedia(media, places, axes, delta, tuple(runs) if has_runs else ()), encoded


def sequence_with_media(rng: Random, prompt_len: int, num_more: int, blocks: range, **kinds: Any) -> Sequence:
    """Return a sequence whose prompt has media, and `num_more` tokens of its answer. `kinds` are for `media_of`."""
    media, encoded = media_of(rng, prompt_len, **kinds)
    places = set(media.places)
    ids = [IMAGE if i in places else rng.randrange(IMAGE) for i in range(prompt_len)]
    sequence = sequence_of(ids, blocks)
    sequence.token_ids += [rng.randrange(IMAGE) for _ in range(num_more)]
    sequence.num_tokens = len(sequence.token_ids)
    sequence.media = media
    sequence.encoded = encoded
    return sequence


@dataclass
class _OfEncoder(ModelOutput):
    """What an encoder of images returns, as far as multimodal models read it."""

    pooler_output: Any = None
    deepstack_features: Any = None


@torch.inference_mode()
def logits_by_transformers(wrapper: PreTrainedModel, sequence: Sequence) -> torch.Tensor:
    """Return the logits of all tokens of a sequence."""
    media = sequence.media
    assert media is not None
    num_tokens = len(sequence.token_ids)
    places = set(media.places)
    wrapper.config.image_token_id = wrapper.config.image_token_index = IMAGE
    vectors = [encoded.vectors for encoded in sequence.encoded]
    deep = list(zip(*(encoded.deep for encoded in sequence.encoded), strict=True))
    is_gemma3 = wrapper.config.model_type == "gemma3"
    image = _OfEncoder(torch.cat(vectors) if is_gemma3 else vectors, deep)
    arguments: dict[str, Any] = {"position_ids": torch.arange(num_tokens)[None]}
    if media.axes:
        arguments["position_ids"] = torch.tensor([media.positions(axis, 0, num_tokens) for axis in range(3)])[:, None]
    if media.runs:
        kinds = torch.tensor([[int(i in places) for i in range(num_tokens)]])
        arguments["token_type_ids" if is_gemma3 else "mm_token_type_ids"] = kinds
    logits: torch.Tensor = wrapper(
        input_ids=torch.tensor([sequence.token_ids]), mm_encoder_outputs={"image": image}, use_cache=False, **arguments
    ).logits
    return logits[0]
