"""Steps with adapters are replayed: the same tokens as one operation after the other, whichever adapters they have."""

import gc
import weakref

import pytest

from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.plugins.cuda.executor.step_sizes import Size
from tests.engine.executors.native.small_models import FAMILIES
from tests.engine.model.runners import PROMPTS, decode
from tests.engine.model.steps import BLOCK_SIZE, CPU, sequence_of
from tests.models.adapters import random_adapter
from tests.models.decoders import LLAMA_OF_ONE_LAYER
from tests.models.small_configs import config_of
from tests.plugins.cuda.executor.step_runs import GraphRunner, Model, check_replayed, model_of, plain_runner

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.plugins.cuda.executor.triton_adapters import WIDEST_REPLAYED, TritonAdapters

NUM_BLOCKS = 32
SIZES = [Size(4), Size(4, 24), Size(4, 40)]


@pytest.fixture(scope="module")
def llama() -> Model:
    return model_of(LLAMA_OF_ONE_LAYER)


@pytest.fixture(scope="module")
def adapters(llama: Model) -> dict[int, Adapter]:
    """Return adapters of some modules each: the third has other ones than the first two."""
    shapes = llama.decoder.adaptable()
    attention = {name: shape for name, shape in shapes.items() if "attn" in name}
    mlp = {name: shape for name, shape in shapes.items() if "mlp" in name}
    return {
        1: random_adapter(attention, 1),
        2: random_adapter(attention, 2, rank=20),
        3: random_adapter(mlp, 3, rank=1),
        4: random_adapter(shapes, 4, rank=WIDEST_REPLAYED + 1),
    }


def expected_runner(model: Model, adapters: dict[int, Adapter]) -> ModelRunner:
    return with_adapters(plain_runner(model, NUM_BLOCKS, BLOCK_SIZE), adapters)


def kernels_for(model: Model, most: int = 8) -> TritonAdapters:
    return TritonAdapters(model.decoder.adaptable(), most, CPU)


def graph_runner(model: Model, adapters: dict[int, Adapter], kernels: TritonAdapters) -> GraphRunner:
    runner = GraphRunner(model, SIZES, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, width=4, adapters=kernels)
    with_adapters(runner, adapters)
    return runner


def with_adapters(runner: ModelRunner, adapters: dict[int, Adapter]) -> ModelRunner:
    for number, adapter in adapters.items():
        runner.add_adapter(number, adapter)
    return runner


def test_decodes_draw_the_same_tokens_with_whichever_adapters(llama: Model, adapters: dict[int, Adapter]) -> None:
    """The table has room for two, so that they take each other's places."""
    runner = graph_runner(llama, adapters, kernels_for(llama, 2))
    plain = expected_runner(llama, adapters)
    assert runner.graphs.num_captured == 2 * len(SIZES)
    for numbers in ([1, 0, 2, 1], [0, 2, 0, 0], [0, 0, 0, 0], [3, 1, 0, 3], [3, 3, 3, 1]):
        assert decode(runner, PROMPTS, numbers, 3) == decode(plain, PROMPTS, numbers, 3)
    assert len(runner.replayed) == runner.num_steps


def test_adapters_of_a_high_rank_are_launched_one_by_one(llama: Model, adapters: dict[int, Adapter]) -> None:
    runner = graph_runner(llama, adapters, kernels_for(llama))
    numbers = [4, 1, 0, 2]
    assert decode(runner, PROMPTS, numbers, 2) == decode(expected_runner(llama, adapters), PROMPTS, numbers, 2)
    assert not runner.replayed


def test_an_adapter_that_nobody_has_any_more_is_freed() -> None:
    kernels = TritonAdapters(["up"], 2, CPU)
    for seed in range(5):
        adapter = random_adapter({"up": (8, 8)}, seed)
        is_alive = weakref.ref(adapter)
        assert kernels.numbers([None, adapter])[0] == 0
        del adapter
        gc.collect()
        assert is_alive() is None


STEPS: dict[str, tuple[list[int], list[int]]] = {
    "prompts alone": ([], [1, 0, 2]),
    "decodes beside prompts": ([2, 0, 1], [0, 3]),
    "prompts without one": ([1, 1], [0]),
    "decodes without one": ([0, 0], [3, 1]),
}


@pytest.fixture(scope="module")
def runners(llama: Model, adapters: dict[int, Adapter]) -> tuple[GraphRunner, ModelRunner]:
    return graph_runner(llama, adapters, kernels_for(llama)), expected_runner(llama, adapters)


@pytest.mark.parametrize("name", STEPS)
def test_prompts_with_adapters_are_replayed_alone_and_beside_decodes(
    runners: tuple[GraphRunner, ModelRunner], name: str
) -> None:
    decoding, arriving = STEPS[name]
    sequences = [
        sequence_of([(11 * n + 7 * i) % 97 for i in range(5 + n)], [n], temperature=0.0, adapter=adapter)
        for n, adapter in enumerate([*decoding, *arriving])
    ]
    before = [Chunk(one, 0, one.prompt_len - 1, max_draws=0) for one in sequences[: len(decoding)]]
    decodes = [Chunk(one, one.prompt_len - 1, 1) for one in sequences[: len(decoding)]]
    step = Step([*decodes, *(Chunk(one, 0, one.prompt_len) for one in sequences[len(decoding) :])])
    for runner in runners if before else ():
        runner.collect(runner.launch(Step(before)))
    check_replayed(*runners, step)


@pytest.mark.parametrize("family", ["phi3", "gpt_neox", "qwen2_moe", "qwen3_5_text", "falcon_h1"])
def test_modules_of_joined_and_sorted_rows_are_adapted_in_graphs(family: str) -> None:
    model = model_of(FAMILIES.get(family) or config_of(family))
    adapters = {1: random_adapter(model.decoder.adaptable(), 1)}
    kernels = TritonAdapters(model.decoder.adaptable(), 8, CPU)
    own = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "width": 4, "adapters": kernels}
    runner = with_adapters(GraphRunner(model, [Size(4)], **own), adapters)
    assert decode(runner, PROMPTS[:1], [1], 3) == decode(expected_runner(model, adapters), PROMPTS[:1], [1], 3)
    assert Size(4) in runner.replayed
