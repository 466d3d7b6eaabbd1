"""Decides when the server starts which faster ways to compute are used on a GPU.

Each of them is optional: it computes what a plain way in torch does, too. So it is tried on the device, and compared
with the plain way. One that fails, or computes something else, is switched off, and the log says so; the start goes on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from oaiserve.engine.model.adapted_modules import AddTo, adaptable, plain
from oaiserve.engine.model.adapters import Adapter, AdapterPart
from oaiserve.engine.model.attention import Backend, LayerCache, Scoring, StepAttention
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.cpu.describe import describe
from oaiserve.engine.model.cpu.description import Decoder, NotKnown
from oaiserve.engine.model.cpu.start import transformers_logits
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.gpu.device_experts import (
    Compute,
    PackedExperts,
    compute_by,
    compute_few_rows_by,
    packed_experts,
    plain_experts,
    plain_experts_of,
)
from oaiserve.engine.model.gpu.device_matrices import (
    Multiply,
    PackedLinear,
    PackedMatrix,
    expanded_product,
    multiply_by,
    packed_linears,
)
from oaiserve.engine.model.gpu.fused_layers import FusedExecutor, FusedLayers
from oaiserve.engine.model.gpu.fused_projections import fuse_projections, separate_projections
from oaiserve.engine.model.layer_operations import LayerOperations
from oaiserve.engine.model.parallel.sums import ElsewhereError, OneShot, Sums
from oaiserve.engine.model.rehearsal import difference, prompt, prompts_and_decodes, tolerance
from oaiserve.engine.model.sampling import plain_sampling
from oaiserve.engine.model.sampling.draw_rows import GREEDY, DrawRow, SampleIds
from oaiserve.engine.model.sampling.logit_edits import ApplyMasks, apply_masks_in_torch
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.model.states import PartOfStep, States
from oaiserve.engine.step import Chunk, Step
from oaiserve.errors import StartupError

log = logging.getLogger(__name__)

# The names under which /metrics says what is on.
ATTENTION, SAMPLING, PROJECTIONS, COMPILED = "attention", "sampling", "fused_projections", "compiled_layers"
FUSED, DECODE_GRAPHS, PROMPT_GRAPHS = "fused_layers", "decode_graphs", "prompt_graphs"
PACKED, EXPERTS, ADAPTERS = "packed_weights", "packed_experts", "adapters"
ONE_SHOT, FP8_PRODUCTS = "one_shot_sums", "fp8_products"
FEATURES = (
    ATTENTION,
    SAMPLING,
    PACKED,
    FP8_PRODUCTS,
    EXPERTS,
    ONE_SHOT,
    PROJECTIONS,
    FUSED,
    COMPILED,
    ADAPTERS,
    DECODE_GRAPHS,
    PROMPT_GRAPHS,
)


class ScaledProducts(Protocol):
    """Products of 8 bits, as `triton_scaled` has them."""

    LEAST_ROWS: int

    def ways(self, matrix: PackedMatrix) -> list[Multiply]: ...

    def scaled_or(self, scaled: Multiply, multiply: Multiply) -> Multiply: ...


class RoundedExperts(Protocol):
    """Experts whose inputs are rounded, as `triton_experts` has them."""

    def compute(
        self,
        experts: PackedExperts,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        *,
        is_rounded: bool = False,
    ) -> torch.Tensor: ...

    def compute_rounding_many(
        self, experts: PackedExperts, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor: ...


FUSED_NAME = "Fused layers"
FUSED_INSTEAD = "they are compiled from transformers' code, or run operation by operation"
FUSED_LENGTHS = (9, 40, 17, 600)  # of sequences whose logits are compared; the last is read by several programs
LENGTHS = (3, 20, 600, 75)  # of sequences whose attention is compared; one is read by several programs
ADAPTED_LENGTHS = [3, 20, 9]
PROMPT_TOKENS = 20  # of the prompt whose logits are compared
PRODUCT_ROWS = (1, 20, 40, 200)  # of x, each with tiles of its own
SUMMED_ROWS = (1, 8, 33)  # that members add up, one after the other
ROUNDED_TOLERANCE = 0.05  # of a product whose inputs are rounded to floats of 8 bits
ROUNDED_EXPERTS_TOLERANCE = 0.08  # of what follows from two such products
ROUNDED_EXPERT_ROWS = 300
CHOSEN_EXPERTS = 4  # of each row, in this comparison
FEW_EXPERT_ROWS = 64  # of each expert, on average: with more, its products take longer than reading it
ADAPTER_RANKS = (8, 24)
CHUNK_TOKENS = 5  # of the longest, in a step in which the others decode
# What attention may differ by in one layer, relative to its norm: it rounds its weights and its results.
ATTENTION_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.03}
_DRAWS = [
    GREEDY,
    DrawRow(1.0, 0.0, 0.0, 1.0, 11),
    DrawRow(0.7, 0.05, 0.0, 1.0, 12),
    DrawRow(0.7, 0.0, 40.0, 0.9, 13),
    DrawRow(3.0, 0.0, 0.0, 0.9, 15),  # so flat that several programs search
    DrawRow(1.0, 0.0, 0.0, 1.0, 14),  # from logits that are not finite
]


def is_usable(name: str, instead: str, problem: Callable[[], str | None], sums: Sums | None = None) -> bool:
    """Return whether `problem` finds none. What it finds, or raises, is logged as the reason why `name` is off.

    With the `sums` of a model that is split, each member looks for problems in what it computes alone, so that none
    waits for another one that has failed; then they agree.
    """
    try:
        with nullcontext() if sums is None else sums.left_out():
            found = problem()
    except StartupError:  # what was asked for is not possible: this is for the user
        raise
    except ElsewhereError as error:  # where the problem is, there is a warning
        log.info("%s: off, and %s: %s", name, instead, error)
        return False
    except Exception as error:  # a compiler or a driver can raise anything, and the server runs without it
        found = reason(error)
    if sums is not None and not sums.all_agree(found is None) and found is None:
        log.info("%s: off, and %s: %s", name, instead, ElsewhereError())
        return False
    if found is None:
        return True
    log.warning("%s: off, and %s: %s", name, instead, found)
    return False


def reason(error: BaseException) -> str:
    """Return an error as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


@torch.inference_mode()
def attention_problem(loaded: LoadedModel, backend: Backend, block_size: int) -> str | None:
    """Return how attention differs from the reference in the model's layers, in prompts, chunks and decodes, if it
    does."""
    if not loaded.kv_shapes:
        return None
    *lengths, longest = (max(3, min(length, loaded.max_model_len)) for length in LENGTHS)
    prompts, decodes = prompts_and_decodes([*lengths, longest], loaded.vocab_size, block_size)
    # The longest goes on with some tokens while the others decode.
    sequence, start = decodes.chunks.pop().sequence, longest - min(CHUNK_TOKENS, longest - 1)
    prompts.chunks[-1] = Chunk(sequence, 0, start, max_draws=0)
    decodes.chunks.append(Chunk(sequence, start, longest - start))
    compared = _Compared(backend)
    num_blocks = sequence.blocks[-1] + 1
    executor = EagerExecutor.with_cache(loaded, num_blocks=num_blocks, block_size=block_size, backend=compared.of_step)
    states = States(loaded.state_shapes, len(prompts.chunks), loaded.device) if loaded.state_shapes else None
    for step in (prompts, decodes):
        order = sorted(enumerate(step.chunks), key=lambda numbered: numbered[1].num_tokens > 1)
        batch = build_batch(Step([chunk for _, chunk in order]), block_size, loaded.device)
        if states is not None:
            batch.states = states.of_step([PartOfStep(i, chunk.start, chunk.num_tokens) for i, chunk in order])
        executor.forward(batch)
    limit = ATTENTION_TOLERANCE[loaded.dtype]
    if compared.largest <= limit:
        return None
    return f"attention would differ by {compared.largest:.1%} in a layer (allowed: {limit:.1%})"


@torch.inference_mode()
def fuse_checked(loaded: LoadedModel, block_size: int) -> bool:
    """Fuse the projections of a model, unless its logits would differ. Return whether any are."""
    step = prompt(min(PROMPT_TOKENS, loaded.max_model_len), loaded.vocab_size, block_size)
    num_blocks = len(step.chunks[0].sequence.blocks)
    executor = EagerExecutor.with_cache(loaded, num_blocks=num_blocks, block_size=block_size)
    number = 0

    def problem() -> str | None:
        nonlocal number
        want = executor.forward(build_batch(step, block_size, loaded.device)).clone()
        number = fuse_projections(loaded.model)
        found = difference(executor.forward(build_batch(step, block_size, loaded.device)), want)
        limit = tolerance(loaded.dtype)
        return None if found <= limit else f"the outputs would differ by {found:.1%} (allowed: {limit:.1%})"

    if is_usable("Fused projections", "each of them is a product of its own", problem, loaded.sums):
        return number > 0
    separate_projections(loaded.model)
    return False


@torch.inference_mode()
def multiply_checked(loaded: LoadedModel, find: Callable[[], Multiply]) -> bool:
    """Let a model multiply with its packed matrices in the way that `find` returns, if products are those in plain
    torch. Return whether it does."""
    layers = packed_linears(loaded.model)
    if not layers:  # nor has another member of a model that is split: parts are alike
        return False
    found: list[Multiply] = []

    def problem() -> str | None:
        found.append(find())
        return packed_problem(layers, found[0], loaded.dtype)

    instead = "each one expands its matrix, which is much slower"
    if not is_usable("Products with packed weights", instead, problem, loaded.sums):
        return False
    multiply_by(loaded.model, found[0])
    return True


@torch.inference_mode()
def scale_checked(loaded: LoadedModel, find: Callable[[], ScaledProducts]) -> bool:
    """Let prompts be multiplied with matrices in floats of 8 bits by the products of 8 bits that `find` returns, if
    these differ by the rounding of their inputs alone. Return whether they are."""
    layers = [one for one in packed_linears(loaded.model) if one.matrix.kind == "float8"]
    if not layers:
        return False
    kinds = {_scaled_kind(one): one for one in layers}
    chosen: dict[tuple[object, ...], Multiply] = {}

    def problem() -> str | None:
        scaled = find()
        for kind, layer in kinds.items():
            problems: list[str] = []
            for way in scaled.ways(layer.matrix):
                found = _scaled_problem(layer, way, scaled.LEAST_ROWS, loaded.dtype)
                if found is None:
                    chosen[kind] = scaled.scaled_or(way, layer.multiply)
                    break
                problems.append(found)
            else:
                return problems[-1]
            for other in problems:
                log.info("Products in 8 bits with matrices of %d x %d: not torch's, %s", *layer.matrix.shape, other)
        return None

    if not is_usable("Products in 8 bits", "prompts are multiplied in 16, at half the rate", problem, loaded.sums):
        return False
    for layer in layers:
        layer.multiply = chosen[_scaled_kind(layer)]
    return True


def _scaled_kind(layer: PackedLinear) -> tuple[object, ...]:
    return layer.matrix.shape, len(layer.matrix.scales), layer.bias is None


def _scaled_problem(layer: PackedLinear, way: Multiply, num_rows: int, dtype: torch.dtype) -> str | None:
    """Return why a way to multiply in 8 bits is not one for such a layer, if it is not."""
    matrix = layer.matrix
    x = torch.randn(num_rows, matrix.shape[1], generator=torch.Generator().manual_seed(0))
    x = x.to(matrix.codes.device, dtype)
    try:
        differs = difference(way(x, matrix, layer.bias), expanded_product(x, matrix, layer.bias))
    except Exception as error:  # as in `is_usable`; there may be another way
        return reason(error)
    if differs <= ROUNDED_TOLERANCE:
        return None
    return f"products would differ by {differs:.1%} (allowed: {ROUNDED_TOLERANCE:.1%})"


def packed_problem(layers: list[PackedLinear], multiply: Multiply, dtype: torch.dtype) -> str | None:
    """Return how products differ from those in plain torch, for one layer of each kind, if they do."""
    kinds = {(one.matrix.kind, one.matrix.shape, one.matrix.zeros is None, one.bias is None): one for one in layers}
    limit = ATTENTION_TOLERANCE[dtype]
    for (kind, shape, *_), layer in kinds.items():
        for num_rows in PRODUCT_ROWS:
            generator = torch.Generator().manual_seed(num_rows)
            x = torch.randn(num_rows, shape[1], generator=generator).to(layer.matrix.codes.device, dtype)
            want = expanded_product(x, layer.matrix, layer.bias)
            found = difference(multiply(x, layer.matrix, layer.bias), want)
            if not found <= limit:
                return f"{num_rows} rows times a matrix of {kind} would differ by {found:.1%} (allowed: {limit:.1%})"
    return None


@torch.inference_mode()
def compute_experts_checked(loaded: LoadedModel, find: Callable[[], Compute]) -> bool:
    """Let packed experts compute in the way that `find` returns, if what they give is what plain torch does. Return
    whether they do."""
    layers = packed_experts(loaded.model)
    if not layers:
        return False
    found: list[Compute] = []

    def problem() -> str | None:
        found.append(find())
        return experts_problem(layers, found[0], loaded.dtype)

    instead = "each one expands its matrices, which is much slower"
    if not is_usable("Packed experts by kernels", instead, problem, loaded.sums):
        return False
    compute_by(loaded.model, found[0])
    return True


@torch.inference_mode()
def compute_plain_experts_checked(loaded: LoadedModel, find: Callable[[], Compute]) -> bool:
    """Let experts in 16 bits that have few rows compute in the way that `find` returns, if what they give is what plain
    torch does. Return whether they do. Many rows stay with transformers' grouped products."""
    made = [(module, plain_experts_of(module)) for module in loaded.model.modules()]
    layers = [(module, experts) for module, experts in made if experts is not None]
    if not layers:
        return False
    found: list[Compute] = []

    def problem() -> str | None:
        found.append(find())
        return experts_problem([experts for _, experts in layers], found[0], loaded.dtype)

    name, instead = "Experts in 16 bits by kernels", "they are transformers' grouped products"
    if not is_usable(name, instead, problem, loaded.sums):
        return False
    for module, experts in layers:
        experts.compute = found[0]
        compute_few_rows_by(module, experts, None if loaded.sums is None else loaded.sums.add_up, FEW_EXPERT_ROWS)
    return True


@torch.inference_mode()
def round_experts_checked(loaded: LoadedModel, find: Callable[[], RoundedExperts]) -> bool:
    """Let packed experts in floats of 8 bits that have many rows be multiplied by the products of 8 bits, if these
    differ by the rounding of their inputs alone. Return whether they are. This is for experts that kernels compute."""
    layers = [one for one in packed_experts(loaded.model) if one.gate_up.kind == one.down.kind == "float8"]
    if not layers:
        return False
    found: list[RoundedExperts] = []

    def problem() -> str | None:
        found.append(find())
        for experts in {(one.gate_up.shape, one.num_experts): one for one in layers}.values():
            given = _expert_inputs(experts, ROUNDED_EXPERT_ROWS, loaded.dtype)
            differs = difference(found[0].compute(experts, *given, is_rounded=True), plain_experts(experts, *given))
            if not differs <= ROUNDED_EXPERTS_TOLERANCE:
                return f"outputs would differ by {differs:.1%} (allowed: {ROUNDED_EXPERTS_TOLERANCE:.1%})"
        return None

    if not is_usable("Experts in 8 bits", "prompts are multiplied in 16, at half the rate", problem, loaded.sums):
        return False
    for experts in layers:
        experts.compute = found[0].compute_rounding_many
    return True


def _expert_inputs(
    experts: PackedExperts, num_rows: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, the experts of each row, and their weights."""
    generator = torch.Generator().manual_seed(num_rows)
    device, number = experts.gate_up.codes.device, experts.num_experts
    x = torch.randn(num_rows, experts.gate_up.shape[1], generator=generator).to(device, dtype)
    chosen = torch.rand(num_rows, number, generator=generator).topk(min(CHOSEN_EXPERTS, number)).indices.to(device)
    return x, chosen, torch.rand(*chosen.shape, generator=generator).to(device, dtype)


def experts_problem(layers: list[PackedExperts], compute: Compute, dtype: torch.dtype) -> str | None:
    """Return how outputs of experts differ from those in plain torch, for one layer of each kind, if they do."""
    kinds = {(one.gate_up.kind, one.gate_up.shape, one.num_experts): one for one in layers}
    limit = ATTENTION_TOLERANCE[dtype]
    for (kind, *_), experts in kinds.items():
        for num_rows in PRODUCT_ROWS:
            given = _expert_inputs(experts, num_rows, dtype)
            found = difference(compute(experts, *given), plain_experts(experts, *given))
            if not found <= limit:
                return f"{num_rows} rows and experts in {kind} would differ by {found:.1%} (allowed: {limit:.1%})"
    return None


@torch.inference_mode()
def one_shot_checked(
    loaded: LoadedModel,
    missing: Callable[[torch.device, int], str | None],
    make: Callable[[torch.device, int], OneShot],
) -> bool:
    """Let the members of a model that is split add up small messages in one kernel, if they get the plain sums. Return
    whether they do.

    `missing` says what that lacks here, without the others. All members `make` it together.
    """
    sums = loaded.sums
    if sums is None:
        return False
    name, instead = "Sums in one kernel", "NCCL makes them, which takes longer for small messages"
    if not is_usable(name, instead, lambda: missing(loaded.device, sums.size), sums):
        return False
    made: list[OneShot] = []

    def prepare() -> None:
        made.append(make(loaded.device, sums.size))

    def problem() -> str | None:
        weights = loaded.model.get_input_embeddings().weight
        assert isinstance(weights, torch.Tensor)
        differences = [0.0]
        for num_rows in SUMMED_ROWS:  # all of them, also if one is wrong: the others add up theirs
            generator = torch.Generator().manual_seed(100 * num_rows + sums.rank)
            own = torch.randn(num_rows, weights.shape[1], generator=generator).to(loaded.device, loaded.dtype)
            want = sums.by_library(own.clone())
            if made[0].fits(own):
                # Twice: the memory that members map is used again.
                differences += [difference(made[0](own), want) for _ in range(2)]
        limit = tolerance(loaded.dtype)
        wrong = [one for one in differences if not one <= limit]
        return f"sums would differ by {wrong[0]:.1%} (allowed: {limit:.1%})" if wrong else None

    if not is_usable(name, instead, prepare, sums) or not is_usable(name, instead, problem, sums):
        return False
    sums.one_shot = made[0]
    return True


@torch.inference_mode()
def adapters_problem(loaded: LoadedModel, add: Callable[[Batch], AddTo], block_size: int) -> str | None:
    """Return how products with adapters differ from those in plain torch, for one layer of each shape, if they do.

    In a step, one sequence has an adapter, one another of a larger rank, and one none.
    """
    prompts, _ = prompts_and_decodes(ADAPTED_LENGTHS, loaded.vocab_size, block_size)
    shapes = {shape: name for name, shape in adaptable(loaded.model).items()}
    generator = torch.Generator().manual_seed(0)

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(loaded.device, loaded.dtype) / math.sqrt(sizes[-1])

    adapters = [
        Adapter(str(rank), {n: AdapterPart(numbers(rank, k), numbers(m, rank), 0.5) for (m, k), n in shapes.items()})
        for rank in ADAPTER_RANKS
    ]
    batch = build_batch(prompts, block_size, loaded.device)
    batch.adapters = [adapters[0], None, adapters[1]]
    limit = ATTENTION_TOLERANCE[loaded.dtype]
    ways = add(batch), plain(batch)
    for (rows, columns), name in shapes.items():
        x = numbers(len(batch.input_ids), columns) * math.sqrt(columns)
        outs = [x.new_zeros(len(x), rows) for _ in ways]
        for way, out in zip(ways, outs, strict=True):
            way(name, x, out)
        found = difference(*outs)
        if not found <= limit:
            return f"products of '{name}' would differ by {found:.1%} (allowed: {limit:.1%})"
    return None


@torch.inference_mode()
def described(loaded: LoadedModel, block_size: int) -> Decoder:
    """Describe a model by its operations and weights, as the native step of a CPU does. Raises NotKnown."""
    with loaded.device:  # where what the description makes, such as rotary tables, is to be
        return describe(loaded, transformers_logits(loaded, block_size)[1])


@torch.inference_mode()
def fuse_layers(loaded: LoadedModel, block_size: int) -> FusedLayers | None:
    """Return the layers of a model as they run by its description, or None for a model that has none.

    What a description has beside the weights is in the device's memory from now on.
    """
    found: list[FusedLayers] = []

    def problem() -> str | None:
        try:
            found.append(FusedLayers(loaded, described(loaded, block_size), _operations()))
        except NotKnown as error:  # the reason is in the model: no user can do anything about it
            log.info("The model's layers run in transformers' code: %s", error)
        return None

    is_possible = is_usable(FUSED_NAME, FUSED_INSTEAD, problem, loaded.sums) and bool(found)
    if loaded.sums is not None:
        is_possible = loaded.sums.all_agree(is_possible)
    return found[0] if is_possible else None


@torch.inference_mode()
def fused_problem(
    fused: Executor, plain: Executor, loaded: LoadedModel, *, num_blocks: int, block_size: int
) -> str | None:
    """Return how logits of fused layers differ from those of transformers' code, in prompts and decodes, if they do.

    The last decode is at the model's last position, where rotary tables end.
    """
    lengths = [length for length in FUSED_LENGTHS if length <= loaded.max_model_len]
    while len(lengths) > 1 and sum(-(-length // block_size) for length in lengths) > num_blocks:
        lengths.pop()
    steps = prompts_and_decodes(lengths, loaded.vocab_size, block_size) if lengths else ()
    limit = tolerance(loaded.dtype)
    for step in steps:
        step = Step([chunk._replace(max_draws=1) for chunk in step.chunks])
        batches = [build_batch(step, block_size, loaded.device)]
        if step.chunks[0].num_tokens == 1:
            last = torch.full_like(batches[0].positions, loaded.max_model_len - 1)
            batches.append(replace(batches[0], positions=last))
        for batch in batches:
            want = plain.forward(batch).clone()
            found = difference(fused.forward(batch), want)
            if not found <= limit:
                return f"the outputs would differ by {found:.1%} (allowed: {limit:.1%})"
    return None


def fuse_layers_checked(
    layers: FusedLayers,
    eager: EagerExecutor,
    loaded: LoadedModel,
    backend: Backend,
    *,
    num_blocks: int,
    block_size: int,
) -> FusedExecutor | None:
    """Return the executor of fused layers, unless its logits would differ. Both write into the first blocks."""
    fused = FusedExecutor(layers, eager.caches, backend)

    def problem() -> str | None:
        return fused_problem(fused, eager, loaded, num_blocks=num_blocks, block_size=block_size)

    return fused if is_usable(FUSED_NAME, FUSED_INSTEAD, problem, loaded.sums) else None


def _operations() -> LayerOperations:
    """Return the operations of layers as kernels."""
    from oaiserve.engine.model.gpu import triton_layers

    return triton_layers


class _Compared:
    """Computes attention by the reference, and by another backend to compare."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.largest = 0.0  # difference; NaN stays

    def of_step(self, batch: Batch) -> StepAttention:
        reference, fast = ReferenceAttention(batch), self._backend(batch)

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, scoring: Scoring
        ) -> torch.Tensor:
            copies = cache.copy()
            got = fast(query, key, value, copies, scoring)
            want = reference(query, key, value, cache, scoring)
            found = [difference(got, want)]
            found += [
                float((copy.float() != kept.float()).float().mean()) for copy, kept in zip(copies, cache, strict=True)
            ]
            for one in found:
                self.largest = one if not one <= self.largest else self.largest
            return want

        return attend


@torch.inference_mode()
def sampling_problem(loaded: LoadedModel, sample_ids: SampleIds, apply_masks: ApplyMasks) -> str | None:
    """Return what is different from draws and masks in plain torch, if anything is."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(len(_DRAWS), loaded.vocab_size, generator=generator) * 3
    logits = numbers.to(loaded.device, loaded.dtype)
    logits[-1] = torch.inf
    for rows in (_DRAWS[:1], _DRAWS[:3], _DRAWS):  # each has kernels of its own
        some = logits[: len(rows)]
        got_ids, got_finite = sample_ids(some, rows)
        want_ids, want_finite = plain_sampling.sample_ids(some, rows)
        are_equal = (got_ids == want_ids) | ~want_finite.bool()
        if not bool((got_finite.bool() == want_finite.bool()).all()) or not bool(are_equal.all()):
            return f"of {len(rows)} draws, {int((~are_equal).sum())} would be others"
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (2, -(-loaded.vocab_size // 32)), dtype=np.uint32)
    masked, expected = (logits[:3].to(torch.float32, copy=True) for _ in range(2))
    apply_masks(masked, [0, 2], words)
    apply_masks_in_torch(expected, [0, 2], words)
    return None if torch.equal(masked, expected) else "masks of grammars would let other tokens come"
