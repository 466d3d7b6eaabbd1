"""An answer ends at each token that ends the model's answers, and at no other."""

from collections.abc import Sequence

import pytest

from oaiserve.engine.text.end_tokens import end_token_ids
from oaiserve.engine.text.stored_tokenizer import StoredTokenizer
from oaiserve.engine.text.tokenizer import Tokenizer
from tests.engine.text.tokenizers_for_tests import byte_level

PLAIN = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + END }}{% endfor %}"


def ends(special: Sequence[str], template: str | None = None, of_files: Sequence[str] = ()) -> set[str]:
    """Return the texts of the tokens that end answers of a model with these special tokens."""
    backend = byte_level()
    backend.add_special_tokens([*special])
    stored = StoredTokenizer(
        backend_tokenizer=backend,
        length=backend.get_vocab_size(),
        split_special_tokens=False,
        eos_token_ids=[],
        special_tokens_map={},
        chat_template=template,
        response_template=None,
    )
    named = frozenset(backend.token_to_id(text) for text in of_files)
    return {backend.id_to_token(i) for i in end_token_ids(Tokenizer(stored), named)} - {"<|endoftext|>", "<|im_end|>"}


def test_the_tokens_of_the_files_and_those_with_usual_names_end_an_answer() -> None:
    assert ends(["<|eot_id|>", "<|eom_id|>", "<|python_tag|>"]) == {"<|eot_id|>", "<|eom_id|>"}
    files = {"<|fim_pad|>", "<|file_sep|>", "<file_sep>", "<|file_separator|>"}
    assert ends(["<|fim_middle|>", *files]) == files
    assert ends(["<custom>", "<turn|>"], of_files=["<custom>"]) == {"<custom>", "<turn|>"}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("'<done>\\n'", {"<done>"}),
        ("' <done>'", {"<done>"}),
        ("'<done><|user|>'", {"<|user|>"}),
        ("'<done>' if m.role == 'assistant' else ''", {"<done>"}),
        ("'</answer><|stop|>'", {"<|stop|>"}),  # known by the files
        ("'<close>answer<sep><done>'", {"<done>"}),
        ("'<done><sep>assistant<close>'", set()),  # the next turn begins
    ],
)
def test_the_token_after_an_assistants_text_ends_an_answer(written: str, expected: set[str]) -> None:
    special = ["<done>", "<|user|>", "<|assistant|>", "</answer>", "<|stop|>", "<close>", "<sep>"]
    of_files = ["<|stop|>"] if "stop" in written else []
    assert ends(special, PLAIN.replace("END", written), of_files) == expected


def test_the_next_turn_ends_an_answer_that_nothing_else_ends() -> None:
    assert ends(["<|user|>", "<|assistant|>"], PLAIN.replace("+ END", "")) == {"<|user|>"}


def test_a_token_between_a_text_and_a_call_does_not_end_an_answer() -> None:
    template = (
        "{% for m in messages %}{{ m.role + m.content + '<sep>' }}"
        "{% if m.tool_calls %}{{ 'function call' + m.tool_calls[0].function.name + '<sep>' }}{% endif %}{% endfor %}"
    )
    assert ends(["<sep>"], template) == set()
    assert ends(["<sep>"], PLAIN.replace("END", "'<sep>'")) == {"<sep>"}


def test_the_end_of_a_part_does_not_end_an_answer_of_gpt_oss_or_solar_open() -> None:
    template = PLAIN.replace("END", "'<|end|>'")
    assert ends(["<|end|>", "<|return|>", "<|call|>"], template) == {"<|return|>", "<|call|>"}
    assert ends(["<|end|>", "<|flush|>", "<|calls|>"], template) == {"<|flush|>", "<|calls|>"}
    assert ends(["<|end|>"], template) == {"<|end|>"}
