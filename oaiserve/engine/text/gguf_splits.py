"""The expressions by which vocabularies of GGUF files split a text before bytes are merged, by name.

The name is in the file (`tokenizer.ggml.pre`), and transformers knows the expressions of some names. Those of more are
here. Each entry is from the model's own tokenizer: expressions one after the other, each of which cuts out its
matches.
"""

from __future__ import annotations

import logging
from typing import Any

from tokenizers import Regex, pre_tokenizers

log = logging.getLogger(__name__)

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ONE_DIGIT = (r"\p{N}", _GPT2)
_THREE_DIGITS = (rf"{_WORDS}\p{{N}}{{1,3}}{_REST}",)
_QWEN2 = (rf"{_WORDS}\p{{N}}{_REST}",)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# Letters that have cases, but for those of a few scripts and those that Unicode got late.
_CASED = (
    r"\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10c7}\x{10cd}-\x{10ff}\x{1c80}-\x{1c88}\x{2d00}-\x{2d2d}\x{a790}-\x{a7fa}"
    r"\x{ab30}-\x{ab68}\x{10570}-\x{105bc}\x{16e40}-\x{16e7f}\x{1d400}-\x{1d7cb}\x{1df00}-\x{1df1e}]"
)
_HAN = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
_MARKS = r"!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}"
_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[{_MARKS}]+", r"\s+$", _HAN, r"\p{N}")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")
_UPPER, _LOWER = (rf"\p{{{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}" for case in (r"Lu}\p{Lt", "Ll"))
_KIMI = (
    r"\p{Han}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^\p{{Han}}]]*[{_LOWER}&&[^\p{{Han}}]]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^\p{{Han}}]]+[{_LOWER}&&[^\p{{Han}}]]*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}{_REST}",
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
)
_SEED = (rf"{_WORDS}\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)
_FALCON = (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    **dict.fromkeys(("chatglm-bpe", "glm4", "glm5"), _THREE_DIGITS),
    **dict.fromkeys(("codeshell", "command-r", "exaone", "mellum2", "minerva-7b", "refact", "smollm"), _ONE_DIGIT),
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-llm": _DEEPSEEK_LLM,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), _DEEPSEEK_V3),
    "falcon": _FALCON,
    **dict.fromkeys(("grok-2", "hunyuan", "solar-open", "stablelm2"), _QWEN2),
    "kimi-k2": _KIMI,
    "seed-coder": _SEED,
    "starcoder": _ONE_DIGIT,
}
# GPT-2's expression, which transformers has for unknown names.
_LIKE_GPT2 = {
    *("a.x-4.0", "exaone4", "gigachat", "gpt-2", "granite-docling", "jais", "jina-de", "jina-es", "jina-v1-en"),
    *("jina-v2-code", "jina-v2-de", "jina-v2-es", "mellum", "modern-bert", "mpt", "olmo", "phi-2", "roberta-bpe"),
    "trillion",
}
# Whose tokenizers take a part of a text that is a token as it is, without merges that make it.
_WHOLE_TOKENS = {"falcon-h1", "falcon3", "glm4", "glm5", "lfm2", "llama-bpe", "llama-v3", "llama3", "pixtral", "tekken"}


def split_as_named(tokenizer: Any, name: str | None) -> None:
    """Make a byte-level tokenizer of transformers split texts by the expressions of a name."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    backend = tokenizer.backend_tokenizer
    if name in _SPLITS:
        cuts = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in _SPLITS[name]]
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, in_bytes])
    elif name is not None and name not in _LIKE_GPT2 and name not in GGUF_PRE_TOKENIZER_SPLITS:
        log.warning("It is not known how the tokenizer '%s' splits texts: it is taken as GPT-2's", name)
    if name in _WHOLE_TOKENS:
        backend.model.ignore_merges = True
