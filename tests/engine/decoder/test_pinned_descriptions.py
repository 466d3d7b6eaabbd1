"""The text of a description shows what is in it. test_families.py compares those of all families with pinned ones."""

from dataclasses import replace

from tests.engine.executors.native.small_models import FAMILIES, load
from tests.models.fingerprints import fingerprint


def test_a_text_shows_a_mix_up_in_one_layer_and_a_part_that_is_no_longer_shared() -> None:
    loaded = load(FAMILIES["cohere"])
    decoder = loaded.decoder
    *layers, last = decoder.layers
    query, key, value = last.attention.qkv
    changed = (
        replace(last, attention=replace(last.attention, qkv=[query, value, key])),
        replace(last, mlp_norm=replace(last.mlp_norm)),
        replace(last, attention=replace(last.attention, rotary=replace(last.attention.rotary))),
    )
    texts = {fingerprint(replace(decoder, layers=[*layers, layer]), loaded) for layer in (last, *changed)}
    assert len(texts) == 4
