"""Layers that keep a state: a step's sequences, in any order and in any parts, get what transformers' code computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from oaiserve.checkpoints.source import find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.spec import LayerStateShapes, StateShape
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.states import LayerStates, StateChunk, States
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.engine.start.described import describe_model
from oaiserve.errors import StartupError
from tests.engine.doubles import SimulatedEngine
from tests.engine.model.runners import eager_runner, greedy_answers
from tests.engine.model.steps import sequence_of
from tests.engine.remembered import save
from tests.models.decoders import generate, random_model
from tests.models.described import SmallModel, described
from tests.models.small_configs import config_of

PROMPT = [5, 9, 3, 17, 60, 2, 2, 41, 8, 33, 71, 12]
# One of each kind: the scan of Mamba 2, the delta rule, convolutions, states next to attention.
KINDS = ["mamba2", "falcon_h1", "qwen3_next", "lfm2"]
SHAPES = {0: LayerStateShapes(StateShape((2, 3), torch.float32), StateShape((2, 2), torch.float64))}


def held(ids: list[int], state: int) -> Sequence:
    """Return a sequence that runs, with a state and with blocks of its own."""
    return sequence_of(ids, range(4 * state, 4 * state + 4), name=str(state), state=state)


def computed(runner: ModelRunner, *chunks: tuple[Sequence, int, int]) -> torch.Tensor:
    """Compute chunks (sequence, start, end) in one step, and return the logits of each chunk's last token."""
    step = Step([Chunk(sequence, start, end - start) for sequence, start, end in chunks])
    return runner.launch(step).logits.clone()


@pytest.fixture(scope="module", params=KINDS)
def loaded(request: pytest.FixtureRequest) -> SmallModel:
    return described(random_model(config_of(request.param)))


@pytest.fixture
def runner(loaded: SmallModel) -> ModelRunner:
    return eager_runner(loaded, num_blocks=32, block_size=4)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_a_prompt_has_the_same_logits_wherever_it_is_cut(loaded: SmallModel, runner: ModelRunner) -> None:
    whole = computed(runner, (held(PROMPT, 0), 0, len(PROMPT)))
    assert torch.isfinite(whole).all()
    for cut in range(1, len(PROMPT)):
        sequence = held(PROMPT, cut % 8)
        computed(runner, (sequence, 0, cut))
        assert close(computed(runner, (sequence, cut, len(PROMPT))), whole), f"cut at {cut}"


def test_a_sequence_does_not_see_the_others_of_its_steps(runner: ModelRunner) -> None:
    """Their states lie side by side in one step, apart and in another order in the next."""
    texts = [PROMPT[:7], PROMPT[2:9], PROMPT[4:11], PROMPT[1:8]]
    alone = [computed(runner, (held(text, 0), 0, 7))[0] for text in texts]
    first, second, third, fourth = (held(text, state) for text, state in zip(texts, (1, 2, 5, 4), strict=True))
    computed(runner, (first, 0, 4), (second, 0, 5))
    computed(runner, (first, 4, 5), (second, 5, 6), (third, 0, 5))
    computed(runner, (third, 5, 6), (first, 5, 6), (fourth, 0, 6))
    together = computed(runner, (fourth, 6, 7), (second, 6, 7), (first, 6, 7), (third, 6, 7))
    for each, expected in zip(together, (alone[3], alone[1], alone[0], alone[2]), strict=True):
        assert close(each, expected)


def test_a_state_that_was_used_before_begins_anew(runner: ModelRunner) -> None:
    expected = computed(runner, (held(PROMPT[:1], 1), 0, 1), (held(PROMPT, 0), 0, len(PROMPT)))
    again = computed(runner, (held(PROMPT[:1], 0), 0, 1), (held(PROMPT, 1), 0, len(PROMPT)))
    assert close(again, expected)


def test_a_copied_state_goes_on_by_itself(runner: ModelRunner) -> None:
    whole = computed(runner, (held(PROMPT, 0), 0, len(PROMPT)))
    leader = held(PROMPT[:9], 2)
    copy = held(PROMPT, 6)
    computed(runner, (leader, 0, 8))
    runner.copy_blocks(list(zip(leader.blocks, copy.blocks, strict=True)))
    step = Step([Chunk(leader, 8, 1), Chunk(copy, 8, len(PROMPT) - 8)], state_copies=[(2, 6)])
    assert close(runner.launch(step).logits[1:], whole)


def test_states_are_taken_side_by_side_or_gathered_and_written_back() -> None:
    states = States(SHAPES, 4, torch.device("cpu"))

    def count(hidden: torch.Tensor, own: LayerStates) -> torch.Tensor:
        own.recurrent.add_(hidden.sum(1)[..., None])
        own.conv.copy_(torch.cat([own.conv, hidden.transpose(1, 2)], dim=-1)[..., -3:])
        return hidden * 2

    hidden = torch.arange(10.0).view(1, 5, 2)
    for parts in ([(1, 0, 1), (2, 0, 1), (3, 0, 3)], [(3, 3, 1), (1, 1, 1), (2, 1, 3)]):
        step = states.of_step([StateChunk(*part) for part in parts])
        assert torch.equal(step.mix(0, hidden, count), hidden * 2)
    seen: list[LayerStates] = []
    step = states.of_step([StateChunk(state, 1, 1) for state in (1, 2, 3)])
    step.mix(0, hidden[:, :3], lambda hidden, own: seen.append(own) or hidden)
    (layer,) = seen
    assert layer.recurrent[:, 0, 0].tolist() == [0 + 2, 2 + 18, 18 + 0]
    assert layer.conv[:, 0].tolist() == [[0, 0, 2], [4, 6, 8], [6, 8, 0]]


# -- what is refused, and what is served in another way ----------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small hybrid, of sizes that the native step takes."""
    return save(random_model(config_of("granitemoehybrid", vocab_size=256)), tmp_path_factory.mktemp("hybrid"))


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.compiler)])
def test_a_folder_is_served_with_prefix_cache_and_without_drafts(
    folder: Path, is_compiled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [[*b"A state of a model"], [*range(100, 200)], [*b"A state of a model"], [*range(100, 200), 7, 9]]
    expected = generate(model, prompts, 9)
    caplog.set_level("DEBUG")
    options: dict[str, Any] = {"max_running": 2, "max_step_tokens": 32, "kv_blocks": 32, "device": "cpu"}
    with SimulatedEngine.from_pretrained(folder, EngineOptions(compile=is_compiled, **options)) as engine:
        for _ in range(2):
            assert greedy_answers(engine, prompts, 9) == expected
        snapshot = engine.snapshot()
    assert snapshot.num_prefix_hits == 3 * 96  # the first of these prompts leaves its state behind
    assert snapshot.num_drafts == 0
    assert "There is room for 4, so at most 2 sequences run at once (--max-running is 2)" in caplog.text
    assert ("The model runs in plain PyTorch" in caplog.text) != is_compiled


def test_adapters_are_refused(folder: Path) -> None:
    reason = "--lora is not for 'GraniteMoeHybridForCausalLM', which has layers that keep a state."
    with pytest.raises(StartupError, match=reason):
        SimulatedEngine.from_pretrained(folder, EngineOptions(device="cpu", kv_blocks=16, lora=("a=/tmp",)))


def test_a_model_without_positions_takes_any_length_that_is_asked_for(tmp_path: Path) -> None:
    random_model(config_of("mamba2", max_position_embeddings=None, num_attention_heads=None)).save_pretrained(tmp_path)
    source = find_model(tmp_path)
    lengths = [
        describe_model(source, EngineOptions(compile=False, max_model_len=asked)).spec.max_model_len
        for asked in (None, 100_000)
    ]
    assert lengths == [2048, 100_000]
