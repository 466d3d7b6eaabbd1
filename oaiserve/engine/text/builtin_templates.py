"""The chat templates that `--chat-template` takes by name, for models whose files have none.

They write conversations of plain text. Tools and their results are described in the text of messages, as for any
template without a place for them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_FOLDER = Path(__file__).with_name("chat_templates")
# For each template, the tokens that a vocabulary must have for it. If several templates match, the first one counts.
_SIGNS = {
    "gemma": ("<start_of_turn>",),
    "llama3": ("<|start_header_id|>",),
    "granite": ("<|start_of_role|>",),
    "deepseek": ("<｜User｜>",),
    "mistral-small": ("[SYSTEM_PROMPT]",),
    "mistral-nemo": ("[INST]", "<SPECIAL_20>"),
    "mistral": ("[INST]",),
    "phi4": ("<|im_start|>", "<|im_sep|>"),
    "phi3": ("<|assistant|>", "<|end|>"),
    "qwen3": ("<|im_start|>", "<|vision_start|>", "<think>"),
    "qwen": ("<|im_start|>", "<|vision_start|>"),
    "chatml": ("<|im_start|>",),
}
NAMES = sorted(_SIGNS)


def template_file(template: Path) -> Path:
    """Return the file of a template: a built-in one with this name, or the path itself."""
    return _FOLDER / f"{template}.jinja" if str(template) in _SIGNS else template


def advice(token_id: Callable[[str], int | None]) -> str:
    """Return how to start a model without a chat template so that it can chat, given the ids of its tokens."""
    for name, signs in _SIGNS.items():
        if all(token_id(sign) is not None for sign in signs):
            return f"If it was trained to chat, start it with the template of its family: --chat-template {name}"
    return "If it was trained to chat, start it with a --chat-template: a Jinja file, or one of " + ", ".join(NAMES)
