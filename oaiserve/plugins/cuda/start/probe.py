"""Probes a GPU with some layers of a model: starts them as the server does, and compares them with plain torch.

    python -m oaiserve.plugins.cuda.start.probe

`child` runs it, in a process that may hang or crash. It uses the first layers of the model, enough for one of each
kind.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import msgspec
import torch
from msgspec.structs import replace as replaced
from torch import Tensor

from oaiserve.checkpoints.load_errors import named
from oaiserve.checkpoints.source import find_model
from oaiserve.config import Bytes, EngineOptions
from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.description import Experts, Layer, NotKnown
from oaiserve.engine.model.device import select_device
from oaiserve.engine.start.described import Described, describe_model
from oaiserve.errors import StartupError
from oaiserve.plugins.cuda.executor.cuda_capture import CudaCapture
from oaiserve.plugins.cuda.executor.executor import CudaWeights
from oaiserve.plugins.cuda.start.child import DECLINED, FOUND, KILL_LIMIT_SECONDS, LIMIT_SECONDS, Order
from oaiserve.plugins.cuda.start.comparison import difference_from_plain
from oaiserve.plugins.cuda.start.features import Probed, Verdict
from oaiserve.plugins.cuda.start.fitting import fitting
from oaiserve.plugins.cuda.start.on_gpu import Placed, captured, place, ready, warm_up
from oaiserve.plugins.cuda.start.trials import product_ways, reason, state_chunks
from oaiserve.runtime import THREADS

LEAST_LAYERS = 2  # at least two, because one kernel computes a layer's sums and the norm of the next layer
CACHE_MEMORY = Bytes("1GiB")
_OF_PLACE = ("module", "first_row", "cache_of")  # fields that differ between layers of a kind


def kind_of(part: Any) -> Any:
    """Return the properties that all parts of this kind share: everything except numbers and names."""
    if isinstance(part, Tensor):
        return tuple(part.shape), str(part.dtype)
    if isinstance(part, Blocks):
        return type(part).__name__, part.shape, part.kind, part.columns is None
    if isinstance(part, list):
        return len(part), tuple(dict.fromkeys(map(kind_of, part)))
    if is_dataclass(part):
        names = [field.name for field in fields(part) if field.name not in _OF_PLACE]
        return type(part).__name__, tuple(kind_of(getattr(part, name)) for name in names)
    return part


def with_fixed_choices(layer: Layer) -> Layer:
    """Return a layer that chooses the same experts for all tokens, so that rounding can't change a choice."""
    if not isinstance(layer.mlp, Experts):
        return layer
    router = layer.mlp.router
    bias = 2 * torch.arange(len(router.weight), dtype=torch.float32)  # Scores are between 0 and 1.
    return replace(layer, mlp=replace(layer.mlp, router=replace(router, bias=bias)))


def first_layers(model: Described) -> Described:
    """Return a model with only its first layers, as many as are needed for all kinds."""
    decoder = model.decoder
    kinds = [kind_of(layer) for layer in decoder.layers]
    number = max(LEAST_LAYERS, 1 + max(map(kinds.index, kinds)))
    if decoder.layer_inputs is not None:  # These have inputs for each layer.
        number = len(decoder.layers)
    layers = [with_fixed_choices(layer) for layer in decoder.layers[:number]]
    spec = replace(
        model.spec,
        kv_shapes={layer: shape for layer, shape in model.spec.kv_shapes.items() if layer < number},
        state_shapes={layer: shape for layer, shape in model.spec.state_shapes.items() if layer < number},
    )
    return model._replace(spec=spec, decoder=replace(decoder, layers=layers))


def first_difference(
    model: Described,
    options: EngineOptions,
    verdict: Verdict,
    report: Callable[[Probed], object] = lambda found: None,
) -> str | None:
    """Start the first layers of a model on its GPU, and run the largest step and the whole warm-up.

    Return the first difference from plain torch, if there is any. The features and ways of the start are reported
    before that. Features that the verdict turns off are not tried. Raises NotKnown and StartupError for a model that
    cannot be started.
    """
    options = replace(options, kv_blocks=None, kv_cache_memory=CACHE_MEMORY)
    few = first_layers(model)
    placed = place(few, options, few.spec.name)

    def compared(found: Probed) -> str | None:
        found = tried(found, placed, few.decoder.layers)
        report(found)
        own = ready(placed, options, found, is_probe=True)
        graphs = None if found.verdict["graphs"] else captured(own, CudaCapture(own.spec.device))
        problem = difference_from_plain(own, graphs)
        warm_up(own.new_runner(graphs=graphs))
        return problem

    return fitting(Probed(verdict), compared)[0]


def tried(found: Probed, model: Placed, layers: list[Layer]) -> Probed:
    """Choose the fastest ways of products, and try the features that use torch, unless they are already off."""
    began_ns = THREADS.clock_ns()
    weights = model.weights
    assert isinstance(weights, CudaWeights)
    verdict = dict(found.verdict)
    if not verdict["fp8_products"]:
        products = product_ways(weights)
        found = replaced(found, ways=products.ways, seconds=products.seconds)
        verdict |= products.verdict
    if not verdict["state_chunks"]:
        try:
            verdict["state_chunks"] = state_chunks(layers, weights.device)
        except Exception as error:
            verdict["state_chunks"] = reason(error)
    return replaced(found, verdict=verdict, trial_seconds=(THREADS.clock_ns() - began_ns) / 1e9)


def _write(found: Probed) -> None:
    print(f"{FOUND}{msgspec.json.encode(found).decode()}", file=sys.stderr, flush=True)


def main() -> None:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # All output goes to the log.
    # The server kills a slow probe earlier, unless the server itself has ended.
    faulthandler.dump_traceback_later(LIMIT_SECONDS + KILL_LIMIT_SECONDS, exit=True)
    order: Order = pickle.load(sys.stdin.buffer)
    code = 1
    try:
        model = describe_model(find_model(order.model), order.options, device=select_device(order.device))
        problem = first_difference(model, order.options, order.verdict, _write)
        code = 0 if problem is None else 1
    except (NotKnown, StartupError) as error:
        problem = str(error)
        code = DECLINED
    except Exception as error:
        problem = named(error)
    if problem:
        print(problem, file=sys.stderr, flush=True)
    os._exit(code)  # The normal exit of a process whose device has failed would print more lines, or crash.


if __name__ == "__main__":
    main()
