"""Answers of two machines may differ only where two tokens tie, and the environment for aarch64 has what this needs."""

import math
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from oaiserve.errors import StartupError
from tests.engine.executors.native.small_models import FAMILIES, make_model
from tests.engine.remembered import save
from tests.engine.start.test_cpu_features import computed_with_avx512
from tools.arm import answers, environment
from tools.arm.comparison import MAX_DIFFERENCE, TIE, Position, compare

NEAR = TIE / 2
FAR = TIE * 2


def position(token_id: int, **others: float) -> Position:
    """A token with log-probability -1, and others by their ids, as in `_7=-1.5`."""
    return Position(token_id, {token_id: -1.0} | {int(name[1:]): logprob for name, logprob in others.items()})


def test_equal_answers_have_no_fault() -> None:
    answer = [position(1), position(2)]
    found = compare(answer, answer)
    assert (found.num_equal, found.num_tokens, found.max_difference) == (2, 2, 0.0)
    assert found.fault is None
    assert not found.is_tie


def test_two_tokens_that_are_near_on_both_machines_tie_and_the_rest_is_not_compared() -> None:
    expected = [position(1), position(2, _3=-1 - NEAR), position(4)]
    actual = [position(1), position(3, _2=-1 - NEAR), position(5)]
    found = compare(expected, actual)
    assert (found.num_equal, found.is_tie, found.fault) == (1, True, None)


def test_two_tokens_that_are_far_apart_on_either_machine_are_a_fault() -> None:
    near = position(2, _3=-1 - NEAR)
    far = position(2, _3=-1 - FAR)
    for expected, actual in ((far, position(3, _2=-1 - NEAR)), (near, position(3, _2=-1 - FAR))):
        found = compare([expected], [actual])
        assert not found.is_tie
        assert found.fault == f"token 0 is 3 and not 2, and they are {FAR:.3f} apart"


def test_a_token_that_is_not_among_the_likeliest_of_the_other_machine_is_a_fault() -> None:
    assert compare([position(2)], [position(3, _2=-1)]).fault == "token 0 is 3 and not 2, and they are inf apart"


def test_equal_tokens_with_other_log_probabilities_are_a_fault() -> None:
    expected = [position(1), position(2)]
    actual = [position(1), Position(2, {2: -1 - 2 * MAX_DIFFERENCE})]
    found = compare(expected, actual)
    assert found.fault == f"token 1 has a log-probability that differs by {2 * MAX_DIFFERENCE:.3f}"
    assert compare(expected, [position(1), Position(2, {2: math.nan})]).fault is not None
    assert compare(expected, [position(1), Position(2, {2: -1 - MAX_DIFFERENCE / 2})]).fault is None


def test_an_answer_that_is_shorter_is_a_fault() -> None:
    assert compare([position(1), position(2)], [position(1)]).fault == "the answer has 1 tokens and not 2"


def test_the_environment_has_what_the_project_needs_in_the_versions_installed_here() -> None:
    found = {one.name: str(one.specifier) for one in map(Requirement, environment.needed_packages())}
    assert found["torch"] == f"=={environment.TORCH}"
    assert found.keys() >= {"numpy", "transformers", "safetensors", "sympy"}
    assert not any(name.startswith(("nvidia", "pytest")) for name in found)


def test_max_has_simple_pointer_authentication_in_the_emulator() -> None:
    command = environment.command("max", "x.py", variables={"OAISERVE_CACHE": "/c"})
    assert command[:3] == ["qemu-aarch64", "-cpu", "max,pauth-impdef=on"]
    assert "OAISERVE_CACHE=/c" in command
    assert command[-1] == "x.py"


def test_the_answers_of_this_machine_are_limited_as_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(make_model(FAMILIES["llama"]), tmp_path / "model")
    computed_with_avx512(monkeypatch)
    with pytest.raises(StartupError, match="^--cpu-features avx2 cannot be had: torch uses AVX512 in this process"):
        answers.answer(str(folder), ["The"], 1, "auto", "avx2")
