"""Starts models on a CPU as on a GPU, with doubles of its kernels and graphs that compute the same in plain torch.

A run on a CPU compares these with the reference, so that each comparison of the check can fail there, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.model.memory import longest_request
from oaiserve.engine.start.described import Described
from oaiserve.engine.start.started import GPU_STEP_TOKENS, Started
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.plugins.cuda.start.on_gpu import graphs_of
from tests.models.decoders import byte_tokenizer
from tests.plugins.cuda.executor.step_runs import Model, run_again
from tests.plugins.cuda.start.ready import ready_model
from tools.gpu.sections import Target
from tools.gpu.workload import engine_of, running_engine


@contextmanager
def running(model: Described, target: Target, **settings: Any) -> Iterator[Engine]:
    """Run an engine in the block, with kernels and graphs unless the settings rule them out: on a CPU, their
    doubles."""
    if target.device.type != "cpu" or not settings.get("compile", True):
        with running_engine(model, target, **settings) as engine:
            yield engine
        return
    options = EngineOptions(**settings)
    tokenizer = Tokenizer(byte_tokenizer(model.spec.vocab_size))
    with engine_of(started(model, options), tokenizer, options, target.runtime) as engine:
        yield engine


def started(model: Described, options: EngineOptions) -> Started:
    own = ready_model(Model(model.spec, model.decoder), options=options)
    runner = own.new_runner(graphs=graphs_of(own, run_again) if options.cuda_graph else None)
    runner.is_asynchronous = options.overlap
    longest = longest_request(own.spec, own.num_blocks * options.block_size)
    num_states = own.num_states if own.states is not None else 0
    return Started(
        own.spec,
        {},
        runner,
        own.num_blocks,
        longest,
        GPU_STEP_TOKENS,
        num_states=num_states,
        counts_tokens=runner.counts_tokens,
    )
