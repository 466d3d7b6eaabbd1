"""The native step gives the answers of transformers' code for small random models of each family."""

import logging
import re
from pathlib import Path

import pytest
import torch

from oaiserve.engine.model.states import StateChunk
from oaiserve.errors import StartupError
from tests.engine.executors.native.small_models import (
    DELTA,
    FAMILIES,
    GROUPED_MOE,
    LATENT,
    WITHOUT_STEP,
    config,
    load,
    make_model,
    native,
    native_runner,
)
from tests.engine.model.runners import greedy_answers, make_engine, states_of
from tests.engine.model.steps import batch_of_prompt
from tests.engine.remembered import answer, save
from tests.models.decoders import generate, greedy
from tests.models.described import described

pytestmark = pytest.mark.compiler
PROMPTS = [[5, 9, 3, 17], list(range(20, 75)), [90], [7] * 20, [11, 40, 11], [*range(20, 60), 4]]
NUM_TOKENS = 14


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers_however_they_are_packed(family: str) -> None:
    model = make_model(FAMILIES[family])
    loaded = described(model)
    with make_engine(loaded, native_runner(loaded), max_running=16, max_step_tokens=100) as engine:
        # Two choices of each, which copy blocks; the second time with a filled prefix cache.
        first, again = (greedy_answers(engine, PROMPTS, NUM_TOKENS, n=2) for _ in range(2))
        expected = first[::2]
        assert greedy(model, PROMPTS, expected) == expected
        assert len({tuple(answer) for answer in expected}) == len(PROMPTS), "the answers must be able to differ"
        assert first == again == [ids for ids in expected for _ in range(2)]
        assert engine.snapshot().num_prefix_hits > 0 or loaded.state_shapes  # only those of long prompts are kept
    runner = native_runner(loaded, num_blocks=6)  # too few, so that sequences are preempted
    with make_engine(loaded, runner, num_blocks=6, max_running=7, max_step_tokens=7) as engine:
        assert greedy_answers(engine, PROMPTS, NUM_TOKENS) == expected
        assert engine.snapshot().num_preemptions > 0


NOT_KNOWN = {
    "apertus": (WITHOUT_STEP, "models of type 'apertus' have no description"),
    "small latent vectors": (
        config(
            "deepseek_v3",
            **LATENT | {"qk_rope_head_dim": 8, "head_dim": 8, "qk_nope_head_dim": 40},
            **GROUPED_MOE,
            num_experts_per_tok=3,
        ),
        "its latent vectors have sizes that are no multiples of 16, or that are too large",
    ),
    "odd width": (config("llama", hidden_size=72), "a row of 72 numbers is no multiple of 16"),
    "small heads": (config("llama", head_dim=8), "its heads have 8 numbers, which is no multiple of 16 up to 512"),
    "narrow states": (
        config("qwen3_5_text", **DELTA | {"linear_key_head_dim": 8}),
        "its states have 8 numbers in a row, which is no multiple of 16",
    ),
    "long convolutions": (
        config("qwen3_5_text", **DELTA | {"linear_conv_kernel_dim": 9}),
        "its convolutions look at 9 tokens, and not at 2 to 8",
    ),
    "small blocks": (FAMILIES["llama"], "the block size 8 is no multiple of 16"),
    "large heads": (config("llama", head_dim=528), "its heads have 528 numbers, which is no multiple of 16 up to 512"),
}


@pytest.mark.parametrize("case", NOT_KNOWN)
def test_an_unsupported_model_is_logged_and_served_in_another_way_unless_it_must_be_exact(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    config, reason = NOT_KNOWN[case]
    model = make_model(config)
    options = {"device": "cpu", "kv_blocks": 16, "cpu_threads": 1, "block_size": 8 if case == "small blocks" else 16}
    assert answer(save(model, tmp_path), **options) == generate(model, PROMPTS[:1], 12)
    lines = [text for name, _, text in caplog.record_tuples if name.startswith("oaiserve")]
    in_torch = f"The model runs in plain PyTorch, which is slower: {reason}"
    assert in_torch in lines or f"The model does not start from a description of its files: {reason}" in lines
    with pytest.raises(StartupError, match=re.escape(f"--exact needs the native step, which cannot be used: {reason}")):
        answer(tmp_path, **options, exact=True)


# One family of each structure: norms before, after or around, parallel layers, LayerNorm, softcaps, kinds of states.
@pytest.mark.parametrize(
    "family", [*("llama", "gemma2", "gpt2", "olmo2", "cohere", "gpt_neox", "glm4"), *("qwen3_5_text", "lfm2", "mamba2")]
)
def test_bfloat16_is_as_close_to_float32_as_in_transformers(family: str) -> None:
    model = make_model(FAMILIES[family], dtype=torch.bfloat16)
    loaded = load(FAMILIES[family], dtype=torch.bfloat16)
    batch = batch_of_prompt(60, wants_prompt_logprobs=True)
    if (states := states_of(loaded)) is not None:
        batch.states = states.of_step([StateChunk(0, 0, 60)])
    with torch.inference_mode():
        ids = batch.input_ids[None].long()
        own = model(ids).logits[0].float()
        exact = model.float()(ids).logits[0]
        result = native(loaded, num_blocks=8).forward(batch).clone()
    result = torch.cat([result[1:], result[:1]])  # the row that samples comes first
    own_error, error = (float((logits - exact).norm() / exact.norm()) for logits in (own, result))
    assert own_error > 1e-3, "bfloat16 must make a difference"
    assert error < 1.1 * own_error
