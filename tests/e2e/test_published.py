"""Asks a server with a small random model what its published schema allows, and what it forbids.

The requests are a function of the seed; `python -m tools.attack --only generated` sends many more.
"""

import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import pytest
from hypothesis import strategies as st

from oaiserve.app import create_app
from oaiserve.config import Config, EngineOptions, ServerOptions
from oaiserve.engine.text.tokenizer import Tokenizer
from tests.engine.doubles import make_engine
from tests.engine.model.runners import eager_runner
from tests.engine.text.tokenizers_for_tests import CHATML
from tests.models.decoders import FAMILIES, byte_tokenizer, random_model
from tests.models.described import described
from tests.published import published, validator
from tests.routes.doubles import FakeTelemetry
from tests.world.serving import Place
from tools.attack import schema

NUM_REQUESTS = 30  # requests to each route and of each kind
SEED = 20
FEW = st.integers(1, 4)
# Any number of tokens is allowed, and takes as long.
SHORT: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "ChatBody": {"max_completion_tokens": FEW},
    "CompletionBody": {"max_tokens": FEW, "max_completion_tokens": FEW, "n": st.integers(1, 2)},
    "ResponsesBody": {"max_output_tokens": FEW},
}
ROUTES = schema.bodies(published())
ANYTHING = cache(lambda: schema.drawn(schema.ANYTHING, SEED, NUM_REQUESTS))


@pytest.fixture(scope="module")
def http(place_of_module: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    loaded = described(random_model(FAMILIES["llama"]))
    of_model = {"tokenizer": Tokenizer(tokenizer), "vocab_size": loaded.vocab_size, "eos_token_ids": frozenset()}
    runner = eager_runner(loaded, num_blocks=256, block_size=4)
    world = place_of_module.world
    engine = make_engine(runner, kv_blocks=256, max_model_len=512, max_step_tokens=512, runtime=world, **of_model)
    adapters = EngineOptions(lora_dir=tmp_path_factory.mktemp("adapters"))
    app = create_app(Config("random", ServerOptions(), adapters), engine, FakeTelemetry(world), runtime=world)
    with place_of_module.running(app) as url, place_of_module.plain(url) as client:
        yield client


@pytest.mark.parametrize("path", ROUTES)
def test_what_the_schema_allows_is_understood_and_what_it_forbids_is_refused(http: httpx.Client, path: str) -> None:
    """The client holds each answer against the schema of the route."""
    name = ROUTES[path]
    fitting = schema.fitting(published(), name, SHORT.get(name, {}))
    allowed = validator(f"#/components/schemas/{name}", is_strict=False)
    statuses: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    kinds = (fitting, schema.mutated(fitting))
    for body in [*(body for kind in kinds for body in schema.drawn(kind, SEED, NUM_REQUESTS)), *ANYTHING()]:
        content = json.dumps(body).encode()
        is_allowed = allowed.is_valid(json.loads(content))
        response = http.post(path, content=content, headers={"content-type": "application/json"})
        statuses[is_allowed][response.status_code] += 1
        assert response.status_code < 500, (content, response.text)
        assert is_allowed or response.status_code >= 400, (content, [e.message for e in allowed.iter_errors(body)])
    assert statuses[True].total() >= NUM_REQUESTS / 2
    assert statuses[False].total() >= NUM_REQUESTS / 2
