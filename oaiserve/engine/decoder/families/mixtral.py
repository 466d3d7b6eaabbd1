"""Mixtral and others whose routers choose experts by a softmax."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.decoder.experts import in_all_layers
from oaiserve.engine.decoder.facts import Facts, Mixture, llama, windows_of_all
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.names import Names

_MIXTRAL: Names = {
    "router": ("mlp.gate", "block_sparse_moe.gate"),
    "experts.{}.gate": "block_sparse_moe.experts.{}.w1",
    "experts.{}.up": "block_sparse_moe.experts.{}.w3",
    "experts.{}.down": "block_sparse_moe.experts.{}.w2",
}


def _mixtral(settings: Settings) -> Facts:
    mixture = Mixture(layers=in_all_layers(settings), top_k=settings["num_experts_per_tok"])
    return replace(llama(settings), windows=windows_of_all(settings), mixture=mixture)


FAMILIES = (Family(type="mixtral", facts=_mixtral, other_names=_MIXTRAL),)
