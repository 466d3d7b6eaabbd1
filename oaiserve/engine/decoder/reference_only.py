"""Finds the parts of a description that only the reference executor can compute."""

from __future__ import annotations

from oaiserve.engine.decoder.description import MLP, Decoder, NotKnown


def refuse_reference_only(decoder: Decoder) -> None:
    """Raise NotKnown for parts of a description that only the reference executor can compute."""
    if decoder.hidden_states is not None:
        raise NotKnown("it has several hidden states of a token")
    for layer in decoder.layers:
        if layer.attention is not None and layer.attention.parameters.chunk is not None:
            raise NotKnown("its layers attend in chunks")
        if layer.laurel is not None:
            raise NotKnown("its layers have a path in parallel with attention")
        if isinstance(layer.mlp, MLP) and layer.mlp.cutoff is not None:
            raise NotKnown("its MLPs have sparse gates")
