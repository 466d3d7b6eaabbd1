"""Which tokens end an answer: the model's files often name one of them only.

A model's turn may end with another token than its texts in training, and fill-in-the-middle ends with a third one. So
all are collected: those of the files, those with the usual names, and the token that the chat template writes after an
assistant's text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oaiserve.engine.text.tokenizer import Tokenizer

# Tokens with these texts end an answer in every model that has them as tokens of their own, but for `_TRAPS`.
END_TEXTS = frozenset(
    {
        *(
            "<|eot_id|>",
            "<|eom_id|>",
            "<|eot|>",
            "<|eom|>",
            "<|end_of_text|>",
            "<|endoftext|>",
            "<|im_end|>",
            "<|end|>",
        ),
        *("<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "[e~["),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
        *("<eos>", "<EOT>", "_<EOT>", "▁<EOT>", "<|EOT|>", "[EOT]", "[EOS]"),
        # After the text in a gap, a model for code goes on with another file.
        *(
            "<|fim_pad|>",
            "<fim-pad>",
            "<fim_pad>",
            "<|repo_name|>",
            "<|fim_repo|>",
            "<fim-repo>",
            "<REPO>",
            "<reponame>",
        ),
        "<|file_sep|>",
    }
)
# Texts that end only a part of an answer, if the vocabulary has one of the others: those of gpt-oss and Solar Open.
_TRAPS = {"<|end|>": ("<|return|>", "<|flush|>")}


def end_token_ids(tokenizer: Tokenizer, of_files: frozenset[int]) -> frozenset[int]:
    """Return the ids of all tokens that end an answer. `of_files` are those that the model's files name."""
    added = {token.content: token_id for token_id, token in tokenizer.backend.get_added_tokens_decoder().items()}
    traps = {trap for trap, others in _TRAPS.items() if not added.keys().isdisjoint(others)}
    found = of_files | {added[text] for text in END_TEXTS & added.keys()}
    if tokenizer.chat_template is not None:
        texts = tokenizer.special_token_ids
        known = {text for text, token_id in texts.items() if token_id in found}
        after = tokenizer.chat_template.end_of_answer(texts.keys(), known)
        found |= {texts[after]} if after is not None else set()
    return found - {added[trap] for trap in traps}
