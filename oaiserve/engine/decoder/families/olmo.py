"""OLMo and EXAONE 4. OLMo 2, OLMo 3 and EXAONE 4 have norms only after attention and after the MLP."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.facts import Facts, llama, windows_by_type
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.reader import NormKind
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.names import Names

NORMS_BEHIND: Names = {
    "attention_norm": (),
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": (),
    "mlp_out_norm": "post_feedforward_layernorm",
}


def _olmo(settings: Settings) -> Facts:
    if settings["clip_qkv"] is not None:
        raise NotKnown("it limits queries, keys and values")
    norm = NormKind(epsilon=1e-5, subtracts_mean=True, width_without_weights=settings["hidden_size"])
    return replace(llama(settings, epsilon=norm.epsilon), norm=norm)


def _olmo3(settings: Settings) -> Facts:
    return replace(llama(settings), windows=windows_by_type(settings))


def _exaone4(settings: Settings) -> Facts:
    """Return the facts of EXAONE 4, which rotates only in layers with a window, or in all if no layer has a window."""
    facts = _olmo3(settings)
    if settings["sliding_window"] is None:
        return facts
    return replace(facts, rotates=tuple(window is not None for window in facts.windows))


FAMILIES = (
    Family(type="olmo", facts=_olmo),
    Family(type="olmo2", other_names=NORMS_BEHIND),
    Family(type="olmo3", facts=_olmo3, other_names=NORMS_BEHIND),
    Family(type="exaone4", facts=_exaone4, other_names=NORMS_BEHIND),
)
