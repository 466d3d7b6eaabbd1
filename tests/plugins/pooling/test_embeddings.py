"""Tests /v1/embeddings: the prompts that reach the engine, and the forms of the answer."""

from base64 import b64decode
from typing import Any

import numpy as np
import pytest

from oaiserve.engine.request import Prompt, SamplingParams, TextPrompt, TokenPrompt
from oaiserve.engine.types.pooling import Pooling
from oaiserve.facts.record import Outcome
from tests.routes.asking import answered, refused
from tests.routes.doubles import pools
from tests.serving import Served

EMBEDDINGS = "/v1/embeddings"
VECTORS = [[3.0, 0.0, 4.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 2.0]]
UNITS = [[0.6, 0.0, 0.8, 0.0], [0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 1.0]]


@pytest.fixture
def embedder(served: Served) -> Served:
    served.engine.pooling = Pooling("embed", 4, prompts={"query": "Q: ", "document": "D: "})
    served.engine.script = pools(*VECTORS)
    return served


def embed(served: Served, given: object, **body: Any) -> Any:
    return answered(served.post(EMBEDDINGS, input=given, **body))


def vectors_of(answer: Any) -> list[list[float]]:
    return [item["embedding"] for item in answer["data"]]


def test_the_answer_has_the_documented_shape(embedder: Served) -> None:
    answer = embed(embedder, ["a", "b", "c"])
    assert answer.pop("id").startswith("embd-")
    assert isinstance(answer.pop("created"), int)
    assert [item.pop("embedding") for item in answer["data"]] == [pytest.approx(unit) for unit in UNITS]
    assert answer == {
        "object": "list",
        "model": "org/demo",
        "data": [{"object": "embedding", "index": index} for index in range(3)],
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    }


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("Hi", [TextPrompt("Hi", param="input")]),
        (["Hi", "ho"], [TextPrompt("Hi", param="input"), TextPrompt("ho", param="input")]),
        ([5, 6], [TokenPrompt([5, 6], "input")]),
        ([[5, 6], [7]], [TokenPrompt([5, 6], "input"), TokenPrompt([7], "input")]),
    ],
)
def test_every_form_of_input_reaches_the_engine(embedder: Served, given: object, prompts: list[Prompt]) -> None:
    embed(embedder, given)
    request = embedder.engine.submitted.get()
    assert list(request.prompts) == prompts
    assert request.params == SamplingParams(max_tokens=0)


def test_base64_has_the_same_values(embedder: Served) -> None:
    as_floats = vectors_of(embed(embedder, ["a", "b"], encoding_format="float"))
    as_texts = vectors_of(embed(embedder, ["a", "b"], encoding_format="base64"))
    decoded = [np.frombuffer(b64decode(text), dtype="<f4").tolist() for text in as_texts]
    assert decoded == as_floats
    assert vectors_of(embed(embedder, ["a", "b"], encoding_format=None)) == as_floats


def test_vectors_can_stay_as_long_as_the_model_makes_them(embedder: Served) -> None:
    assert vectors_of(embed(embedder, "a", normalize=False)) == VECTORS[:1]


def test_a_vector_of_zeros_stays_one(embedder: Served) -> None:
    embedder.engine.script = pools([0.0, 0.0])
    assert vectors_of(embed(embedder, "a")) == [[0.0, 0.0]]


def test_a_model_that_was_trained_for_it_gives_shorter_vectors_of_length_1(embedder: Served) -> None:
    embedder.engine.pooling = Pooling("embed", 4, dimensions=())
    assert vectors_of(embed(embedder, "a", dimensions=2)) == [[1.0, 0.0]]
    assert vectors_of(embed(embedder, "a", dimensions=4)) == [pytest.approx(UNITS[0])]
    refused(embedder.post(EMBEDDINGS, input="a", dimensions=5), "dimensions")
    embedder.engine.pooling = Pooling("embed", 4, dimensions=(2, 3))
    refused(embedder.post(EMBEDDINGS, input="a", dimensions=1), "dimensions", "one of 2, 3")


def test_a_model_that_was_not_trained_for_it_has_one_size(embedder: Served) -> None:
    assert vectors_of(embed(embedder, "a", dimensions=4)) == [pytest.approx(UNITS[0])]
    refused(embedder.post(EMBEDDINGS, input="a", dimensions=2), "dimensions", "4 numbers")


@pytest.mark.parametrize("dimensions", [0, -1, 1.5, True, "2"])
def test_dimensions_are_a_number_of_dimensions(embedder: Served, dimensions: object) -> None:
    embedder.engine.pooling = Pooling("embed", 4, dimensions=())
    refused(embedder.post(EMBEDDINGS, input="a", dimensions=dimensions), "dimensions")


def test_prompts_of_the_model_go_before_texts_and_not_before_ids(embedder: Served) -> None:
    embed(embedder, ["a"], prompt_name="query")
    embed(embedder, [5], prompt_name="query")
    assert embedder.engine.submitted.get().prompts == (TextPrompt("Q: a", param="input"),)
    assert embedder.engine.submitted.get().prompts == (TokenPrompt([5], "input"),)
    refused(embedder.post(EMBEDDINGS, input="a", prompt_name="passage"), "prompt_name", "'query', 'document'")


def test_the_default_prompt_is_used_unless_another_one_is_named(embedder: Served) -> None:
    embedder.engine.pooling = Pooling("embed", 4, prompts={"query": "Q: ", "none": ""}, default_prompt="Q: ")
    embed(embedder, "a")
    embed(embedder, "a", prompt_name="none")
    assert embedder.engine.submitted.get().prompts == (TextPrompt("Q: a", param="input"),)
    assert embedder.engine.submitted.get().prompts == (TextPrompt("a", param="input"),)


def test_texts_can_be_cut(embedder: Served) -> None:
    embed(embedder, "abc", truncate_prompt_tokens=2)
    embed(embedder, "abc", truncate_prompt_tokens=-1)
    embed(embedder, [5, 6, 7], truncate_prompt_tokens=2)
    prompts = [embedder.engine.submitted.get().prompts[0] for _ in range(3)]
    assert prompts == [
        TextPrompt("abc", param="input", most_tokens=2),
        TextPrompt("abc", param="input", most_tokens=4096),
        TokenPrompt([5, 6], "input"),
    ]
    for number in (0, -2, 4097):
        refused(embedder.post(EMBEDDINGS, input="a", truncate_prompt_tokens=number), "truncate_prompt_tokens")


@pytest.mark.parametrize(
    "given",
    [
        *("", None, 5, True, {"text": "a"}),
        *([], ["a", ""], ["a", 5], [5, "a"], [None], [True], [1.5], ["a"] * 2049),
        *([-1], [[]], [[5], []], [[5], "a"], [[5, -1]], [[[5]]]),
    ],
)
def test_input_that_is_no_text_is_refused(embedder: Served, given: object) -> None:
    refused(embedder.post(EMBEDDINGS, input=given), "input")


def test_a_missing_input_is_named(embedder: Served) -> None:
    refused(embedder.post(EMBEDDINGS), "input", "Missing required parameter: 'input'.")


@pytest.mark.parametrize("body", [{"encoding_format": "int8"}, {"encoding_format": 5}, {"priority": "high"}])
def test_other_parameters_are_checked(embedder: Served, body: dict[str, Any]) -> None:
    refused(embedder.post(EMBEDDINGS, input="a", **body), next(iter(body)))


def test_the_record_has_its_own_operation_and_no_tokens_generated(embedder: Served) -> None:
    embed(embedder, ["a", "b"], encoding_format="base64")
    record = embedder.telemetry.next_record()
    assert (record.operation, record.http_route) == ("embeddings", "/v1/embeddings")
    assert (record.prompt_tokens, record.completion_tokens, record.finish_reasons) == (6, 0, ())
    assert record.params == {"encoding_format": "base64", "num_inputs": 2}
    assert record.times.first_token == record.times.last_token
    assert record.outcome is Outcome.FINISHED


def test_a_model_that_embeds_answers_what_to_start_for_text(embedder: Served) -> None:
    for response in (embedder.chat(), embedder.complete()):
        refused(response, "model", "oaiserve serve", code="wrong_task")
    assert embedder.http.get("/v1/models").json()["data"][0]["task"] == "embed"
