"""The number of blocks of the KV cache follows from the memory that is left and from the options."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from oaiserve.config import Bytes, EngineOptions
from oaiserve.engine.model import memory
from oaiserve.engine.model.memory import CacheSize, MemoryUse, kv_blocks, num_states, sizes_of_caches
from oaiserve.errors import StartupError

GIB = 2**30
LOADED = SimpleNamespace(device=torch.device("cpu"), kv_bytes_per_token=2**14)  # 256 KiB a block
ON_GPU = SimpleNamespace(device=torch.device("cuda:0"), kv_bytes_per_token=2**14)
STATES = {"state_shapes": {0: ()}, "state_bytes": 2**25}
HYBRID = SimpleNamespace(device=LOADED.device, kv_bytes_per_token=2**14, kv_shapes={1: ()}, **STATES)
MAMBA = SimpleNamespace(device=LOADED.device, kv_bytes_per_token=0, kv_shapes={}, **STATES)
USE = MemoryUse(total=80 * GIB, weights=15 * GIB, step=2 * GIB, graphs=GIB, others=GIB, utilization=0.9)  # 53 GiB left


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 16 * GIB)


@pytest.mark.parametrize(
    ("options", "max_model_len", "on_cpu", "on_gpu"),
    [
        (EngineOptions(), 2048, 65_536 // 16, 53 * GIB // 2**18),
        (EngineOptions(), 16_384, 8 * 16_384 // 16, 53 * GIB // 2**18),
        (EngineOptions(), 131_072, 4 * GIB // 2**18, 53 * GIB // 2**18),  # a quarter of what is free, and all
        (EngineOptions(max_running=2), 2048, 2 * 2048 // 16, 2 * 2048 // 16),  # running sequences cannot use more
        (EngineOptions(kv_blocks=77), 2048, 77, 77),
        (EngineOptions(kv_cache_memory=Bytes("1GiB")), 2048, GIB // 2**18, GIB // 2**18),
    ],
)
def test_blocks_on_a_cpu_and_on_a_gpu(options: EngineOptions, max_model_len: int, on_cpu: int, on_gpu: int) -> None:
    assert kv_blocks(LOADED, options, max_model_len) == on_cpu
    assert kv_blocks(ON_GPU, options, max_model_len, USE) == min(on_gpu, options.max_running * max_model_len // 16)


@pytest.mark.parametrize(
    ("model", "options", "states"),
    [
        (SimpleNamespace(state_shapes={}), EngineOptions(), 0),
        (HYBRID, EngineOptions(max_running=8), 16),  # as many as may run, and as many to keep
        (HYBRID, EngineOptions(max_running=8, prefix_cache=False), 8),
        (HYBRID, EngineOptions(), 2 * GIB // 2**25),  # half of a quarter of what is free
        (MAMBA, EngineOptions(), 4 * GIB // 2**25),
    ],
)
def test_states_on_a_cpu(model: SimpleNamespace, options: EngineOptions, states: int) -> None:
    assert num_states(model, options) == states


def test_the_cache_gets_what_states_leave() -> None:
    assert kv_blocks(HYBRID, EngineOptions(), 131_072, state_bytes=GIB) == 3 * GIB // 2**18
    assert kv_blocks(HYBRID, EngineOptions(), 131_072, USE, state_bytes=20 * GIB) == 33 * GIB // 2**18
    assert kv_blocks(ON_GPU, EngineOptions(kv_cache_memory=Bytes("53GiB")), 2048, USE) == 53 * GIB // 2**18


@pytest.mark.parametrize(
    ("unpacked", "left"),
    [
        (7 * GIB, 4 * GIB),  # A quarter of all is less than half of the rest.
        (10 * GIB, 3 * GIB),
        (15 * GIB, GIB // 2),
        (20 * GIB, GIB // 2),  # a machine that swaps
    ],
)
def test_cache_and_states_leave_room_for_weights_that_have_no_memory_yet(unpacked: int, left: int) -> None:
    assert kv_blocks(LOADED, EngineOptions(), 131_072, unpacked_bytes=unpacked) == left // 2**18
    assert num_states(HYBRID, EngineOptions(), unpacked_bytes=unpacked) == left // 2 // 2**25


def test_blocks_without_keys_and_values_are_as_many_as_running_sequences_can_use() -> None:
    assert kv_blocks(MAMBA, EngineOptions(max_running=3), 2048) == 3 * 2048 // 16
    assert kv_blocks(MAMBA, EngineOptions(max_running=3, kv_blocks=7), 2048, USE) == 7


def test_a_gpu_without_room_for_one_state_is_refused() -> None:
    use = replace(USE, weights=68 * GIB - 2**25)
    with pytest.raises(
        StartupError, match=r"The state of one sequence takes 0\.0 GiB, and 0\.0 GiB are left, of which"
    ):
        num_states(HYBRID, EngineOptions(), use)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kv_cache_memory": Bytes("17GiB")}, r"--kv-cache-memory is 17GiB, but only 16\.0 GiB are free on cpu\."),
        ({"kv_cache_memory": Bytes("4KiB")}, r"holds 0 tokens, but must hold at least 128, which take 2097152 bytes\."),
        (
            {"kv_cache_memory": Bytes("1MiB")},
            r"--kv-cache-memory is 1MiB, which holds 64 tokens, but must hold at least 128,",
        ),
        ({"kv_blocks": 70_000}, r"kv_blocks is 70000, which take 17\.1 GiB, but only 16\.0 GiB are free"),
        ({"block_size": 2_000_000}, r"One block of the KV cache takes 30\.5 GiB, but only 16\.0 GiB are"),
    ],
)
def test_a_cache_that_does_not_fit_or_has_no_block_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(StartupError, match=problem):
        kv_blocks(LOADED, EngineOptions(**options), 2048)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (EngineOptions(kv_cache_memory=Bytes("54GiB")), "--kv-cache-memory is 54GiB, but "),
        (EngineOptions(kv_blocks=2**18), "kv_blocks is 262144, which take 64.0 GiB, but "),
    ],
)
def test_a_cache_larger_than_what_a_gpu_has_left_is_refused_with_all_uses_of_its_memory(
    options: EngineOptions, asked: str
) -> None:
    with pytest.raises(StartupError) as error:
        kv_blocks(ON_GPU, options, 2048, USE)
    assert str(error.value) == (
        f"{asked}only 53.0 GiB are free on cuda:0 for it: 72.0 of 80.0 GiB may be in use by --gpu-memory-utilization "
        "0.9, of which weights take 15.0, the largest step 2.0, CUDA graphs 1.0, the driver and other programs 1.0."
    )


def test_a_gpu_without_room_for_the_tokens_of_a_step_is_refused() -> None:
    full = replace(USE, others=54 * GIB - 2**20)  # 1 MiB is left, for 64 tokens
    assert kv_blocks(ON_GPU, EngineOptions(), 2048, full, least_tokens=64) == 4
    with pytest.raises(StartupError) as error:
        kv_blocks(ON_GPU, EngineOptions(), 2048, full, least_tokens=65)
    assert "other programs 54.0." in str(error.value)
    assert "--gpu-memory-utilization, lower --max-step-tokens and --max-running" in str(error.value)


SIZES = st.integers(0, 100 * GIB)


@st.composite
def uses(draw: st.DrawFn) -> MemoryUse:
    return MemoryUse(draw(st.integers(1, 200 * GIB)), *(draw(SIZES) for _ in range(4)), draw(st.floats(0.01, 1.0)))


@given(uses())
def test_all_uses_together_stay_within_the_utilization(use: MemoryUse) -> None:
    used = use.weights + use.step + use.graphs + use.others
    assert use.left >= 0
    assert use.left == 0 or used + use.left <= use.total * use.utilization
    assert used + use.left >= int(use.total * use.utilization), "no byte of it is wasted"


@given(uses(), st.integers(1, 2**20), st.integers(1, 64), st.integers(1, 4096), st.integers(1, 2**17))
def test_blocks_fit_into_the_memory_left_and_hold_the_tokens_of_a_step(
    use: MemoryUse, token_bytes: int, block_size: int, least_tokens: int, max_model_len: int
) -> None:
    loaded = SimpleNamespace(device=ON_GPU.device, kv_bytes_per_token=token_bytes)
    options = EngineOptions(block_size=block_size, max_running=64)
    assume(least_tokens <= max_model_len)
    try:
        num_blocks = kv_blocks(loaded, options, max_model_len, use, least_tokens)
    except StartupError:
        assert use.left < -(-least_tokens // block_size) * block_size * token_bytes
        return
    assert num_blocks * block_size >= least_tokens
    assert num_blocks * block_size * token_bytes <= use.left
    assert num_blocks <= 64 * -(-max_model_len // block_size)


@pytest.mark.parametrize(
    ("options", "caches", "tokens", "blocks"),
    [
        (EngineOptions(max_running=2), 4, 4096, 4 * 4096 // 16),  # as many as may run, and as many to keep
        (EngineOptions(max_running=2, prefix_cache=False), 2, 4096, 2 * 4096 // 16),
        (EngineOptions(), 10, 4096, 10 * 4096 // 16),  # as many as fit
        (EngineOptions(max_model_len=4096), 10, 4096, 10 * 4096 // 16),
        (EngineOptions(kv_blocks=128), 17, 2048, 128),
    ],
)
def test_caches_of_whole_sequences_fit_into_memory(
    options: EngineOptions, caches: int, tokens: int, blocks: int
) -> None:
    size = CacheSize(fixed=2**20, per_token=2**10)  # 5 MiB for 4,096 tokens
    spec = SimpleNamespace(device=LOADED.device, max_model_len=4096)
    assert sizes_of_caches(size, spec, options, 52 * 2**20) == (caches, tokens, blocks)


def test_requests_are_shorter_where_few_caches_fit_unless_long_ones_are_asked_for() -> None:
    size = CacheSize(fixed=2**20, per_token=2**10)
    room = 8 * 2**20
    spec = SimpleNamespace(device=LOADED.device, max_model_len=2**20)
    assert sizes_of_caches(size, spec, EngineOptions(), room)[:2] == (4, 1024)
    assert sizes_of_caches(size, spec, EngineOptions(max_model_len=2**20), room)[:2] == (1, 7 * 1024)
    with pytest.raises(StartupError, match="0.0 GiB are left for at least 4 caches"):
        sizes_of_caches(size, spec, EngineOptions(), 4 * 2**20)


def test_a_cache_that_does_not_grow_is_as_large_for_any_length() -> None:
    size = CacheSize(fixed=2**20, per_token=0.0)
    spec = SimpleNamespace(device=LOADED.device, max_model_len=2**20)
    assert sizes_of_caches(size, spec, EngineOptions(), 100 * 2**20) == (100, 2**20, 8 * 2**20 // 16)
