"""/v1/score and /v1/rerank: the similarity of texts, by a cross-encoder or by the vectors of an embedding model.

The answers are in the forms of vLLM, Jina and Cohere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HTTPRequest

from oaiserve.engine.request import FilledPrompt, PairPrompt, Pooled, Prompt, PromptDone, Usage
from oaiserve.engine.types.pooling import Pooling
from oaiserve.errors import InvalidRequest
from oaiserve.plugins.pooling import inputs as pooling
from oaiserve.routes.answer.common_shape import encode
from oaiserve.routes.answer.respond import Answer, pooled_answer_to
from oaiserve.routes.intake.body_types import MAX_INT32
from oaiserve.routes.intake.invalid import converted, invalid
from oaiserve.routes.intake.object_types import Integer, described
from oaiserve.routes.intake.parameters import integer
from oaiserve.routes.intake.read import Intake, read
from oaiserve.routes.operation import Operation

Texts = str | Annotated[list[str], msgspec.Meta(extra_json_schema={"minItems": 1, "maxItems": pooling.MAX_TEXTS})]


class ScoreBody(pooling.PoolingBody, kw_only=True):
    """The pairs of texts to score: text_1 and text_2, or queries and documents."""

    text_1: Annotated[Texts | None, described("A text, or a list of texts.")] = None
    text_2: Annotated[Texts | None, described("The text, or texts, that it goes with.")] = None
    queries: Annotated[Texts | None, described("A query, or a list of queries.")] = None
    documents: Annotated[Texts | None, described("The document, or documents, that it goes with.")] = None


class Document(msgspec.Struct):
    """A document, as an object. The answer returns its other fields, too."""

    text: str


GivenDocument = Annotated[
    dict[str, Any], described("An object.", properties={"text": {"type": "string"}}, required=["text"])
]


class RerankBody(pooling.PoolingBody, kw_only=True):
    """The documents to order, and the query to order them by."""

    query: Annotated[str, described("What is searched for.")]
    documents: Annotated[
        list[str | GivenDocument], described("Texts, or objects with a `text`.", minItems=1, maxItems=pooling.MAX_TEXTS)
    ]
    top_n: Annotated[Integer | None, described("Send this many of the best. Default, and 0: all.", 0, MAX_INT32)] = None
    return_documents: Annotated[bool | None, described("Send the documents, too. Default: true.")] = None
    max_tokens_per_doc: Annotated[
        Integer | None, described("Cut each document to this many tokens. Default, and 0: whole.", 0, MAX_INT32)
    ] = None


class Score(msgspec.Struct, tag_field="object", tag="score"):
    """The score of a pair: how well its texts match."""

    index: int
    score: float


class ScoreList(pooling.PooledList[Score]):
    """The scores, in the order of the pairs."""


class Ranked(msgspec.Struct):
    """A document's place in the request, and how well it matches the query."""

    index: int
    relevance_score: float
    document: GivenDocument | UnsetType = UNSET


class Ranking(msgspec.Struct):
    """The best documents, best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: pooling.PoolingUsage


@Operation(
    summary="How well pairs of texts go together, with a model that scores or embeds.",
    group="Embeddings and scores",
    body=ScoreBody,
    answer=ScoreList,
    example={"text_1": "What is the capital of France?", "text_2": ["Paris", "Berlin"]},
)
async def score(http: HTTPRequest) -> Answer:
    return await read(http, ScoreBody, _score_answer, tasks=("embed", "score"), id_prefix="score-")


@Operation(
    summary="Documents in the order in which they go with a query.",
    group="Embeddings and scores",
    body=RerankBody,
    answer=Ranking,
    example={"query": "What is the capital of France?", "documents": ["Berlin", "Paris"]},
)
async def rerank(http: HTTPRequest) -> Answer:
    return await read(
        http,
        RerankBody,
        _rerank_answer,
        tasks=("embed", "score"),
        id_prefix="rerank-",
        tokenizes=lambda body: bool(body.max_tokens_per_doc),
    )


def _score_answer(intake: Intake[ScoreBody]) -> Answer:
    body = intake.body
    has_queries = body.queries is not None or body.documents is not None
    if has_queries and not (body.text_1 is None and body.text_2 is None):
        raise InvalidRequest("Give either 'text_1' and 'text_2', or 'queries' and 'documents'.", param="queries")
    names = ("queries", "documents") if has_queries else ("text_1", "text_2")
    firsts, seconds = (pooling.strings(getattr(body, name), name) for name in names)
    if len(firsts) not in (1, len(seconds)):
        raise invalid(names[0], f"must be one text, or as many as '{names[1]}' ({len(seconds)}), got {len(firsts)}")
    pairing = Pairing(
        firsts, seconds, names, pooling.pooling_of(intake), pooling.most_tokens(intake), is_search=has_queries
    )

    def whole(_prompts: Sequence[PromptDone], vectors: Sequence[Pooled], usage: Usage) -> Iterator[bytes]:
        items = (encode(Score(index, score)) for index, score in enumerate(pairing.scores(vectors)))
        return pooling.rendered(pooling.list_head(intake.head), "data", items, usage)

    return pooled_answer_to(intake, pairing.prompts(), whole, {})


def _rerank_answer(intake: Intake[RerankBody]) -> Answer:
    body = intake.body
    pooling.check_number(body.documents, "documents")
    given = [{"text": each} if isinstance(each, str) else each for each in body.documents]
    documents = [converted(Document, each, f"documents[{place}]").text for place, each in enumerate(given)]
    top_n = integer(body, "top_n")
    names = ("query", "documents")
    most = integer(body, "max_tokens_per_doc")
    tokenizer = intake.serving.engine.tokenizer
    if most:
        read = [tokenizer.first_tokens(text, most, "documents") for text in documents]
    else:
        read = documents
    pairing = Pairing(
        [body.query], read, names, pooling.pooling_of(intake), pooling.most_tokens(intake), is_search=True
    )
    shown = [UNSET if body.return_documents is False else each for each in given]

    def whole(_prompts: Sequence[PromptDone], vectors: Sequence[Pooled], usage: Usage) -> Iterator[bytes]:
        """Render the best documents, best first. The first of equal ones comes first."""
        scores = pairing.scores(vectors)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: top_n or len(documents)]
        items = (encode(Ranked(index, scores[index], shown[index])) for index in best)
        return pooling.rendered({"id": intake.head.id, "model": intake.head.model}, "results", items, usage)

    return pooled_answer_to(intake, pairing.prompts(), whole, {} if top_n is None else {"top_n": top_n})


@dataclass(frozen=True, slots=True)
class Pairing:
    """The pairs of a request: the first texts with the second ones, or the only first text with each of these.

    A cross-encoder reads each pair. An embedding model reads each text, and the score is the cosine of two vectors. In
    a search, it reads the texts after its prompts for queries and for documents, if it has any.
    """

    firsts: list[str]
    seconds: list[str]
    names: tuple[str, str]  # names of the parameters
    pooling: Pooling
    limit: int | None  # tokens to which texts are cut; None: they are not cut
    is_search: bool

    def prompts(self) -> tuple[Prompt, ...]:
        if self.pooling.task == "score":
            if len(self.firsts) > 1:
                firsts = self.firsts
            else:
                firsts = self.firsts * len(self.seconds)
            return tuple(map(self._pair, firsts, self.seconds))
        return (
            *pooling.text_prompts(self.firsts, self._text_before(pooling.QUERY_NAMES), self.names[0], self.limit),
            *pooling.text_prompts(self.seconds, self._text_before(pooling.DOCUMENT_NAMES), self.names[1], self.limit),
        )

    def _pair(self, first: str, second: str) -> Prompt:
        template = self.pooling.pair_template
        param = self.names[1]
        if not template:
            return PairPrompt(self.pooling.default_prompt + first, second, param, self.limit)
        if self.limit is not None:
            raise InvalidRequest(
                "Texts cannot be cut for this model, which reads them within a prompt.", param="truncate_prompt_tokens"
            )
        return FilledPrompt(template, {"query": first, "document": second}, param)

    def _text_before(self, names: Sequence[str]) -> str:
        prompt = pooling.prompt_named(self.pooling, names) if self.is_search else None
        return self.pooling.default_prompt if prompt is None else prompt

    def scores(self, vectors: Sequence[Pooled]) -> list[float]:
        if self.pooling.task == "score":
            return [float(pooled.vector[0]) for pooled in vectors]
        units = [pooling.unit(pooling.values_of(pooled)) for pooled in vectors]
        firsts = units[: len(self.firsts)]
        seconds = units[len(self.firsts) :]
        return [float(np.dot(firsts[index if len(firsts) > 1 else 0], second)) for index, second in enumerate(seconds)]
