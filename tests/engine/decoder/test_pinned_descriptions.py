"""Descriptions of small models of all families are the pinned ones."""

from dataclasses import replace

import pytest

from tests.engine.model.cpu.small_models import FAMILIES, described, load
from tests.models.fingerprints import fingerprint
from tests.models.pinned import PINNED, file_of, text_of


@pytest.mark.parametrize("name", PINNED)
def test_a_description_is_the_pinned_one(name: str) -> None:
    assert text_of(name) == file_of(name).read_text()


def test_a_text_shows_a_mix_up_in_one_layer_and_a_part_that_is_no_longer_shared() -> None:
    loaded = load(FAMILIES["cohere"])
    decoder = described(loaded)
    *layers, last = decoder.layers
    query, key, value = last.attention.qkv
    changed = (
        replace(last, attention=replace(last.attention, qkv=[query, value, key])),
        replace(last, mlp_norm=replace(last.mlp_norm)),
        replace(last, attention=replace(last.attention, rotary=replace(last.attention.rotary))),
    )
    texts = {fingerprint(replace(decoder, layers=[*layers, layer]), loaded) for layer in (last, *changed)}
    assert len(texts) == 4
