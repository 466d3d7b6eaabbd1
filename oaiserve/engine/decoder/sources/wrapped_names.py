"""Maps the names of tensors in multimodal checkpoints to the text model's names. It doesn't import transformers."""

from __future__ import annotations

import re

# Regular expressions for the names of the text model's tensors in a wrapper, and their replacements.
KEYS = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^model\.text_model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^thinker\.model\.": "model.",
    r"^thinker\.lm_head\.": "lm_head.",
}
_OF_TEXT = re.compile(
    r"(model\.(altup_\w+|embed_tokens(_per_layer)?|embedding_norm|layers|norm|per_layer_\w+)|lm_head)\."
)


def text_name(name: str) -> str:
    """Return the name that a checkpoint's tensor has in the text model without a wrapper."""
    for pattern, replacement in KEYS.items():
        name = re.sub(pattern, replacement, name)
    return name


def own_name(name: str) -> str | None:
    """Return the same name, or None for a tensor of another part, which reads images or sound."""
    inner = text_name(name)
    if _OF_TEXT.match(inner):
        return inner
    return None
