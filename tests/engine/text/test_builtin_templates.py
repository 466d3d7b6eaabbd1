"""The built-in chat templates: their texts, and which one fits a vocabulary."""

from pathlib import Path

import pytest

from oaiserve.engine.text.builtin_templates import NAMES, advice, template_file
from oaiserve.engine.text.chat_template import ChatTemplate
from oaiserve.engine.text.end_tokens import text_after_answers

SYSTEM = {"role": "system", "content": "Rule."}
TURNS = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three?"},
]
WRITTEN = {
    "chatml": "<|im_start|>system\nRule.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nTwo."
    "<|im_end|>\n<|im_start|>user\nThree?<|im_end|>\n<|im_start|>assistant\n",
    "deepseek": "<s>Rule.<｜User｜>One?<｜Assistant｜>Two.<｜end▁of▁sentence｜><｜User｜>Three?<｜Assistant｜>",
    "gemma": "<s><start_of_turn>user\nRule.\n\nOne?<end_of_turn>\n<start_of_turn>model\nTwo.<end_of_turn>\n"
    "<start_of_turn>user\nThree?<end_of_turn>\n<start_of_turn>model\n",
    "granite": "<|start_of_role|>system<|end_of_role|>Rule.<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>One?"
    "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>Two.<|end_of_text|>\n<|start_of_role|>user"
    "<|end_of_role|>Three?<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nRule.<|eot_id|><|start_header_id|>user<|end_header_id|>"
    "\n\nOne?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nTwo.<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nThree?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s>[INST] One?[/INST] Two.</s>[INST] Rule.\n\nThree?[/INST]",
    "mistral-nemo": "<s>[INST]One?[/INST]Two.</s>[INST]Rule.\n\nThree?[/INST]",
    "mistral-small": "<s>[SYSTEM_PROMPT]Rule.[/SYSTEM_PROMPT][INST]One?[/INST]Two.</s>[INST]Three?[/INST]",
    "phi3": "<|system|>\nRule.<|end|>\n<|user|>\nOne?<|end|>\n<|assistant|>\nTwo.<|end|>\n<|user|>\nThree?<|end|>\n"
    "<|assistant|>\n",
    "phi4": "<|im_start|>system<|im_sep|>Rule.<|im_end|><|im_start|>user<|im_sep|>One?<|im_end|><|im_start|>assistant"
    "<|im_sep|>Two.<|im_end|><|im_start|>user<|im_sep|>Three?<|im_end|><|im_start|>assistant<|im_sep|>",
}
WRITTEN |= dict.fromkeys(("qwen", "qwen3"), WRITTEN["chatml"])
# Tokens after an assistant's text, which end an answer.
ENDS = {
    "gemma": "<end_of_turn>",
    "llama3": "<|eot_id|>",
    "phi3": "<|end|>",
    "phi4": "<|im_end|>",
    "chatml": "<|im_end|>",
}


def built_in(name: str) -> ChatTemplate:
    return ChatTemplate(template_file(Path(name)).read_text(), {"bos_token": "<s>", "eos_token": "</s>"})


def rendered(name: str, *messages: dict[str, str], **variables: object) -> str:
    return built_in(name)._apply([*messages], {"add_generation_prompt": True, **variables})


@pytest.mark.parametrize("name", NAMES)
def test_each_writes_a_conversation_in_the_form_of_its_family(name: str) -> None:
    assert rendered(name, SYSTEM, *TURNS) == WRITTEN[name]


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_an_answer_is_found(name: str) -> None:
    assert text_after_answers(built_in(name), [ENDS[name], "<|start_header_id|>", "<start_of_turn>"]) == ENDS[name]


def test_qwen_has_a_system_prompt_of_its_own_and_qwen3_can_be_kept_from_thinking() -> None:
    assert rendered("qwen", TURNS[0]).startswith("<|im_start|>system\nYou are Qwen, created by Alibaba Cloud.")
    assert rendered("qwen3", TURNS[0], enable_thinking=False).endswith("assistant\n<think>\n\n</think>\n\n")
    thought = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nTwo."}
    assert rendered("qwen3", TURNS[0], thought, TURNS[2]) == WRITTEN["qwen3"].removeprefix(
        "<|im_start|>system\nRule.<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ({"<start_of_turn>"}, "the template of its family: --chat-template gemma"),
        ({"<|im_start|>"}, "--chat-template chatml"),
        ({"<|im_start|>", "<|im_sep|>"}, "--chat-template phi4"),
        ({"<|im_start|>", "<|vision_start|>"}, "--chat-template qwen"),
        ({"<|im_start|>", "<|vision_start|>", "<think>"}, "--chat-template qwen3"),
        ({"[INST]"}, "--chat-template mistral"),
        ({"a"}, f"a Jinja file, or one of {', '.join(NAMES)}"),
    ],
)
def test_the_tokens_of_a_vocabulary_suggest_a_template(tokens: set[str], said: str) -> None:
    assert advice(dict.fromkeys(tokens, 1).get).endswith(said)


def test_a_name_stands_for_a_built_in_template_and_a_path_for_a_file() -> None:
    assert template_file(Path("./chatml.jinja")) == Path("chatml.jinja")
    assert {template_file(Path(name)).name for name in NAMES} == {
        path.name for path in template_file(Path("gemma")).parent.iterdir()
    }


def test_the_help_names_all() -> None:
    flags = (Path(__file__).parents[3] / "docs/reference/flags.md").read_text()
    assert f"one of {', '.join(NAMES[:-1])} and {NAMES[-1]}." in flags
