from __future__ import annotations

import pytest

from tools.bench.memory_use import LARGE_KIB, MAPPING, name_of


@pytest.mark.parametrize(
    ("line", "size_kib", "owner"),
    [
        ("7f00-7f01 r--p 00000000 fe:00 42        /models/a b/model.safetensors", 9, "the model's file, mapped"),
        ("7f00-7f01 r-xp 00000000 fe:00 42        /venv/torch/lib/libtorch_cpu.so", 9, "libraries of torch"),
        ("7f00-7f01 rw-p 00000000 00:00 0         [heap]", 9, "heap: Python's and torch's objects"),
        ("7f00-7f01 rw-p 00000000 00:00 0         [stack]", 9, "stacks"),
        ("7f00-7f01 rw-p 00000000 00:00 0 ", LARGE_KIB, "large pieces: weights, KV cache"),
        ("7f00-7f01 rw-p 00000000 00:00 0 ", LARGE_KIB - 4, "smaller pieces: arenas, stacks of threads"),
        ("7f00-7f01 rw-p 00000000 fe:00 7         /lib/libc.so.6", 9, "other libraries and files"),
    ],
)
def test_a_mapping_has_an_owner(line: str, size_kib: int, owner: str) -> None:
    mapping = MAPPING.match(line)
    assert mapping is not None
    assert name_of(mapping[2], size_kib) == owner
