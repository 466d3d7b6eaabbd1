"""Computes the numbers of KV cache blocks and states, from a GPU's free memory or a share of main memory."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.errors import StartupError
from oaiserve.system_memory import available_bytes

log = logging.getLogger(__name__)

CPU_SHARE = 0.25
# If weights still have to be packed, the KV cache and states get at most this share of the memory that weights will
# leave. A machine that swaps may have less memory than its weights take. Then the least share applies.
CPU_SHARE_OF_REST = 0.5
LEAST_CPU_SHARE = 1 / 32
STATES_SHARE = 0.5  # share of the room for caches, or of a GPU's free memory, that states may take from the KV cache
# On a CPU, other programs need memory too. The running requests together use no more tokens than this, because a CPU
# computes too slowly. More would only help the prefix cache.
CPU_TOKENS = 65_536
CPU_LONGEST_REQUESTS = 8
LEAST_CACHE_TOKENS = 128  # enough for a short question in a chat template, and its answer
FEW_CACHES = 4  # Requests are limited to a length at which this many caches fit.


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The uses of a GPU's memory other than the KV cache, in bytes, and the share of the memory that may be used."""

    total: int
    weights: int
    step: int  # memory of the largest step, in addition to the weights
    graphs: int  # an estimate for CUDA graphs
    others: int  # memory outside this process's tensors: the driver's and other programs'
    utilization: float
    states: int = 0  # memory of the states of sequences

    @property
    def left(self) -> int:
        used = self.weights + self.step + self.graphs + self.others + self.states
        return max(0, int(self.total * self.utilization) - used)

    def __str__(self) -> str:
        return (
            f"{gib(self.total * self.utilization)} of {gib(self.total)} GiB may be in use by "
            f"--gpu-memory-utilization {self.utilization:g}, of which weights take {gib(self.weights)}, the largest "
            f"step {gib(self.step)}, CUDA graphs {gib(self.graphs)}, the driver and other programs {gib(self.others)}"
            + (f", states {gib(self.states)}" if self.states else "")
        )


def _room_on_cpu(options: EngineOptions, unpacked_bytes: int) -> int:
    """Return the bytes for the KV cache and states, given `unpacked_bytes` of weights that have no memory yet."""
    free = available_bytes() // options.num_sharing
    of_rest = max(CPU_SHARE_OF_REST * (free - unpacked_bytes), LEAST_CPU_SHARE * free)
    return int(min(CPU_SHARE * free, of_rest))


def num_states(
    spec: ModelSpec, options: EngineOptions, use: MemoryUse | None = None, *, unpacked_bytes: int = 0
) -> int:
    """Return the number of sequence states, or 0 if the model's layers have none.

    Each running sequence needs one. With a prefix cache, there are twice as many as may run, if they fit. A model on a
    GPU needs `use`; on a CPU, weights will take `unpacked_bytes`. Raises StartupError if not even one fits.
    """
    if not spec.state_shapes:
        return 0
    room = _room_on_cpu(options, unpacked_bytes) if use is None else use.left
    most = int(room * (STATES_SHARE if spec.kv_shapes else 1)) // spec.state_bytes
    if use is not None and most < 1:
        raise StartupError(
            f"The state of one sequence takes {gib(spec.state_bytes)} GiB, and {gib(room)} GiB are left, of which "
            f"states may take {STATES_SHARE:.0%} beside a KV cache. {use}."
        )
    number = min(options.max_running * (2 if options.prefix_cache else 1), max(1, most))
    log.debug(
        "Layers of the model keep a state, which takes %.1f MiB for each sequence. There is room for %d, so at most %d "
        "sequences run at once (--max-running is %d); the others keep prefixes. There are no drafts, because a state "
        "cannot go back to fewer tokens",
        spec.state_bytes / 2**20,
        number,
        min(number, options.max_running),
        options.max_running,
    )
    return number


def kv_blocks(
    spec: ModelSpec,
    options: EngineOptions,
    max_model_len: int,
    use: MemoryUse | None = None,
    least_tokens: int = 1,
    *,
    state_bytes: int = 0,
    unpacked_bytes: int = 0,
) -> int:
    """Return the number of blocks of the KV cache.

    The options may set that number, or the memory of the blocks. Otherwise the cache gets as many blocks as fit, but
    not more than all running sequences can use. A model on a GPU needs `use`; on a CPU, weights will take
    `unpacked_bytes`. States take `state_bytes`. Raises StartupError if the options demand more than there is, or if
    `least_tokens` do not fit on a GPU.
    """
    block_bytes = spec.kv_bytes_per_token * options.block_size
    if not block_bytes:  # No layer has attention, so blocks only count tokens and take no memory.
        return options.kv_blocks or options.max_running * -(-max_model_len // options.block_size)
    if use is not None:
        use = replace(use, states=state_bytes)
    if options.kv_blocks is not None:
        num_blocks = options.kv_blocks
        asked = f"kv_blocks is {num_blocks}, which take {gib(num_blocks * block_bytes)} GiB"
    elif options.kv_cache_memory is not None:
        num_blocks = options.kv_cache_memory // block_bytes
        asked = f"--kv-cache-memory is {options.kv_cache_memory}"
        least = -(-min(max_model_len, LEAST_CACHE_TOKENS) // options.block_size)
        if num_blocks < least:
            raise StartupError(
                f"{asked}, which holds {num_blocks * options.block_size} tokens, but must hold at least "
                f"{least * options.block_size}, which take {least * block_bytes} bytes."
            )
    else:
        most = options.max_running * -(-max_model_len // options.block_size)
        if use is not None:
            return min(most, _blocks_left(use, block_bytes, -(-least_tokens // options.block_size)))
        most = min(most, max(CPU_TOKENS, CPU_LONGEST_REQUESTS * max_model_len) // options.block_size)
        num_blocks = max(1, min(most, (_room_on_cpu(options, unpacked_bytes) - state_bytes) // block_bytes))
        asked = f"One block of the KV cache takes {gib(block_bytes)} GiB"
    free = available_bytes() if use is None else use.left
    if num_blocks * block_bytes > free:
        why = "" if use is None else f" for it: {use}"
        raise StartupError(f"{asked}, but only {gib(free)} GiB are free on {spec.device}{why}.")
    return num_blocks


def cpu_sizes(spec: ModelSpec, options: EngineOptions, unpacked_bytes: int) -> tuple[int, int]:
    """Return the numbers of KV cache blocks and states on a CPU. See `kv_blocks` and `num_states`."""
    most_states = num_states(spec, options, unpacked_bytes=unpacked_bytes)
    state_bytes = most_states * spec.state_bytes
    num_blocks = kv_blocks(spec, options, spec.max_model_len, state_bytes=state_bytes, unpacked_bytes=unpacked_bytes)
    return num_blocks, most_states


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The size in bytes of the cache in which transformers' code stores one sequence."""

    fixed: int  # states, and other parts whose size is fixed
    per_token: float

    def of(self, num_tokens: int) -> float:
        return self.fixed + num_tokens * self.per_token

    def most_tokens(self, num_bytes: float) -> int:
        """Return the length of the longest sequence whose cache takes at most `num_bytes`."""
        room = max(0.0, num_bytes - self.fixed)
        return int(room / self.per_token) if self.per_token else int(room and sys.maxsize)


def sizes_of_caches(size: CacheSize, spec: ModelSpec, options: EngineOptions, room: float) -> tuple[int, int, int]:
    """Return the number of caches, the maximum tokens of a request, and the number of blocks, which only count tokens.

    All caches together fit into `room`, in bytes, however long their sequences get. With a prefix cache there are twice
    as many as sequences may run. If few fit, requests are limited, unless --max-model-len asks for long ones. Raises
    StartupError if not even a cache of one block fits.
    """
    wanted = options.max_running * (2 if options.prefix_cache else 1)
    least = 1 if options.max_model_len is not None else min(FEW_CACHES, wanted)
    longest = min(spec.max_model_len, size.most_tokens(room / least))
    if options.kv_blocks is not None:
        longest = min(longest, options.kv_blocks * options.block_size)
    if longest < min(spec.max_model_len, options.block_size):
        raise StartupError(
            f"The cache of a sequence of {options.block_size} tokens takes {gib(size.of(options.block_size))} GiB, and "
            f"{gib(room)} GiB are left for at least {least} caches on {spec.device}."
        )
    num_caches = max(1, min(wanted, int(room / size.of(longest))))
    most = max(CPU_TOKENS, CPU_LONGEST_REQUESTS * longest) // options.block_size
    num_blocks = options.kv_blocks or min(num_caches * -(-longest // options.block_size), most)
    log.debug(
        "transformers' own cache takes %.1f MiB for a sequence and %.1f KiB for each of its tokens. There is room for "
        "%d sequences of %d tokens, so at most %d run at once (--max-running is %d); the others keep prefixes. There "
        "are no drafts, because a cache cannot go back to fewer tokens",
        size.fixed / 2**20,
        size.per_token / 2**10,
        num_caches,
        longest,
        min(num_caches, options.max_running),
        options.max_running,
    )
    return num_caches, longest, num_blocks


def longest_request(spec: ModelSpec, capacity: int) -> int:
    """Return the most tokens that a request may have, given a KV cache of `capacity` tokens."""
    if capacity >= spec.max_model_len:
        return spec.max_model_len
    log.warning(
        "The KV cache holds %d tokens, so no request can be longer (the model allows %d); set --max-model-len to match",
        capacity,
        spec.max_model_len,
    )
    return capacity


def gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f}"


def _blocks_left(use: MemoryUse, block_bytes: int, least: int) -> int:
    num_blocks = use.left // block_bytes
    if num_blocks < least:
        raise StartupError(
            f"The KV cache has no room for the tokens of one step: they take {gib(least * block_bytes)} GiB, and "
            f"{gib(use.left)} GiB are left. {use}. Raise --gpu-memory-utilization, lower --max-step-tokens and "
            "--max-running, end what else uses this GPU (nvidia-smi lists it), or take a smaller --dtype or "
            "quantized weights."
        )
    return num_blocks
