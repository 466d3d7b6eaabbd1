"""A pool of threads runs its phases in order, and each item once."""

import ctypes

import pytest

pytestmark = pytest.mark.compiler


@pytest.mark.parametrize(("threads", "runs"), [(1, 1000), (2, 200), (5, 200)])
def test_phases_run_in_order_and_each_item_once(exports: ctypes.CDLL, threads: int, runs: int) -> None:
    exports.check_pool.restype = ctypes.c_char_p
    assert exports.check_pool(threads, runs) is None


def test_pools_can_be_created_and_destroyed_many_times(exports: ctypes.CDLL) -> None:
    exports.check_pool.restype = ctypes.c_char_p
    assert [exports.check_pool(3, runs) for runs in [0, 1, 2] * 5] == [None] * 15
