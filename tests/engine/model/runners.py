"""Runners of small models, in which a test can replace some parts, engines on them, and their answers."""

from typing import Any

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.engine import Engine
from oaiserve.engine.engine_parts import EngineParts
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.states import States
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.engine.types.adapters import AdapterTable
from tests.engine.doubles import SimulatedEngine, new_world
from tests.engine.model.steps import BLOCK_SIZE, sequence_of
from tests.models.decoders import byte_tokenizer
from tests.models.described import SmallModel

NUM_STATES = 24  # more than sequences run, so that some can be kept
IN_SMALL_BLOCKS = {"block_size": 4, "max_model_len": 48}
PROMPTS = [[5, 9, 2, 40, 11], [7] * 9, [3, 1, 4, 1, 5, 9, 2, 6], [8, 8]]  # prompts of `decode`


def eager_runner(
    loaded: SmallModel,
    *,
    num_blocks: int,
    block_size: int,
    executor: Executor | None = None,
    **arguments: Any,
) -> ModelRunner:
    """Return a runner on this executor, or on the reference. `arguments` are those of ModelRunner."""
    if executor is None:
        executor = reference_of(loaded, num_blocks=num_blocks, block_size=block_size)
    return ModelRunner(executor, loaded.device, block_size, states=states_of(loaded), **arguments)


def reference_of(loaded: SmallModel, *, num_blocks: int, block_size: int) -> ReferenceExecutor:
    sizes = {"num_blocks": num_blocks, "block_size": block_size}
    return ReferenceExecutor(loaded.decoder, dtype=loaded.dtype, device=loaded.device, **sizes)


def states_of(loaded: ModelSpec) -> States | None:
    """Return states of a model whose layers keep one; the last is for padding."""
    return States(loaded.state_shapes, NUM_STATES + 1, loaded.device) if loaded.state_shapes else None


def make_engine(
    loaded: ModelSpec,
    runner: ModelRunner,
    num_blocks: int = 64,
    *,
    max_model_len: int = 96,
    eos: int = -1,
    adapters: AdapterTable | None = None,
    drafter: Any = None,
    **options: Any,
) -> SimulatedEngine:
    """Return an engine whose tokenizer has a token for each byte, and whose blocks have 16 tokens by default."""
    parts = EngineParts.of(
        ServedModel(
            tokenizer=Tokenizer(byte_tokenizer()),
            runner=runner,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=loaded.vocab_size,
            eos_token_ids=frozenset([eos]) - {-1},
            num_states=NUM_STATES if loaded.state_shapes else 0,
            counts_tokens=runner.counts_tokens,
            adapters=adapters or AdapterTable(),
        ),
        EngineOptions(**{"block_size": BLOCK_SIZE, **options}),
        drafts=drafter,
        runtime=new_world(),
    )
    return SimulatedEngine(parts)


def greedy(num_tokens: int, **params: Any) -> SamplingParams:
    """Return the parameters of a greedy answer of this length."""
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, **params)


def greedy_answers(engine: Engine, prompts: list[list[int]], num_tokens: int = 12, **params: Any) -> list[list[int]]:
    """Return the ids of greedy answers to prompts that come all at once."""
    return [completion.token_ids for completion in engine.generate(prompts, greedy(num_tokens, **params))]


def decode(runner: ModelRunner, prompts: list[list[int]], adapters: list[int], num_tokens: int) -> list[list[int]]:
    """Return greedy answers to prompts with these adapters, all in the same steps."""
    sequences = [
        sequence_of(prompt, range(index * 4, index * 4 + 4), temperature=0.0, adapter=adapter)
        for index, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True))
    ]
    chunks = [Chunk(sequence, 0, len(sequence.token_ids)) for sequence in sequences]
    for _ in range(num_tokens):
        results = runner.collect(runner.launch(Step(chunks))).chunks
        for sequence, result in zip(sequences, results, strict=True):
            sequence.token_ids += result.token_ids
        chunks = [Chunk(sequence, len(sequence.token_ids) - 1, 1) for sequence in sequences]
    return [sequence.token_ids[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]
