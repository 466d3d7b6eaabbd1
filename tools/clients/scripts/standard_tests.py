"""Runs the tests that a client's own repository has for servers, and judges them."""

import pytest


class Outcomes:
    """How many tests passed, and which failed with one of these errors, as a plug-in of pytest."""

    def __init__(self, errors: tuple[type[BaseException], ...]) -> None:
        self._errors = errors
        self.num_passed = 0
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.num_passed += report.passed and report.when == "call"

    def pytest_exception_interact(self, node: pytest.Item, call: pytest.CallInfo[object]) -> None:
        if isinstance(call.excinfo.value, self._errors):
            self.failed.append(f"{node.name}: {call.excinfo.value}")


def run(*words: str, least: int, errors: tuple[type[BaseException], ...], plugins: tuple[object, ...] = ()) -> None:
    """Run pytest with these words. At least `least` tests must pass, and none may fail with one of the errors."""
    outcomes = Outcomes(errors)
    pytest.main([*words, "-p", "no:cacheprovider"], [outcomes, *plugins])
    assert not outcomes.failed, outcomes.failed
    assert outcomes.num_passed >= least, f"only {outcomes.num_passed} passed"
