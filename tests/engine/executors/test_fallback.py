"""The fallback: a step's sequences, in any parts, get the logits that transformers' code computes of the whole text."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.engine_parts import EngineParts
from oaiserve.engine.executors.fallback import CachedForward, FallbackExecutor
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.batch import BatchMedia, build_batch
from oaiserve.engine.model.states import StateChunk
from oaiserve.engine.request import Request, TokenPrompt
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.engine.start.started import assemble
from oaiserve.engine.start.ways.fallback import start_fallback
from oaiserve.engine.text.tokenizer import Tokenizer
from tests.engine.answers import run_to_the_end
from tests.engine.doubles import SimulatedEngine, new_world
from tests.engine.model.engine_runs import EOS, run, some_requests
from tests.engine.model.runners import IN_SMALL_BLOCKS, eager_runner, greedy, greedy_answers
from tests.engine.model.steps import sequence_of
from tests.models import decoders
from tests.models.decoders import byte_tokenizer, random_model
from tests.models.described import described
from tests.models.small_configs import config_of

TEXT = [5, 9, 3, 17, 60, 2, 2, 41, 8, 33, 71, 12]
# Layers with keys and values, with windows or chunks, with states, with both, and those that have no other executor.
TYPES = (
    *("llama", "gpt2", "opt", "gemma3n_text", "llama4_text", "bitnet", "nanochat", "doge", "gpt_neo"),
    *("falcon_h1", "bamba", "jamba", "mamba", "rwkv", "minimax", "qwen3_next"),
)
ONE_BY_ONE = {"jamba", "mamba"}  # after the first chunk
_CHANGES: dict[str, dict[str, Any]] = {
    "gpt_neo": {"num_layers": 3, "attention_types": [[["global", "local"], 1], [["global"], 1]]},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1},
    "llama4_text": {"attention_chunk_size": 6},
}


@cache
def model_of(name: str) -> PreTrainedModel:
    return random_model(config_of(name, **_CHANGES.get(name, {})))


def executor_of(name: str, num_sequences: int = 8) -> FallbackExecutor:
    return FallbackExecutor(CachedForward(model_of(name)), num_sequences, continues_chunks=name not in ONE_BY_ONE)


def runner_of(name: str, num_sequences: int = 8) -> ModelRunner:
    executor = executor_of(name, num_sequences)
    return ModelRunner(executor, torch.device("cpu"), 4, states=executor.caches)


def held(ids: list[int], state: int, **others: Any) -> Sequence:
    """Return a sequence that runs, with a cache of its own."""
    return sequence_of(ids, range(4 * state, 4 * state + 4), name=str(state), state=state, **others)


@torch.inference_mode()
def logits_of(runner: ModelRunner, *chunks: tuple[Sequence, int, int]) -> torch.Tensor:
    """Compute chunks (sequence, start, end) in one step, and return the logits of each chunk's last token."""
    return runner.launch(Step([Chunk(sequence, start, end - start) for sequence, start, end in chunks])).logits.clone()


@torch.inference_mode()
def own_logits(name: str, ids: list[int]) -> torch.Tensor:
    """Return the logits that a model's own code computes of a whole text, without a cache."""
    logits: torch.Tensor = model_of(name)(torch.tensor([ids])).logits
    return logits[0]


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", TYPES)
def test_chunks_beside_other_sequences_have_the_logits_of_the_whole_text(name: str) -> None:
    runner = runner_of(name)
    other = TEXT[::-1]
    first = held(TEXT, 2)
    second = held(other, 5)
    of_first = own_logits(name, TEXT)
    of_second = own_logits(name, other)
    assert is_close(logits_of(runner, (first, 0, 4)), of_first[[3]])
    assert is_close(logits_of(runner, (first, 4, 9), (second, 0, 5)), torch.stack([of_first[8], of_second[4]]))
    for end in (10, 11, 12):
        found = logits_of(runner, (second, end - 5, end - 4), (first, end - 1, end))
        assert is_close(found, torch.stack([of_second[end - 5], of_first[end - 1]])), end
    # In the place of the first one, a sequence begins with a cache of its own.
    assert is_close(logits_of(runner, (held(other, 2), 0, 7)), of_second[[6]])


def test_a_copied_cache_goes_on_by_itself() -> None:
    """The layers of this model have both keys and values, which grow, and states, which are changed in place."""
    runner = runner_of("falcon_h1")
    expected = own_logits("falcon_h1", TEXT)
    leader = held([*TEXT[:8], 90, 91], 2)
    copy = held(TEXT, 6)
    logits_of(runner, (leader, 0, 8))
    runner.launch(Step([Chunk(leader, 8, 2)], state_copies=[(2, 6)]))
    assert is_close(logits_of(runner, (copy, 8, 12)), expected[[11]])


def test_logits_of_a_prompt_follow_those_of_the_draws() -> None:
    runner = runner_of("llama")
    expected = own_logits("llama", TEXT)
    asking = held(TEXT, 1, prompt_logprobs=1, wants_prompt_logprobs=True)
    drawing = held(TEXT[:5], 2)
    step = Step([Chunk(asking, 0, 7, max_draws=0), Chunk(drawing, 0, 5)])
    launched = runner.launch(step)
    assert launched.prompt_rows == [(0, 1, 7)]
    assert is_close(launched.logits, torch.cat([expected[[4]], expected[:7]]))


@torch.inference_mode()
def test_vectors_of_media_take_the_places_of_tokens() -> None:
    executor = executor_of("llama")
    model = model_of("llama")
    vectors = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([3, 4])
    batch = build_batch(Step([Chunk(held(TEXT, 0), 0, 8)]), 4, torch.device("cpu"))
    batch.input_ids[rows] = 10**6  # no token of the vocabulary
    batch.media = BatchMedia(rows, vectors)
    batch.states = executor.caches.of_step([StateChunk(0, 0, 8)])
    embeddings = model.get_input_embeddings()(torch.tensor([TEXT[:8]])).index_copy(1, rows, vectors[None])
    assert is_close(executor.forward(batch), model(inputs_embeds=embeddings).logits[0, -1:])


# -- in an engine ------------------------------------------------------------------------------------------------------


def engine_of(name: str, eos: int | None = None, **options: Any) -> Engine:
    chosen = EngineOptions(**{"block_size": 4, "max_running": 8, "max_model_len": 96, "cpu_threads": 1, **options})
    started = start_fallback(model_of(name), chosen, name)
    world = new_world()
    served = assemble(started, Tokenizer(byte_tokenizer()), chosen, world)
    if eos is not None:
        served = replace(served, eos_token_ids=frozenset([eos]))
    return SimulatedEngine(EngineParts.of(served, chosen, runtime=world))


@pytest.mark.parametrize("name", TYPES)
def test_answers_are_those_of_transformers_however_steps_are_packed(name: str) -> None:
    prompts = [[5, 9, 3, 17], list(range(20, 51)), [90], [7] * 12, [11, 40, 11, 40, 11]]
    with engine_of(name, kv_blocks=13, max_step_tokens=8) as engine:
        answers = greedy_answers(engine, prompts, 8)
        assert engine.snapshot().num_preemptions > 0
    assert decoders.greedy(model_of(name), prompts, answers) == answers


def test_prompts_that_begin_alike_share_a_kept_cache() -> None:
    prompt = [*range(3, 83)]
    with engine_of("llama4_text", max_step_tokens=16) as engine:
        (first,) = greedy_answers(engine, [prompt], 6)
        (second,) = greedy_answers(engine, [[*prompt, *first[:2]]], 4)
        assert engine.snapshot().num_prefix_hits == 76  # all full blocks before the last token
    assert second == first[2:]


def test_choices_of_a_prompt_go_on_from_copies_of_its_cache() -> None:
    request = Request("r", (TokenPrompt(TEXT),), greedy(6, n=3))
    answers = run_to_the_end(engine_of("falcon_h1", tokenize_workers=0), [request])
    assert list(answers.token_ids.values()) == decoders.generate(model_of("falcon_h1"), [TEXT], 6) * 3


def test_grammars_penalties_and_log_probabilities_work_as_elsewhere() -> None:
    """Answers have the same log-probabilities as in the eager executor."""
    requests = some_requests(3, 40)
    loaded = described(model_of("llama"))
    expected = run(loaded, eager_runner(loaded, num_blocks=64, block_size=4), requests, 64)
    engine = engine_of("llama", eos=EOS, **IN_SMALL_BLOCKS, max_running=12, max_step_tokens=24, tokenize_workers=0)
    run_to_the_end(engine, requests).check(expected)
