"""Tests /v2/embed: Cohere's requests, and the types of numbers in the answer."""

from base64 import b64decode
from typing import Any

import numpy as np
import pytest

from oaiserve.engine.request import TextPrompt
from oaiserve.engine.types.pooling import Pooling
from tests.routes.asking import answered, refused
from tests.routes.doubles import pools
from tests.serving import Served

EMBED = "/v2/embed"
VECTORS = [[3.0, 0.0, 4.0, 0.0], [1.0, -1.0, 1.0, -1.0]]
UNITS = [[0.6, 0.0, 0.8, 0.0], [0.5, -0.5, 0.5, -0.5]]


@pytest.fixture
def embedder(served: Served) -> Served:
    served.engine.pooling = Pooling("embed", 4, prompts={"query": "Q: ", "passage": "P: ", "Clustering": "C: "})
    served.engine.script = pools(*VECTORS)
    return served


def embed(served: Served, **body: Any) -> Any:
    return answered(served.post(EMBED, **{"texts": ["a", "b"], **body}))


def texts_read(served: Served) -> list[str]:
    prompts = served.engine.submitted.get().prompts
    return [prompt.text for prompt in prompts if isinstance(prompt, TextPrompt)]


def test_the_answer_has_the_form_of_cohere(embedder: Served) -> None:
    answer = embed(embedder)
    assert answer.pop("id").startswith("embd-")
    assert answer["embeddings"].pop("float") == [pytest.approx(unit) for unit in UNITS]
    assert answer == {
        "embeddings": {},
        "texts": ["a", "b"],
        "meta": {
            "billed_units": {"input_tokens": 6},
            "tokens": {"input_tokens": 6},
            "api_version": {"version": "2"},
        },
        "response_type": "embeddings_by_type",
    }
    record = embedder.telemetry.next_record()
    assert (record.operation, record.http_route) == ("embeddings", EMBED)


def test_numbers_have_the_requested_types(embedder: Served) -> None:
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    vectors = embed(embedder, embedding_types=types)["embeddings"]
    assert [*vectors] == types
    assert vectors["int8"] == [[76, 0, 102, 0], [64, -64, 64, -64]]
    assert vectors["uint8"] == [[204, 128, 230, 128], [192, 64, 192, 64]]
    assert vectors["ubinary"] == [[0b1010_0000], [0b1010_0000]]
    assert vectors["binary"] == [[0b1010_0000 - 128], [0b1010_0000 - 128]]
    decoded = [np.frombuffer(b64decode(text), dtype="<f4").tolist() for text in vectors["base64"]]
    assert decoded == vectors["float"]


@pytest.mark.parametrize(
    ("input_type", "before", "adapted"),
    [
        ("search_query", "Q: ", None),
        ("search_document", "P: ", None),
        ("clustering", "C: ", None),
        ("classification", "", "input_type: this model has no prompt for it"),
        (None, "", None),
    ],
)
def test_the_type_of_input_selects_the_models_prompt(
    embedder: Served, input_type: str | None, before: str, adapted: str | None
) -> None:
    response = embedder.post(EMBED, texts=["a"], input_type=input_type)
    assert (response.status_code, response.headers.get("x-oaiserve-adapted")) == (200, adapted)
    assert texts_read(embedder) == [f"{before}a"]


def test_texts_may_come_as_inputs(embedder: Served) -> None:
    embed(embedder, texts=None, inputs=[{"content": [{"type": "text", "text": text}]} for text in "xy"])
    assert texts_read(embedder) == ["x", "y"]


@pytest.mark.parametrize(
    ("body", "limit"),
    [({}, 4096), ({"max_tokens": 5}, 5), ({"max_tokens": 10**6}, 4096), ({"truncate": "NONE"}, None)],
)
def test_long_texts_are_cut_unless_the_client_forbids_it(
    embedder: Served, body: dict[str, Any], limit: int | None
) -> None:
    embed(embedder, **body)
    assert [prompt.most_tokens for prompt in embedder.engine.submitted.get().prompts] == [limit, limit]


def test_vectors_are_cut_if_the_model_was_trained_for_it(embedder: Served) -> None:
    refused(embedder.post(EMBED, texts=["a"], output_dimension=2), "output_dimension", "4 numbers")
    embedder.engine.pooling = Pooling("embed", 4, dimensions=(2, 4))
    assert embed(embedder, texts=["a"], output_dimension=2)["embeddings"]["float"] == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"texts": None}, "texts"),
        ({"inputs": [{"content": [{"type": "text", "text": "a"}]}]}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": ["a", ""]}, "texts"),
        ({"images": ["data:image/png;base64,AA=="]}, "images"),
        ({"input_type": "image"}, "input_type"),
        ({"texts": None, "inputs": [{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}, "inputs"),
        ({"texts": None, "inputs": [{"content": []}]}, "inputs"),
        ({"truncate": "START"}, "truncate"),
        ({"truncate": "NONE", "max_tokens": 5}, "max_tokens"),
        ({"embedding_types": ["int4"]}, "embedding_types"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(embedder: Served, body: dict[str, Any], param: str) -> None:
    refused(embedder.post(EMBED, **{"texts": ["a"], **body}), param)
