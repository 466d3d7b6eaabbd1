"""Members of a model that is split capture a forward together, or none does, and none waits for one that has failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from oaiserve.engine.model.gpu.decode_forwards import Run
from oaiserve.engine.model.parallel.capture import MembersCapture
from oaiserve.engine.model.parallel.sums import ElsewhereError
from oaiserve.errors import StartupError


class Double:
    """This member's recorder and sums. `fails` is what fails here, and `elsewhere` what fails at another member."""

    def __init__(self, fails: str = "", elsewhere: str = "") -> None:
        self._fails, self._elsewhere = fails, elsewhere
        self._is_alone = False
        self.log: list[str] = []

    def _do(self, what: str) -> None:
        self.log.append(what)
        if what == self._fails:
            raise RuntimeError(f"{what} is impossible")

    def rehearse(self, run: Run, *, may_wait: bool = False) -> None:
        assert may_wait != self._is_alone
        self._do("alone" if self._is_alone else "together")
        run()

    def record(self, run: Run) -> Run:
        self._do("record")
        return run

    @contextmanager
    def left_out(self) -> Iterator[None]:
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def all_agree(self, yes: bool) -> bool:
        assert not self._is_alone
        all_agree = yes and (not self._elsewhere or self.log[-1] != self._elsewhere)
        self.log.append("all agree" if all_agree else "not all agree")
        return all_agree


def capture(double: Double) -> Run:
    members = MembersCapture(double, double)
    return members.make(lambda: members(lambda: None))


def test_each_member_tries_alone_before_all_run_together() -> None:
    double = Double()
    capture(double)
    assert double.log == ["alone", "all agree", "together", "record", "all agree", "all agree"]


def test_what_fails_between_two_captures_ends_all_of_them_too() -> None:
    here, elsewhere = Double(), Double(elsewhere="alone")
    members = MembersCapture(here, here)

    def fail() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        members.make(fail)
    with pytest.raises(ElsewhereError):
        capture(elsewhere)
    assert here.log == ["not all agree"]
    assert elsewhere.log == ["alone", "not all agree"]


@pytest.mark.parametrize("what", ["alone", "record"])
def test_what_fails_at_one_member_ends_the_capture_at_all(what: str) -> None:
    here, elsewhere = Double(fails=what), Double(elsewhere=what)
    with pytest.raises(RuntimeError, match=f"{what} is impossible"):
        capture(here)
    with pytest.raises(ElsewhereError):
        capture(elsewhere)
    assert here.log == elsewhere.log
    assert here.log[-2:] == [what, "not all agree"]


def test_a_member_that_fails_while_others_may_wait_for_it_ends_the_start() -> None:
    double = Double(fails="together")
    with pytest.raises(StartupError, match="together is impossible.*--no-cuda-graph"):
        capture(double)
    assert double.log[-1] == "together"
