"""Embeddings and scores: the routes of OpenAI's, Cohere's and Hugging Face's clients, and how models for them start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oaiserve.plugin import Plugin
from oaiserve.plugin.parts import InnerParts

if TYPE_CHECKING:
    from starlette.routing import Route

    from oaiserve.config import Config
    from oaiserve.engine.start.request import Way


def _routes(config: Config) -> list[Route]:
    from oaiserve.plugins.pooling import cohere, embeddings, hugging_face, scores
    from oaiserve.routes.door.accounting import accounted

    return [
        accounted("/v1/embeddings", embeddings.embeddings, "embeddings"),
        accounted("/v2/embed", cohere.embed, "embeddings"),
        accounted("/embed", hugging_face.embed, "embeddings"),
        accounted("/embed_sparse", hugging_face.embed_sparse, "embeddings"),
        accounted("/embed_all", hugging_face.embed_all, "embeddings"),
        *(accounted(path, scores.score, "score") for path in ("/v1/score", "/score")),
        *(accounted(path, scores.rerank, "rerank") for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
    ]


def _starts() -> list[Way]:
    from oaiserve.plugins.shared.way_of_tasks import WayOfTasks

    against = "it makes neither vectors nor scores"
    return [WayOfTasks("to pool", ("embed", "score"), against, "oaiserve.plugins.pooling.model.load")]


plugin = Plugin(name="pooling", routes=_routes, inner=InnerParts(starts=_starts))
