"""Fused projections give the same logits in fewer products, and can be separated again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oaiserve.engine.model.gpu.fused_projections import fuse_projections, separate_projections
from tests.engine.model.operations import Operations
from tests.models.decoders import FAMILIES, random_model


@torch.inference_mode()
def logits(model: Any, num_tokens: int = 7) -> tuple[torch.Tensor, int]:
    with Operations() as operations:
        found = model(input_ids=torch.arange(num_tokens)[None] % 90, use_cache=False).logits
    return found, sum(name in ("linear", "mm", "addmm") for name in operations.names)


@pytest.mark.parametrize(("family", "fewer"), [("llama", 3), ("qwen3", 3), ("gemma2", 3), ("gpt2", 0)])
def test_logits_are_the_same_in_fewer_products(family: str, fewer: int) -> None:
    model = random_model(FAMILIES[family])
    expected, before = logits(model)
    num_layers = model.config.num_hidden_layers
    assert fuse_projections(model) == (2 * num_layers if fewer else 0)
    found, after = logits(model)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert before - after == fewer * num_layers
    separate_projections(model)
    separated, number = logits(model)
    torch.testing.assert_close(separated, expected, rtol=1e-6, atol=1e-6)
    assert number == before


def test_weights_are_there_once_and_no_product_is_kept() -> None:
    model = random_model(FAMILIES["llama"])
    num_bytes = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    fuse_projections(model)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert len(storages) == len(num_bytes) - 3 * model.config.num_hidden_layers
    assert sum(storages.values()) == sum({id(p): p.nbytes for p in model.parameters()}.values())
    logits(model)
    layer = model.model.layers[0]
    assert layer.self_attn.q_proj.product is layer.self_attn.v_proj.product
    assert layer.self_attn.q_proj.product.parts == ()
