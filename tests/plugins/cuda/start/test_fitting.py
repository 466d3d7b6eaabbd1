"""Plain torch computes in place of a kernel that does not compile for a GPU, or does not fit on it."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from oaiserve.plugins.cuda.executor.kernels import Kernels
from oaiserve.plugins.cuda.start.features import FEATURES, Probed
from oaiserve.plugins.cuda.start.fitting import PARTS, fields_off, fitting

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from triton.runtime.errors import OutOfResources

from oaiserve.plugins.cuda.executor import triton_sampling
from tools.gpu.fake_device import LAUNCHING
from tools.gpu.shapes import draw

ON = Probed(dict.fromkeys(FEATURES, ""))
TOO_LARGE = OutOfResources(98_304, 65_536, "shared memory")
REASON = f"OutOfResources: {TOO_LARGE}"


class Unfit:
    """Replaces a kernel of which a program needs more than there is."""

    def __init__(self, error: Exception = TOO_LARGE) -> None:
        self._error = error

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self

    def __call__(self, *_: Any, **__: Any) -> None:
        raise self._error


def unless_unfit(part: str, error: Exception = TOO_LARGE) -> Callable[[Probed], dict[str, str]]:
    """Return a run in which a kernel of draws is launched and does not fit, unless a part is off."""

    def run(found: Probed) -> dict[str, str]:
        if part not in found.unfit:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(triton_sampling, "best_kernel", Unfit(error))
                patch.setattr(triton_sampling, "best_of_chunk_kernel", Unfit(error))
                draw(1, 64)
        return found.unfit

    return run


def test_each_module_that_launches_kernels_has_a_part() -> None:
    assert {*PARTS} == {module.__name__.rpartition(".")[2] for module in LAUNCHING}
    assert all({*part.fields} <= {*Kernels._fields} for part in PARTS.values())


def test_a_kernel_that_does_not_fit_is_off_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        result, found = fitting(ON, unless_unfit("draws"))
    assert result == found.unfit == {"draws": REASON}
    assert {name for name, reason in found.verdict.items() if reason} == {"graphs"}
    assert fields_off(found) == ["sampling"]
    (message,) = caplog.messages
    assert message == f"Triton's kernels for draws: off, and plain torch computes these, which is slower: {REASON}"


@pytest.mark.parametrize("error", [RuntimeError("PassManager::run failed"), TOO_LARGE])
def test_what_the_compiler_raises_counts_once(error: Exception) -> None:
    with pytest.raises(type(error)):
        fitting(ON, unless_unfit("another part", error))
    assert fitting(ON, unless_unfit("draws", error))[0]


@pytest.mark.parametrize("error", [RuntimeError("an illegal memory access was encountered"), MemoryError()])
def test_other_errors_of_a_launch_are_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        fitting(ON, unless_unfit("draws", error))


def test_errors_from_elsewhere_are_raised() -> None:
    def run(found: Probed) -> None:
        raise TOO_LARGE

    with pytest.raises(OutOfResources):
        fitting(ON, run)
