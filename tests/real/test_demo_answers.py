"""What a newcomer reads first: the demo model's answers to the prompts that the chat page suggests."""

import asyncio
from pathlib import Path

from tests.e2e.live import serve_process
from tools import demo_answers


def test_each_suggested_prompt_gets_an_answer_that_ends_and_does_not_repeat_itself(tmp_path: Path) -> None:
    asked = demo_answers.prompts()
    with serve_process("demo", tmp_path / "log") as server:
        given = asyncio.run(demo_answers.answers(server.url, asked))
    assert len(asked) == 20
    for prompt, (text, reason) in zip(asked, given, strict=True):
        assert reason == "stop", f"{prompt}: {text}"
        assert not demo_answers.repeats_itself(text), f"{prompt}: {text}"
    assert given[asked.index("What is the capital of France?")][0] == "The capital of France is Paris."


def test_an_answer_without_end_is_found() -> None:
    endless = "L'Étoile, " + "la Marseillaise, la femme, la femme, la femme, " * 4
    assert demo_answers.repeats_itself(endless)
    assert not demo_answers.repeats_itself("The capital of France is Paris.")
