"""Tests /v1/score and /v1/rerank: the pairs that reach the engine, and the scores and orders that come of them."""

import json
from typing import Any

import pytest

from oaiserve.engine.request import FilledPrompt, PairPrompt, TextPrompt
from oaiserve.engine.types.pooling import Pooling
from tests.routes.asking import answered, refused
from tests.routes.doubles import pools
from tests.serving import Served

SCORE = "/v1/score"
RERANK = "/v1/rerank"


@pytest.fixture
def scorer(served: Served) -> Served:
    served.engine.pooling = Pooling("score", 1)
    served.engine.script = pools([0.25], [0.75], [0.5])
    return served


@pytest.fixture
def embedder(served: Served) -> Served:
    served.engine.pooling = Pooling("embed", 2, prompts={"query": "Q: ", "passage": "P: "})
    served.engine.script = pools([3.0, 4.0], [6.0, 8.0], [4.0, -3.0])
    return served


def post(served: Served, path: str, **body: Any) -> Any:
    return answered(served.post(path, **body))


@pytest.mark.parametrize("path", [SCORE, "/score"])
def test_a_cross_encoder_scores_one_text_with_each_of_several(scorer: Served, path: str) -> None:
    answer = post(scorer, path, text_1="q", text_2=["a", "b", "c"])
    assert answer.pop("id").startswith("score-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "list",
        "model": "org/demo",
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate((0.25, 0.75, 0.5))],
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    }
    assert scorer.engine.submitted.get().prompts == tuple(PairPrompt("q", text, "text_2") for text in "abc")
    record = scorer.telemetry.next_record()
    assert (record.operation, record.http_route) == ("score", path)


def test_the_default_prompt_of_a_cross_encoder_comes_before_the_first_texts(scorer: Served) -> None:
    scorer.engine.pooling = Pooling("score", 1, prompts={"web": "Find: "}, default_prompt="Find: ")
    post(scorer, RERANK, query="q", documents=["a", "b"])
    pairs = (PairPrompt("Find: q", "a", "documents"), PairPrompt("Find: q", "b", "documents"))
    assert scorer.engine.submitted.get().prompts == pairs


def test_as_many_texts_are_scored_pair_by_pair(scorer: Served) -> None:
    post(scorer, SCORE, text_1=["q", "r"], text_2=["a", "b"])
    assert scorer.engine.submitted.get().prompts == (PairPrompt("q", "a", "text_2"), PairPrompt("r", "b", "text_2"))
    post(scorer, SCORE, queries=["q", "r"], documents=["a", "b"])
    pairs = (PairPrompt("q", "a", "documents"), PairPrompt("r", "b", "documents"))
    assert scorer.engine.submitted.get().prompts == pairs


@pytest.mark.parametrize(
    ("path", "names"),
    [(SCORE, ("text_1", "text_2")), (SCORE, ("queries", "documents")), (RERANK, ("query", "documents"))],
)
def test_half_of_an_emoji_where_a_text_was_cut_is_replaced(scorer: Served, path: str, names: tuple[str, str]) -> None:
    body = json.dumps({names[0]: "q \ud83d", names[1]: ["\ude00 a"]})
    response = scorer.http.post(path, content=body, headers={"content-type": "application/json"})
    # It has reached the engine, whose vocabulary here lacks the character that replaces the half.
    assert "outside the model's vocabulary" in response.json()["error"]["message"]


def test_a_ranking_returns_each_document_as_it_came(scorer: Served) -> None:
    documents = ["a", {"text": "b", "title": "B", "year": 1999}]
    results = post(scorer, RERANK, query="q", documents=documents)["results"]
    assert {one["index"]: one["document"] for one in results} == {0: {"text": "a"}, 1: documents[1]}
    refused(scorer.post(RERANK, query="q", documents=["a", {"title": "B"}]), "documents", "documents[1].text")


def test_a_reranker_with_a_template_reads_pairs_within_it(scorer: Served) -> None:
    scorer.engine.pooling = Pooling("score", 1, pair_template="<Q>{query}<D>{document}?")
    post(scorer, RERANK, query="{document}", documents=["a", "b{query}"])
    template = scorer.engine.pooling.pair_template
    expected = tuple(FilledPrompt(template, {"query": "{document}", "document": text}) for text in ("a", "b{query}"))
    assert scorer.engine.submitted.get().prompts == expected
    refused(scorer.post(RERANK, query="q", documents=["a"], truncate_prompt_tokens=5), "truncate_prompt_tokens")


def test_an_embedding_model_scores_by_the_cosine(embedder: Served) -> None:
    answer = post(embedder, SCORE, text_1="q", text_2=["a", "b"])
    assert [item["score"] for item in answer["data"]] == [pytest.approx(1.0), pytest.approx(0.0)]
    assert embedder.engine.submitted.get().prompts == (
        TextPrompt("q", param="text_1"),
        TextPrompt("a", param="text_2"),
        TextPrompt("b", param="text_2"),
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [(RERANK, {"query": "q", "documents": ["a", "b"]}), (SCORE, {"queries": "q", "documents": ["a", "b"]})],
)
@pytest.mark.parametrize("name", ["document", "passage", "corpus"])
def test_in_a_search_an_embedding_model_reads_its_prompts(
    embedder: Served, name: str, path: str, body: dict[str, Any]
) -> None:
    embedder.engine.pooling = Pooling("embed", 2, prompts={"query": "Q: ", name: "P: "})
    post(embedder, path, **body)
    texts = [prompt.text for prompt in embedder.engine.submitted.get().prompts if isinstance(prompt, TextPrompt)]
    assert texts == ["Q: q", "P: a", "P: b"]


@pytest.mark.parametrize("path", [RERANK, "/v2/rerank", "/rerank"])
def test_documents_are_ranked_best_first(scorer: Served, path: str) -> None:
    answer = post(scorer, path, query="q", documents=["a", {"text": "b"}, "c"])
    assert answer.pop("id").startswith("rerank-")
    assert answer == {
        "model": "org/demo",
        "results": [
            {"index": 1, "document": {"text": "b"}, "relevance_score": 0.75},
            {"index": 2, "document": {"text": "c"}, "relevance_score": 0.5},
            {"index": 0, "document": {"text": "a"}, "relevance_score": 0.25},
        ],
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    }
    assert scorer.telemetry.next_record().operation == "rerank"


@pytest.mark.parametrize("path", [RERANK, "/v2/rerank"])
def test_documents_are_cut_to_so_many_tokens_and_come_back_whole(scorer: Served, path: str) -> None:
    answer = post(scorer, path, query="query", documents=["abcd", {"text": "efg"}, "h"], max_tokens_per_doc=3)
    assert [pair.second for pair in scorer.engine.submitted.get().prompts] == ["abc", "efg", "h"]
    assert {each["document"]["text"] for each in answer["results"]} == {"abcd", "efg", "h"}
    assert scorer.engine.turns.get(), "it is work of the tokenize stage"
    post(scorer, path, query="query", documents=["abcd", "e", "f"], max_tokens_per_doc=0)
    assert scorer.engine.submitted.get().prompts[0].second == "abcd"
    assert scorer.engine.turns.empty()


@pytest.mark.parametrize(("top_n", "number"), [(None, 3), (0, 3), (1, 1), (2, 2), (9, 3)])
def test_top_n_limits_what_is_answered(scorer: Served, top_n: int | None, number: int) -> None:
    answer = post(scorer, RERANK, query="q", documents=["a", "b", "c"], top_n=top_n, return_documents=False)
    assert [item["index"] for item in answer["results"]] == [1, 2, 0][:number]
    assert "document" not in answer["results"][0]


def test_equal_scores_keep_the_order_of_the_documents(scorer: Served) -> None:
    scorer.engine.script = pools([0.5], [0.5], [0.75])
    answer = post(scorer, RERANK, query="q", documents=["a", "b", "c"])
    assert [item["index"] for item in answer["results"]] == [2, 0, 1]


def test_pairs_can_be_cut(scorer: Served) -> None:
    post(scorer, RERANK, query="q", documents=["a"], truncate_prompt_tokens=8)
    assert scorer.engine.submitted.get().prompts == (PairPrompt("q", "a", "documents", 8),)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (SCORE, {"text_2": "a"}, "text_1"),
        (SCORE, {"text_1": "q"}, "text_2"),
        (SCORE, {"text_1": "q", "text_2": []}, "text_2"),
        (SCORE, {"text_1": ["q", "r"], "text_2": ["a", "b", "c"]}, "text_1"),
        (SCORE, {"text_1": ["q", "r"], "text_2": "a"}, "text_1"),
        (SCORE, {"text_1": "q", "text_2": [5]}, "text_2"),
        (SCORE, {"text_1": 5, "text_2": "a"}, "text_1"),
        (SCORE, {"text_1": "q", "text_2": "a", "queries": "q"}, "queries"),
        (SCORE, {"queries": "q"}, "documents"),
        (RERANK, {"documents": ["a"]}, "query"),
        (RERANK, {"query": "q"}, "documents"),
        (RERANK, {"query": "q", "documents": []}, "documents"),
        (RERANK, {"query": "q", "documents": "a"}, "documents"),
        (RERANK, {"query": "q", "documents": [{"title": "a"}]}, "documents"),
        (RERANK, {"query": "q", "documents": ["a"] * 2049}, "documents"),
        (RERANK, {"query": ["q"], "documents": ["a"]}, "query"),
        (RERANK, {"query": "q", "documents": ["a"], "top_n": -1}, "top_n"),
        (RERANK, {"query": "q", "documents": ["a"], "top_n": "1"}, "top_n"),
        (RERANK, {"query": "q", "documents": ["a"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
    ],
)
def test_what_does_not_fit_is_refused(scorer: Served, path: str, body: dict[str, Any], param: str) -> None:
    refused(scorer.post(path, **body), param)


def test_a_cross_encoder_has_no_vectors(scorer: Served) -> None:
    refused(scorer.post("/v1/embeddings", input="a"), "model", code="wrong_task")
    assert scorer.http.get("/v1/models").json()["data"][0]["task"] == "score"
