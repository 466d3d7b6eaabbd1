"""Starts a model that an earlier start has checked: the native step alone, without transformers."""

from __future__ import annotations

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model.adapter_weights import refuse_unless_they_fit
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.cpu.reserved import ReservedMemory
from oaiserve.engine.model.memory import cpu_sizes, longest_request
from oaiserve.engine.model.profiler import TorchProfiler
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.states import States
from oaiserve.engine.start.cache import CheckedModel, start_checked
from oaiserve.engine.start.draft_weights import DraftWeights
from oaiserve.engine.start.started import CPU_STEP_TOKENS, Started


def restart_runner(
    checked: CheckedModel,
    options: EngineOptions,
    draft: DraftWeights | None = None,
    reserved: ReservedMemory | None = None,
) -> Started:
    """Make the runner of a model that has been checked. `draft` guesses tokens for it, and weights are packed into
    `reserved` if it is there.

    Raises StartupError if there is no memory for what the options ask for, and NotRemembered if the native step does
    not compute what it did.
    """
    spec, device = checked.spec, torch.device("cpu")
    refuse_unless_they_fit(options.adapters, checked.decoder.adaptable())
    num_blocks, most_states = cpu_sizes(spec, options, None if draft is None else draft.spec)
    num_threads = options.cpu_threads or default_threads()
    native = start_checked(checked, options, num_blocks=num_blocks, num_threads=num_threads, reserved=reserved)
    return Started(
        ModelRunner(
            native,
            device,
            options.block_size,
            states=States(spec.state_shapes, most_states, device) if most_states else None,
        ),
        num_blocks,
        longest_request(spec, num_blocks * options.block_size),
        CPU_STEP_TOKENS,
        TorchProfiler(device),
        ranges=None,
        adaptable=checked.decoder.adaptable() if options.has_adapters else {},
        draft=None if draft is None else draft.start(options, num_blocks=num_blocks, vocab_size=spec.vocab_size),
        num_states=most_states,
    )
