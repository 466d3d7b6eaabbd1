"""Captures decodes and prompts as CUDA graphs: which sizes, how much memory, and at which members."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.decode_forwards import Capture, DecodeForwards, Run, Share
from oaiserve.engine.model.gpu.graphs import DecodeGraphs
from oaiserve.engine.model.gpu.prompt_graphs import PromptGraphs
from oaiserve.engine.model.parallel.capture import MembersCapture
from oaiserve.engine.model.parallel.messages import Capture as Asked
from oaiserve.engine.model.parallel.messages import What
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.gpu.checks.graphs import prompt_problem, replay_problem
from oaiserve.engine.start.gpu.checks.usable import tried
from oaiserve.engine.start.started import GPU_STEP_TOKENS
from oaiserve.errors import StartupError
from oaiserve.facts.times import monotonic_ns

log = logging.getLogger(__name__)

T = TypeVar("T")
Problem = Callable[[T], str | None]

# These estimate the memory that graphs take. All graphs share one pool, whose size follows from the largest graph.
LAYER_BYTES = 64 << 10  # what the driver keeps for the launches of one layer, in each forward
POOL_BYTES = 96 << 20  # hidden states of the largest graph, cuBLAS's workspace, and fragmentation
WIDE_TENSORS = 4  # tensors of a layer that are there at once, each as wide as the widest
DRAW_BYTES = 12  # for each logit: its weight, and a candidate's weight and id for top_k and top_p


def ladder(most: int) -> list[int]:
    """Return the numbers of rows to capture, ascending, so that each number up to `most` has a size not much larger.

    A row of padding reads no keys, and up to some hundred rows a matrix product takes as long as reading its weights.
    So a few rows of padding cost hardly any time, while each further size adds some 50 ms to the start.
    """
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 64)]
    return [size for size in sizes if size < most] + [most]


def token_ladder(most: int) -> list[int]:
    """Return the numbers of prompt tokens to capture, ascending, up to the most that a step has.

    A token of padding costs what any other does, except for attention, so larger sizes are closer to each other.
    """
    sizes = [16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
    most = min(most, sizes[-1])
    return [size for size in sizes if size < most] + [most]


def graph_memory_bytes(
    loaded: LoadedModel, *, max_running: int, max_step_tokens: int, max_model_len: int, block_size: int
) -> int:
    """Return an estimate of the device memory that `capture_decodes` and `capture_prompts` will take in all."""
    sizes, token_sizes = ladder(max_running), token_ladder(max_step_tokens)
    logit_bytes = 2 * loaded.dtype.itemsize + DRAW_BYTES  # the model's output, and the copy that is kept
    table_bytes = -(-max_model_len // block_size) * 8
    row_bytes = loaded.vocab_size * logit_bytes + table_bytes
    launch_bytes = (len(sizes) + len(token_sizes)) * len(loaded.kv_shapes) * LAYER_BYTES
    linears = [module for module in loaded.model.modules() if isinstance(module, torch.nn.Linear)]
    weights = [*loaded.model.parameters(), *(module.weight for module in linears)]  # those of packed ones, too
    widest = max(max(p.shape) for p in weights if p.dim() > 1 and loaded.vocab_size not in p.shape)
    prompt_bytes = token_sizes[-1] * widest * loaded.dtype.itemsize * WIDE_TENSORS
    return max_running * row_bytes + launch_bytes + prompt_bytes + POOL_BYTES


@dataclass(frozen=True, slots=True)
class Members:
    """The server's side of graphs for all members of a tensor-parallel model. A whole model is one member."""

    part: Executor  # the server's
    capture: Capture  # captures at all members at the same time
    make: Callable[[Callable[[], Any]], Any]  # calls what captures several forwards
    share: Share | None = None
    begin: Callable[[What, list[int]], object] = lambda what, sizes: None  # lets the others capture, too
    # Replays the server's part for a size, and lets the others replay theirs.
    replay: Callable[[What, int, Run], object] = lambda what, size, replay: replay()


class Graphs(NamedTuple):
    """Graphs that are replayed; None: those steps are launched operation by operation."""

    decodes: DecodeGraphs | None = None
    prompts: PromptGraphs | None = None


def capture_graphs(
    executor: Executor,
    loaded: LoadedModel,
    options: EngineOptions,
    tables: BlockTables,
    capture: Capture,
    *,
    num_blocks: int,
    max_model_len: int,
    members: Members | None = None,
) -> Graphs:
    """Capture the decodes and the prompts of the executor, and write into the first blocks of its cache."""
    sizes = {"num_blocks": num_blocks, "block_size": options.block_size}
    decodes = capture_decodes(
        executor,
        loaded,
        tables,
        capture,
        max_running=options.max_running,
        max_model_len=max_model_len,
        members=members,
        **sizes,
    )
    if options.attention == "varlen":  # which looks at the lengths of prompts on the host
        return Graphs(decodes)
    step_tokens = options.step_tokens(GPU_STEP_TOKENS)
    prompts = capture_prompts(executor, loaded, tables, capture, max_step_tokens=step_tokens, members=members, **sizes)
    return Graphs(decodes, prompts)


def capture_decodes(
    executor: Executor,
    loaded: LoadedModel,
    tables: BlockTables,
    capture: Capture,
    *,
    max_running: int,
    max_model_len: int,
    num_blocks: int,
    block_size: int,
    members: Members | None = None,
) -> DecodeGraphs | None:
    """Capture the decode steps of the executor, and write into the first blocks of its cache.

    If the model cannot be captured, or the graphs compute something else, log the reason and return None.
    """
    from oaiserve.engine.model.sampling import triton_sampling

    sizes, of_all = ladder(max_running), members or _alone(executor, capture)

    def forwards() -> DecodeForwards:
        return DecodeForwards(
            of_all.part.forward,
            of_all.capture,
            loaded,
            tables,
            sizes=sizes,
            max_model_len=max_model_len,
            share=of_all.share,
        )

    def make() -> DecodeGraphs:
        of_all.begin("decodes", sizes)
        replay = partial(of_all.replay, "decodes")
        return DecodeGraphs(of_all.make(forwards), triton_sampling, capture, block_size=block_size, replay=replay)

    def problem(graphs: DecodeGraphs) -> str | None:
        return replay_problem(graphs, executor, loaded, sizes, num_blocks=num_blocks, block_size=block_size)

    found = _ending_the_start(problem, members)
    return _captured("decodes", f"up to {max_running} sequences", sizes, loaded.device, make, found)


def capture_prompts(
    executor: Executor,
    loaded: LoadedModel,
    tables: BlockTables,
    capture: Capture,
    *,
    max_step_tokens: int,
    num_blocks: int,
    block_size: int,
    members: Members | None = None,
) -> PromptGraphs | None:
    """Capture the forward of prompts, in the same way."""
    sizes, of_all = token_ladder(max_step_tokens), members or _alone(executor, capture)

    def graphs() -> PromptGraphs:
        return PromptGraphs(
            of_all.part.forward,
            of_all.capture,
            loaded,
            tables,
            sizes=sizes,
            block_size=block_size,
            share=of_all.share,
            replay=partial(of_all.replay, "prompts"),
        )

    def make() -> PromptGraphs:
        of_all.begin("prompts", sizes)
        made: PromptGraphs = of_all.make(graphs)
        return made

    def problem(graphs: PromptGraphs) -> str | None:
        return prompt_problem(graphs, executor, loaded, tables, sizes, num_blocks=num_blocks, block_size=block_size)

    found = _ending_the_start(problem, members)
    return _captured("prompts", f"up to {sizes[-1]} tokens", sizes, loaded.device, make, found)


def _alone(executor: Executor, capture: Capture) -> Members:
    return Members(executor, capture, lambda make: make())


def capture_part(
    asked: Asked,
    executor: Executor,
    loaded: LoadedModel,
    tables: BlockTables,
    capture: MembersCapture,
    share: Share,
    *,
    max_model_len: int,
    block_size: int,
) -> DecodeForwards | PromptGraphs | None:
    """Capture what the server has asked for of a worker's part of the forward. The server compares what it computes."""
    what, sizes = asked
    forward = executor.forward

    def make() -> DecodeForwards | PromptGraphs:
        if what == "prompts":
            return PromptGraphs(forward, capture, loaded, tables, sizes=sizes, block_size=block_size, share=share)
        return DecodeForwards(forward, capture, loaded, tables, sizes=sizes, max_model_len=max_model_len, share=share)

    def make_at_all() -> DecodeForwards | PromptGraphs:
        return capture.make(make)

    return _captured(what, f"up to {sizes[-1]} rows", sizes, loaded.device, make_at_all, lambda _: None)


def _ending_the_start(problem: Problem[T], members: Members | None) -> Problem[T]:
    """Return `problem`, whose errors end the start if there are other members, which may wait for this one then."""

    def found(graphs: T) -> str | None:
        try:
            return problem(graphs)
        except torch.OutOfMemoryError:  # before anything has begun, see `ParallelExecutor`
            raise
        except Exception as error:
            raise StartupError(
                f"A part of the model has failed while CUDA graphs were compared ({error}). "
                "--no-cuda-graph starts without these."
            ) from error

    return problem if members is None else found


def _captured(
    what: str,
    for_what: str,
    sizes: list[int],
    device: torch.device,
    make: Callable[[], T],
    problem: Problem[T],
) -> T | None:
    """Capture graphs; None if that fails, or if `problem` finds one."""
    began_ns = monotonic_ns()
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(device)

    def make_or_say_why() -> T:
        try:
            return make()
        except RuntimeError as error:
            # After a capture has failed, ending it fails too, with an error that does not have the reason.
            raise error.__context__ or error from None

    instead = "their operations are launched one by one, which is slower (--no-cuda-graph does not try)"
    made = tried(f"CUDA graphs of {what}", instead, make_or_say_why, problem)
    if made is None:
        torch.cuda.empty_cache()
        return None
    left_bytes, _ = torch.cuda.mem_get_info(device)
    log.info(
        "CUDA graphs of %s, for %s: %d sizes captured in %.1f s, %.2f GiB",
        what,
        for_what,
        len(sizes),
        (monotonic_ns() - began_ns) / 1e9,
        (free_bytes - left_bytes) / 2**30,
    )
    return made
