"""Describes multi-head latent attention, whose keys and values are made of a vector for each token."""

from __future__ import annotations

from oaiserve.engine.decoder.description import Attention, AttentionParameters, LatentProjection, NotKnown, RotaryTable
from oaiserve.engine.decoder.facts import Facts, Latent
from oaiserve.engine.decoder.reader import NormKind, Reader
from oaiserve.engine.decoder.spec import KVShape

_NORM = NormKind(epsilon=1e-6)  # whatever the settings have for other norms


def latent_attention(
    reader: Reader, facts: Facts, sizes: Latent, rotary: RotaryTable | None, window: int | None
) -> Attention:
    """Describe attention with a latent vector in place of keys and values. Raises NotKnown."""
    has_down = sizes.query_rank is not None
    qkv = LatentProjection(
        query_down=reader.matrix("q_down") if has_down else None,
        query_norm=reader.norm("q_down_norm", _NORM) if has_down else None,
        query=reader.matrix("q_up" if has_down else "q"),
        down=reader.matrix("kv_down"),
        norm=reader.norm("kv_down_norm", _NORM),
        up=reader.matrix("kv_up"),
    )
    if qkv.up.bias is not None:
        raise NotKnown("its keys and values are made from latent vectors with a bias")
    return Attention(
        qkv=qkv,
        out=reader.matrix("out"),
        heads=facts.heads,
        shape=KVShape(
            facts.heads, sizes.own_dim + sizes.shared_dim, sizes.value_dim, latent_dim=sizes.rank + sizes.shared_dim
        ),
        rotary=rotary,
        rotary_offset=sizes.own_dim,
        parameters=AttentionParameters(facts.scaling, window, facts.softcap),
    )
