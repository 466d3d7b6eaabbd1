"""How byte-level tokenizers of GGUF files split a text before bytes are merged, by the name in the file.

The name (`tokenizer.ggml.pre`) also implies some settings that older files lack. Each entry is taken from the model's
own tokenizer: a sequence of expressions, each of which cuts out its matches.
"""

from __future__ import annotations

import logging

from oaiserve.checkpoints.bad_file import BadFile

log = logging.getLogger(__name__)

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ONE_DIGIT = (r"\p{N}", _GPT2)
_LLAMA3 = (rf"{_WORDS}\p{{N}}{{1,3}}{_REST}",)
_QWEN2 = (rf"{_WORDS}\p{{N}}{_REST}",)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# Letters with case, except those of a few scripts and those added to Unicode recently.
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
_UFAKZEKA = (rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}",)
_MINICPM5 = (r"\p{N}{1,3}", rf"{_WORDS}\p{{N}}+{_REST}")
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_JAIS2 = (
    rf"{_WORDS}\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
    + "".join(rf"\s{{{2**bits}}}(?!\S)|" for bits in range(9, 1, -1))
    + r"\s{1,2}(?!\S)|\s{1}",
)
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
)
# A word: optional capitals, then lowercase letters; or capitals, then optional lowercase letters.
_CASES = tuple(
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]{upper}[{_LOWER}]{lower}" for upper, lower in (("*", "+"), ("+", "*"))
)
_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (rf"{'|'.join(_CASES)}|\p{{N}}{_SLASHES}",)
_CASES_OR_CONTRACTIONS = "|".join(f"{words}{_CONTRACTIONS}?" for words in _CASES)
_GPT4O = (rf"{_CASES_OR_CONTRACTIONS}|\p{{N}}{{1,3}}{_SLASHES}",)
_TINY_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O)
_YOUTU = (
    r"[\x{ac00}-\x{d7a3}\x{3131}-\x{318e}]+"
    r"|[\x{ff01}\x{2026}\x{201c}\x{201d}\x{2018}\x{2019}\x{2014}\x{ff1a}\x{ff1b}\x{ff0c}\x{3001}-\x{303f}"
    r"\x{fe30}-\x{fe4f}]+|[\x{3105}-\x{312f}]+|[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
    rf"{_CASES_OR_CONTRACTIONS}|\p{{N}}{_SLASHES}",
)
_AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    r"[\x{4e00}-\x{9fff}\x{3400}-\x{4dbf}\x{f900}-\x{faff}\x{3040}-\x{309f}\x{30a0}-\x{30ff}\x{ff65}-\x{ff9f}"
    r"\x{2f00}-\x{2fdf}\x{e40}-\x{e7f}\x{e80}-\x{eff}\x{1780}-\x{17ff}\x{1000}-\x{109f}\x{aa60}-\x{aa7f}"
    r"\x{a9e0}-\x{a9ff}\x{ac00}-\x{d7af}\x{1100}-\x{11ff}]+",
    _DEEPSEEK_V3[2],
)
_SPARK = (
    *_DEEPSEEK_V3[:2],
    _DEEPSEEK_V3[2].replace(r"[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+", r"[\p{P}\p{S}]+|[\r\n]"),
    r"\p{N}",
)
_BLOOM = (r" ?[^(\s|.,!?\x{2026}\x{3002}\x{ff0c}\x{3001}\x{964}\x{6d4}\x{60c})]+",)
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_SPLITS: dict[str, tuple[str, ...]] = {
    "afmoe": _AFMOE,
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), _BLOOM),
    "chameleon": _CHAMELEON,
    **dict.fromkeys(("chatglm-bpe", "glm4", "glm5"), _LLAMA3),
    **dict.fromkeys(("codeshell", "command-r", "exaone", "mellum2", "minerva-7b", "refact", "smollm"), _ONE_DIGIT),
    **dict.fromkeys(("cohere2moe", "tiny_aya"), _TINY_AYA),
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-llm": _DEEPSEEK_LLM,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), _DEEPSEEK_V3),
    "exaone-moe": _EXAONE_MOE,
    "falcon": _FALCON,
    **dict.fromkeys(("gpt-4o", "granite-embed-multi-97m", "kanana2", "llama4", "minimax-m2", "talkie"), _GPT4O),
    "jais-2": _JAIS2,
    "kimi-k2": _KIMI,
    "laguna": (r"\n+", *_QWEN2),
    **dict.fromkeys(
        ("dbrx", "falcon-h1", "falcon3", "jina-v5-nano", "lfm2", "llama-bpe", "llama-v3", "llama3"), _LLAMA3
    ),
    **dict.fromkeys(("midm-2.0", "pixtral", "smaug-bpe"), _LLAMA3),
    "minicpm5": _MINICPM5,
    **dict.fromkeys(("deepseek-r1-qwen", "f2llmv2", "grok-2", "hunyuan", "kormo", "megrez", "qwen2"), _QWEN2),
    **dict.fromkeys(("solar-open", "stablelm2"), _QWEN2),
    "qwen35": _QWEN35,
    "seed-coder": _SEED,
    "spark2_5": _SPARK,
    "starcoder": _ONE_DIGIT,
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "tekken": _TEKKEN,
    "ufakzeka": _UFAKZEKA,
    "viking": (*_BLOOM, r"\p{N}"),
    "youtu": _YOUTU,
    **dict.fromkeys(("a.x-4.0", "exaone4", "gigachat", "gpt-2", "granite-docling", "jais", "jina-de", "jina-es"), ()),
    **dict.fromkeys(("jina-v1-en", "jina-v2-code", "jina-v2-de", "jina-v2-es", "mellum", "modern-bert", "mpt"), ()),
    **dict.fromkeys(("olmo", "phi-2", "roberta-bpe", "trillion"), ()),
}
# Tokenizers that keep a part of the text that is itself a token, without applying merges to it.
WHOLE_TOKENS = {
    *("falcon-h1", "falcon3", "glm4", "glm5", "granite-embed-multi-97m", "jina-v5-nano", "lfm2", "llama-bpe"),
    *("llama-v3", "llama3", "midm-2.0", "minicpm5", "pixtral", "tekken", "youtu"),
}
# Tokenizers that put a BOS before a text, or two separators between texts, unless the file says otherwise.
ADD_BOS = {
    *("chameleon", "falcon-h1", "falcon3", "jina-v5-nano", "lfm2", "llama-bpe", "llama-v3", "llama3", "midm-2.0"),
    *("pixtral", "tekken"),
}
ADD_SEPARATOR = {"jina-v1-en", "jina-v2-code", "roberta-bpe"}
# Tokenizers that merge the characters of a whole text, with "▁" for spaces.
GEMMA4 = {"gemma4", "granite-embed-multi-311m"}
SPACED = {*GEMMA4, "sarvam-moe"}


def expressions(name: str | None) -> tuple[str, ...]:
    """Return the expressions for a name in a file, or an empty sequence for GPT-2's.

    Raises BadFile for an unknown name, because wrong splits would give wrong answers.
    """
    if name is None or name == "default":
        log.warning("The file does not say how its tokenizer splits texts: it is taken as GPT-2's")
        return ()
    if name not in _SPLITS:
        raise BadFile(
            f"it is not known how its tokenizer {name[:100]!r} splits texts. If it splits them as a known one does,"
            " write that one's name into a copy of the file: gguf-new-metadata --pre-tokenizer NAME OLD.gguf NEW.gguf"
        )
    return _SPLITS[name]
