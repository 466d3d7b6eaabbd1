"""`tools.attack.growth` reports the functions and routes whose time grows faster than their input."""

from collections import Counter
from collections.abc import Callable

import pytest

from tools.attack import growth
from tools.attack.functions import linear
from tools.attack.functions.linear import Case, is_linear


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each function take the time that it returns."""

    def seconds(run: Callable[[int], float], size: int) -> float:
        return run(size)

    monkeypatch.setattr(linear, "_seconds", seconds)


@pytest.mark.parametrize("module", growth.FUNCTIONS, ids=lambda module: module.__name__)
def test_each_function_reads_the_input_of_its_cases(module: growth.Functions) -> None:
    for case in module.cases():
        case.run(case.size // 20)


def test_names_of_cases_are_unique() -> None:
    names = Counter(case.name for module in growth.FUNCTIONS for case in module.cases())

    assert [name for name, number in names.items() if number > 1] == []


@pytest.mark.usefixtures("clock")
def test_time_in_proportion_to_the_size_is_linear_and_its_square_is_not() -> None:
    assert is_linear(lambda size: 0.001 * size, 1000)
    assert not is_linear(lambda size: 0.001 * size**2, 1000)


@pytest.mark.usefixtures("clock")
def test_times_too_short_to_measure_are_linear() -> None:
    assert is_linear(lambda size: 1e-9 * size**2, 100)


@pytest.mark.usefixtures("clock")
def test_a_disturbed_measurement_is_repeated() -> None:
    disturbances = iter([100.0])

    assert is_linear(lambda size: 0.001 * size + next(disturbances, 0.0), 1000)


@pytest.mark.usefixtures("clock")
def test_slow_functions_are_named_and_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Module:
        @staticmethod
        def cases() -> list[Case]:
            return [Case("a line", lambda size: size, 100), Case("a square", lambda size: size**2, 100)]

    monkeypatch.setattr(growth, "FUNCTIONS", (Module,))

    assert growth.main(["--functions"]) == 1
    assert growth.main(["--functions", "--only", "line"]) == 0

    assert capsys.readouterr().out == ("a square: takes more than linear time\n1 of 2 cases fail\n0 of 1 cases fail\n")


def test_a_route_that_fails_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(size: int) -> None:
        raise AssertionError("answered 500")

    monkeypatch.setattr(growth, "FUNCTIONS", ())
    monkeypatch.setattr(growth, "cases_of_routes", lambda: [Case("/a", fail, 1), Case("/b", lambda size: None, 1)])

    assert growth.main([]) == 1

    assert capsys.readouterr().out == "/a: answered 500\n1 of 2 cases fail\n"
