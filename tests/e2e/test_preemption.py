"""Tests that preemptions do not change the answers of the demo model.

A token that is computed again in another batch has other rounding errors. The tests sample from the best 20 tokens: a
draw from the whole vocabulary falls within a rounding error (1e-6) of the border between two tokens in one of a hundred
cases.
"""

from __future__ import annotations

import random
from collections import defaultdict

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.request import Finished, Request, SamplingParams, TokenChunk, TokenPrompt
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.load import load_model
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.files import demo
from tests.engine.doubles import Inbox
from tests.engine.model.runners import eager_runner

NUM_REQUESTS = 24  # small models have many more: test_families.py
MOST_PROMPT_TOKENS, MOST_TOKENS, BLOCK_SIZE = 16, 14, 2
BLOCKS_OF_THE_LARGEST = (MOST_PROMPT_TOKENS + MOST_TOKENS) // BLOCK_SIZE
FEW_BLOCKS, PLENTY_OF_BLOCKS = BLOCKS_OF_THE_LARGEST + 20, 2 * NUM_REQUESTS * BLOCKS_OF_THE_LARGEST
Answers = dict[tuple[str, int], list[int]]  # token ids, by request and choice


def requests() -> list[Request]:
    """Make requests of all lengths. One in three has a shared prefix, one in three samples, one in eight has n = 2."""
    rng = random.Random(5)
    shared = [rng.randrange(100, 40_000) for _ in range(MOST_PROMPT_TOKENS // 2)]
    made = []
    for i in range(NUM_REQUESTS):
        own = [rng.randrange(100, 40_000) for _ in range(rng.randint(1, MOST_PROMPT_TOKENS // 2))]
        prompt = shared[: rng.randint(1, len(shared))] + own if rng.random() < 1 / 3 else own * rng.randint(1, 2)
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.0, 1.0)),
            top_k=20,
            seed=i,
            n=2 if rng.random() < 1 / 8 else 1,
            max_tokens=rng.randint(1, MOST_TOKENS),
            ignore_eos=True,
        )
        made.append(Request(f"r{i}", (TokenPrompt(prompt),), params))
    return made


def answers(loaded: LoadedModel, num_blocks: int) -> tuple[Answers, EngineNumbers]:
    """Return the answers to all requests at once in an engine with this number of blocks, and its last snapshot."""
    tokenizer, inbox, found = Tokenizer.from_pretrained(demo.resolve()), Inbox(), defaultdict(list)
    asked = requests()
    engine = Engine(
        ServedModel(
            tokenizer=tokenizer,
            runner=eager_runner(loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE),
            num_blocks=num_blocks,
            max_model_len=MOST_PROMPT_TOKENS + MOST_TOKENS,
            vocab_size=tokenizer.vocab_size,
        ),
        EngineOptions(block_size=BLOCK_SIZE, max_waiting=2 * NUM_REQUESTS),
    )
    with engine:
        for request in asked:
            engine.submit(request, inbox)
        ended = inbox.wait_terminal(*(request.request_id for request in asked))
    assert all(isinstance(event, Finished) for event in ended.values())
    for event in (event for events in inbox.hand_overs for event in events):
        if isinstance(event, TokenChunk):
            found[event.request_id, event.index] += event.token_ids
    return dict(found), engine.snapshot()


def test_answers_do_not_depend_on_preemptions() -> None:
    loaded = load_model(demo.resolve(), device="cpu", dtype="float32")
    expected, roomy = answers(loaded, PLENTY_OF_BLOCKS)
    found, tight = answers(loaded, FEW_BLOCKS)
    assert roomy.num_preemptions == 0
    assert tight.num_preemptions > 10
    assert (tight.blocks_used, tight.num_running, tight.num_waiting) == (0, 0, 0)
    assert {key: ids for key, ids in found.items() if ids != expected[key]} == {}
    assert found.keys() == expected.keys()
