"""Nothing in `launch` waits for the device, whatever a request asks for.

The device is that of `fake_gpu.py`, which raises for copies for which a GPU's host would wait.
"""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Phi3Config, PreTrainedConfig

from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.rehearsal import prompt
from oaiserve.engine.model.sampling.logit_edits import apply_masks_in_torch
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Draw, Masks, Step
from oaiserve.plugins.cuda.executor.executor import CudaExecutor, CudaWeights
from oaiserve.plugins.cuda.executor.kernels import Kernels
from tests.engine.executors.fake_gpu import GPU, watched
from tests.engine.model.sampling import plain_sampling
from tests.engine.model.steps import sequence_of
from tests.models.decoders import FAMILIES, SMALL, random_model
from tests.models.described import described

VOCAB = 97


class Logits:
    """An executor that computes nothing."""

    is_exact = False

    def forward(self, batch: Batch) -> torch.Tensor:
        return torch.empty(len(batch.logits_rows), VOCAB, dtype=torch.bfloat16, device=GPU)


def sequence(**params: Any) -> Sequence:
    return sequence_of([5, 6, 7], [0], stop_ids=frozenset([0, 3]), **params)


ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.9, "min_p": 0.1},
    {"seed": 3},
    {"min_tokens": 4},
    {"logprobs": 3},
    {"prompt_logprobs": 2},
    {"logit_bias": {3: -1.0}},
    {"allowed_token_ids": (3, 4)},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"bad_words": [[9], [6, 7, 8]]},
]


@pytest.mark.parametrize("asked", ASKED, ids=str)
@torch.inference_mode()
def test_no_parameter_of_a_request_makes_launch_wait(asked: dict[str, Any]) -> None:
    runner = ModelRunner(Logits(), GPU, 4, sample_ids=plain_sampling.sample_ids)
    runner.is_asynchronous = True
    first = sequence(**asked)
    first.wants_prompt_logprobs = "prompt_logprobs" in asked
    others = [sequence(temperature=0.0), sequence(top_k=3)]
    with watched():
        runner.draw(runner.launch(Step([Chunk(one, 0, 3) for one in (first, *others)])))
        # The next step begins before the host has the ids that this one draws.
        for one in (first, *others):
            one.num_tokens += 1
        late = Draw.LATE if first.needs_ids else Draw.AT_LAUNCH
        launched = runner.launch(Step([Chunk(first, 3, 1, draw=late), *(Chunk(one, 3, 1) for one in others)]))
        for one in (first, *others):
            one.token_ids.append(8)
        runner.draw(launched)


@torch.inference_mode()
def test_masks_of_grammars_make_nothing_wait() -> None:
    runner = ModelRunner(Logits(), GPU, 4, sample_ids=plain_sampling.sample_ids)
    one = sequence(min_tokens=2, constraint=object())
    with watched():
        launched = runner.launch(Step([Chunk(one, 0, 3, draw=Draw.LATE)]))
        assert launched.waiting_rows == [0]
        runner.draw(launched, Masks({one: 0}, np.ones((1, 4), np.uint32)))
        apply_masks_in_torch(torch.empty(2, VOCAB, device=GPU), [1], np.ones((1, 4), np.uint32))


def test_the_double_finds_what_waits() -> None:
    logits = torch.empty(2, VOCAB, device=GPU)
    index = torch.tensor([1])
    with watched():
        with pytest.raises(AssertionError, match="waits"):
            index.to(GPU)
        on_device = index.to(GPU, non_blocking=True)
        with pytest.raises(AssertionError, match="index_put_ copies"):
            logits.index_put_((on_device,), torch.tensor(1.0))
        with pytest.raises(AssertionError, match="the number 1.0 is copied"):
            logits[on_device] = 1.0
        logits[0] = 1.0  # it is an argument of the kernel
        with pytest.raises(Exception, match="meta"):
            bool(logits.max() > 1)


ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, rope_parameters={**ROPE, "rope_type": "dynamic", "factor": 4.0}),
        Phi3Config(**SMALL, original_max_position_embeddings=32, rope_parameters={**ROPE, **LONGROPE}),
        FAMILIES["gemma2"],
    ],
    ids=["dynamic", "longrope", "gemma2"],
)
@torch.inference_mode()
def test_no_kind_of_rotary_embedding_makes_a_step_wait(config: PreTrainedConfig) -> None:
    loaded = described(random_model(config))
    weights = CudaWeights(loaded.decoder, dtype=torch.float32, device=GPU)
    executor = CudaExecutor(weights, loaded.kv_shapes, num_blocks=2, block_size=8, kernels=Kernels())
    batch = build_batch(prompt(9, loaded.vocab_size, 8), 8, GPU)
    with watched():
        logits = executor.forward(batch)
    assert logits.shape == (1, loaded.vocab_size)
