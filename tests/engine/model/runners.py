"""Makes runners of small models, in which a test can replace some parts."""

from __future__ import annotations

from typing import Any

from oaiserve.engine.model.attention import Backend
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.model.states import States


def eager_runner(
    loaded: LoadedModel,
    *,
    num_blocks: int,
    block_size: int,
    backend: Backend = ReferenceAttention,
    executor: type[EagerExecutor] = EagerExecutor,
    num_states: int = 8,
    **arguments: Any,
) -> ModelRunner:
    """Return a runner on an eager executor; `arguments` are those of ModelRunner."""
    eager = executor.with_cache(loaded, num_blocks=num_blocks, block_size=block_size, backend=backend)
    states = States(loaded.state_shapes, num_states, loaded.device) if loaded.state_shapes else None
    return ModelRunner(eager, loaded.device, block_size, states=states, **arguments)
