"""Probes a GPU with some layers of a model: starts them as the server does, and reports which features are usable.

    python -m oaiserve.engine.start.gpu.probe

`child` runs it, in a process that may hang or crash. It uses the first layers of the model, enough for one of each
kind.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from oaiserve.config import Bytes
from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.description import Decoder, NotKnown
from oaiserve.engine.model.device import select_device
from oaiserve.engine.start.described import Described, describe_model
from oaiserve.engine.start.gpu.child import KILL_LIMIT_SECONDS, Order
from oaiserve.engine.start.gpu.trials import Feature, TrialFailed, Trials
from oaiserve.engine.start.ways.gpu import place, start_on_gpu
from oaiserve.errors import StartupError
from oaiserve.files.source import find_model

LEAST_LAYERS = 2  # One kernel computes a layer's sums and the norm of the next layer.
CACHE_MEMORY = Bytes("1GiB")
_OF_PLACE = ("module", "first_row", "cache_of")  # fields that differ between layers of a kind


def kind_of(part: Any) -> Any:
    """Return the features that all parts of this kind share: everything except for numbers and names."""
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


def kinds_of(decoder: Decoder) -> dict[Any, int]:
    """Return the first layer of each kind."""
    found: dict[Any, int] = {}
    for number, layer in enumerate(decoder.layers):
        found.setdefault(kind_of(layer), number)
    return found


def first_layers(found: Described) -> Described:
    """Return a model with its first layers, as many as are needed for all kinds."""
    decoder = found.decoder
    if decoder.layer_inputs is not None:  # These have numbers for each layer.
        return found
    number = max(LEAST_LAYERS, 1 + max(kinds_of(decoder).values()))
    spec = replace(
        found.spec,
        kv_shapes={layer: shape for layer, shape in found.spec.kv_shapes.items() if layer < number},
        state_shapes={layer: shape for layer, shape in found.spec.state_shapes.items() if layer < number},
    )
    return found._replace(spec=spec, decoder=replace(decoder, layers=decoder.layers[:number]))


def probe(order: Order, trials: Trials) -> None:
    """Start the first layers of a model, and run the largest step and the whole warm-up.

    Raises NotKnown and StartupError for a model that cannot be started, and TrialFailed.
    """
    device = select_device(order.device)
    options = replace(order.options, kv_blocks=None, kv_cache_memory=CACHE_MEMORY)
    found = first_layers(describe_model(find_model(order.model), options, device=device))
    started = start_on_gpu(place(found, options, order.model), options, trials)
    with trials.blamed_on("sampling"):
        started.warm_up()


def main() -> None:
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Other output goes to the log.
    order: Order = pickle.load(sys.stdin.buffer)
    report: Callable[[Feature | None], None] = partial(_report, lines, order)
    report(None)
    trials = Trials(order.verdict, report)
    try:
        probe(order, trials)
    except (NotKnown, StartupError) as error:
        print(error, file=sys.stderr)
        print(json.dumps({"declined": True}), file=lines)
        return
    except TrialFailed as error:
        print(json.dumps({"failed": str(error)}), file=lines)
        return
    verdict = trials.verdict
    print(json.dumps({"off": dict(verdict.off), "problems": sorted(verdict.problems)}), file=lines)


def _report(lines: Any, order: Order, feature: Feature | None) -> None:
    # The server ends a probe earlier, unless the server has ended.
    faulthandler.dump_traceback_later(order.limit_of(feature) + KILL_LIMIT_SECONDS, exit=True)
    print(json.dumps({"trying": feature}), file=lines)


if __name__ == "__main__":
    main()
