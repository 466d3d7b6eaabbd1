"""The first call of a function that MKL computes is one of a single number, in one thread."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from oaiserve.engine.start import first_use
from tests.engine.executors.native.small_models import FAMILIES, make_model
from tests.engine.remembered import answer, save


class FirstCalls(TorchFunctionMode):
    """Notes how many numbers the first call of each function had."""

    def __init__(self) -> None:
        super().__init__()
        self.num_numbers: dict[str, int] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            self.num_numbers.setdefault(func.__name__, args[0].numel())
        return func(*args, **(kwargs or {}))


def test_a_start_lets_mkl_choose_its_code_before_it_computes_tables(tmp_path: Path) -> None:
    folder = save(make_model(FAMILIES["llama"]), tmp_path / "model")
    first_use.choose_vector_functions.cache_clear()
    with FirstCalls() as calls:
        answer(folder, device="cpu", kv_blocks=64, cpu_threads=1)
    assert calls.num_numbers["cos"] == 1  # The table of rotary embeddings has many more.
    assert {calls.num_numbers[name] for name in first_use.VECTOR_FUNCTIONS} == {1}


def test_the_functions_are_called_only_once_in_each_process() -> None:
    first_use.choose_vector_functions()
    with FirstCalls() as calls:
        first_use.choose_vector_functions()
    assert not calls.num_numbers
