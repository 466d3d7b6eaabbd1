"""Tests /embed with Hugging Face's client."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from huggingface_hub import FeatureExtractionInput, InferenceClient, constants

from oaiserve.engine.request import TextPrompt
from oaiserve.engine.types.pooling import Pooling
from oaiserve.plugins.pooling.hugging_face import FeaturesBody, TextsBody
from tests.routes.asking import refused
from tests.routes.doubles import pools
from tests.serving import Served

EMBED = "/embed"
VECTORS = [[3.0, 0.0, 4.0, 0.0], [1.0, -1.0, 1.0, -1.0]]
UNITS = [[0.6, 0.0, 0.8, 0.0], [0.5, -0.5, 0.5, -0.5]]


@pytest.fixture
def embedder(served_on_a_port: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # Offline, the client refuses this server, too.
    engine = served_on_a_port.engine
    engine.pooling = Pooling("embed", 4, dimensions=(2,), prompts={"query": "Q: "})
    engine.script = pools(*VECTORS)
    return served_on_a_port


def features(served: Served, texts: str | list[str], **options: Any) -> np.ndarray[Any, Any]:
    return InferenceClient(model=f"{served.url}{EMBED}", token="any").feature_extraction(texts, **options)


def prompts_read(served: Served) -> list[TextPrompt]:
    prompts = served.engine.submitted.get().prompts
    return [prompt for prompt in prompts if isinstance(prompt, TextPrompt)]


def test_a_text_or_several_have_a_row_each(embedder: Served) -> None:
    np.testing.assert_allclose(features(embedder, ["a", "b"]), UNITS, rtol=1e-6)
    assert [prompt.text for prompt in prompts_read(embedder)] == ["a", "b"]
    record = embedder.telemetry.next_record()
    assert (record.operation, record.http_route, record.prompt_tokens) == ("embeddings", EMBED, 6)
    np.testing.assert_allclose(features(embedder, "a"), UNITS[:1], rtol=1e-6)


def test_vectors_keep_their_length_and_are_cut(embedder: Served) -> None:
    np.testing.assert_array_equal(features(embedder, ["a", "b"], normalize=False), VECTORS)
    np.testing.assert_array_equal(features(embedder, ["a", "b"], normalize=False, dimensions=2), [[3, 0], [1, -1]])


def test_a_prompt_comes_first_and_only_truncated_texts_have_a_limit(embedder: Served) -> None:
    features(embedder, ["a", "b"], prompt_name="query")
    assert [(prompt.text, prompt.most_tokens) for prompt in prompts_read(embedder)] == [("Q: a", None), ("Q: b", None)]
    features(embedder, ["a", "b"], truncate=True, truncation_direction="right")
    assert [prompt.most_tokens for prompt in prompts_read(embedder)] == [embedder.engine.max_model_len] * 2


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"inputs": []}, "inputs", "must not be an empty list"),
        ({"inputs": ["a", ""]}, "inputs", "must not have an empty string, got one at index 1"),
        ({"inputs": "a", "prompt_name": "x"}, "prompt_name", "this model's prompts are: 'query', got 'x'"),
        ({"inputs": "a", "dimensions": 3}, "dimensions", "must be one of 2, got 3"),
        ({"inputs": "a", "truncate": True, "truncation_direction": "left"}, "truncation_direction", "at their end"),
    ],
)
def test_what_is_wrong_is_named(embedder: Served, body: dict[str, Any], param: str, says: str) -> None:
    refused(embedder.post(EMBED, **body), param, says)


def test_tokens_have_weights_where_the_model_weighs_them(embedder: Served) -> None:
    refused(embedder.post("/embed_sparse", inputs="a"), "model", "has no sparse_linear.safetensors")
    embedder.engine.pooling = Pooling("embed", 4, has_token_weights=True, token_size=4)
    embedder.engine.script = pools([7.0, 0.5, 250001.0, 0.25], [])
    answer = embedder.post("/embed_sparse", inputs=["a", "b"]).json()
    assert answer == [[{"index": 7, "value": 0.5}, {"index": 250001, "value": 0.25}], []]
    assert embedder.engine.submitted.get().params.pooled_as == "token_weights"


def test_each_token_has_a_vector(embedder: Served) -> None:
    embedder.engine.pooling = Pooling("embed", 4, prompts={"query": "Q: "}, token_size=2)
    answer = embedder.post("/embed_all", inputs=["a", "b"], prompt_name="query").json()
    assert answer == [[[3, 0], [4, 0]], [[1, -1], [1, -1]]]
    request = embedder.engine.submitted.get()
    assert (request.params.pooled_as, [prompt.text for prompt in request.prompts]) == (
        "token_vectors",
        ["Q: a", "Q: b"],
    )
    refused(
        embedder.post("/embed_all", inputs=["a", ""]), "inputs", "must not have an empty string, got one at index 1"
    )


def test_each_field_of_the_official_package_is_read() -> None:
    official = {field.name for field in fields(FeatureExtractionInput)}
    assert official >= {"inputs", "truncation_direction"}
    assert official <= {*FeaturesBody.__struct_fields__}
    assert official - {"normalize", "dimensions"} <= {*TextsBody.__struct_fields__}
