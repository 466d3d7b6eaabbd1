"""The sampling parameters that publishers recommend for their models, by the model's name, with the source. Stdlib
only.

Few GGUF files contain sampling parameters, although the publisher's checkpoint has a generation_config.json, or a model
card with advice. A row applies to models whose name begins with a match of its pattern, so it applies to somebody
else's derived model only if that keeps the name. Values are listed only for sizes whose source was read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_HUB = "https://huggingface.co/"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The sampling parameters that a publisher recommends for some of its models."""

    models: str  # the models' name in documentation
    names: str  # regular expression of the beginning of a name: lowercase, and words joined by "-"
    publisher: str
    source: str  # address of the page or file
    values: Mapping[str, float]

    def fits(self, name: str) -> bool:
        return re.match(self.names, name) is not None


_QWEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
_QWEN_THINKING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0}
_QWEN_NEW = {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "min_p": 0.0}
_GEMMA = {"temperature": 1.0, "top_p": 0.95, "top_k": 64}

# The first row with a match applies.
ROWS = (
    Recommendation(
        "Qwen2.5-Coder Instruct, 0.5B to 7B",
        r"qwen2\.5-coder-(0\.5|1\.5|3|7)b-instruct",
        "Qwen",
        f"{_HUB}Qwen/Qwen2.5-Coder-1.5B-Instruct/blob/main/generation_config.json",
        _QWEN | {"repetition_penalty": 1.1},
    ),
    Recommendation(
        "Qwen2.5-Coder Instruct, 32B",
        r"qwen2\.5-coder-32b-instruct",
        "Qwen",
        f"{_HUB}Qwen/Qwen2.5-Coder-32B-Instruct/blob/main/generation_config.json",
        _QWEN | {"repetition_penalty": 1.05},
    ),
    Recommendation(
        "Qwen2.5 Instruct, 0.5B and 1.5B",
        r"qwen2\.5-(0\.5|1\.5)b-instruct",
        "Qwen",
        f"{_HUB}Qwen/Qwen2.5-0.5B-Instruct/blob/main/generation_config.json",
        _QWEN | {"repetition_penalty": 1.1},
    ),
    Recommendation(
        "Qwen2.5 Instruct, 3B and 7B, and Qwen2 Instruct, 7B",
        r"qwen2(\.5-3b|(\.5)?-7b)-instruct",
        "Qwen",
        f"{_HUB}Qwen/Qwen2.5-7B-Instruct/blob/main/generation_config.json",
        _QWEN | {"repetition_penalty": 1.05},
    ),
    Recommendation(
        "Qwen3-Coder Instruct",
        r"qwen3-coder-\d+b-a\d+b-instruct",
        "Qwen",
        f"{_HUB}Qwen/Qwen3-Coder-30B-A3B-Instruct#best-practices",
        _QWEN | {"repetition_penalty": 1.05},
    ),
    Recommendation(
        "Qwen3 Instruct 2507",
        r"qwen3-\d+b(-a\d+b)?-instruct-2507",
        "Qwen",
        f"{_HUB}Qwen/Qwen3-30B-A3B-Instruct-2507#best-practices",
        _QWEN | {"min_p": 0.0},
    ),
    # These models think unless a request disables it.
    Recommendation(
        "Qwen3, which thinks",
        r"qwen3-(0\.6|1\.7|4|8|14|30|32|235)b(-a\d+b)?(?!.*-(base|instruct|thinking))",
        "Qwen",
        f"{_HUB}Qwen/Qwen3-8B#best-practices",
        _QWEN_THINKING,
    ),
    Recommendation(
        "Qwen3.5, 27B",
        r"qwen3\.5-27b(?!-base)",
        "Qwen",
        f"{_HUB}Qwen/Qwen3.5-27B#best-practices",
        _QWEN_NEW | {"presence_penalty": 1.5},
    ),
    Recommendation(
        "Qwen3.6 and Qwen3.8, 27B",
        r"qwen3\.[68]-27b(?!-base)",
        "Qwen",
        f"{_HUB}Qwen/Qwen3.6-27B#best-practices",
        _QWEN_NEW,
    ),
    Recommendation(
        "QwQ, 32B",
        r"qwq-32b(?!-preview)",
        "Qwen",
        f"{_HUB}Qwen/QwQ-32B#usage-guidelines",
        {"temperature": 0.6, "top_p": 0.95},
    ),
    Recommendation(
        "Llama 3 and 3.1 Instruct",
        r"(meta-)?llama-3(\.1)?-(8|70|405)b-instruct",
        "Meta",
        f"{_HUB}meta-llama/Llama-3.1-8B-Instruct/blob/main/generation_config.json",
        {"temperature": 0.6, "top_p": 0.9},
    ),
    Recommendation(
        "Gemma 3 and 3n",
        r"gemma-(3-(270m|1b|4b|12b|27b)|3n-e[24]b)",
        "Google",
        "https://unsloth.ai/docs/models/tutorials/gemma-3-how-to-run-and-fine-tune",
        _GEMMA,
    ),
    Recommendation("Gemma 4", r"gemma-4-", "Google", f"{_HUB}google/gemma-4-31B-it#best-practices", _GEMMA),
    Recommendation(
        "DeepSeek R1 and its distilled models",
        r"deepseek-r1",
        "DeepSeek",
        f"{_HUB}deepseek-ai/DeepSeek-R1/blob/main/generation_config.json",
        {"temperature": 0.6, "top_p": 0.95},
    ),
    Recommendation(
        "DeepSeek V4 Flash",
        r"deepseek-v4-flash",
        "DeepSeek",
        f"{_HUB}deepseek-ai/DeepSeek-V4-Flash",
        {"temperature": 1.0, "top_p": 1.0},
    ),
    Recommendation(
        "gpt-oss",
        r"gpt-oss-(20|120)b",
        "OpenAI",
        "https://github.com/openai/gpt-oss#recommended-sampling-parameters",
        {"temperature": 1.0, "top_p": 1.0},
    ),
    Recommendation(
        "GLM-Z1", r"glm-z1-", "Z.ai", f"{_HUB}zai-org/GLM-Z1-32B-0414", {"temperature": 0.6, "top_p": 0.95, "top_k": 40}
    ),
    Recommendation(
        "GLM 4.6 to 5.2",
        r"glm-(4\.6|4\.7|5|5\.[12])(-|$)",
        "Z.ai",
        "https://docs.z.ai/api-reference/llm/chat-completion",
        {"temperature": 1.0, "top_p": 0.95},
    ),
    Recommendation(
        "Mistral Small 3, 24B Instruct",
        r"mistral-small-(3\.[12]-)?24b-instruct",
        "Mistral AI",
        f"{_HUB}mistralai/Mistral-Small-24B-Instruct-2501",
        {"temperature": 0.15},
    ),
    Recommendation(
        "LFM2, 350M to 1.2B",
        r"lfm2-(350m|700m|1\.2b)(?!.*-(extract|rag|tool|math|enjp))",
        "Liquid AI",
        f"{_HUB}LiquidAI/LFM2-1.2B",
        {"temperature": 0.3, "min_p": 0.15, "repetition_penalty": 1.05},
    ),
    Recommendation(
        "SmolLM3",
        r"smollm3-3b(?!-base)",
        "Hugging Face",
        f"{_HUB}HuggingFaceTB/SmolLM3-3B",
        {"temperature": 0.6, "top_p": 0.95},
    ),
    Recommendation(
        "MiniMax M3", r"minimax-m3", "MiniMax", f"{_HUB}MiniMaxAI/MiniMax-M3", {"temperature": 1.0, "top_p": 0.95}
    ),
)


def recommended(names: Iterable[str]) -> Recommendation | None:
    """Return the recommendation for a model with these names, the most reliable first, or None if no row matches."""
    plain = (re.sub(r"[\s_]+", "-", name.strip()).lower() for name in names)
    return next((row for name in plain for row in ROWS if row.fits(name)), None)
