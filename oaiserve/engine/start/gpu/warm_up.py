"""Warms up a model on a GPU, so that no request waits for what the first run of a kernel does."""

from __future__ import annotations

import logging

import numpy as np
import torch

from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.rehearsal import sampling_steps
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.sampling.logit_edits import ApplyMasks
from oaiserve.engine.model.spec import LoadedModel

log = logging.getLogger(__name__)


def warm_up(
    runner: ModelRunner,
    loaded: LoadedModel,
    apply_masks: ApplyMasks | None,
    block_size: int,
    compiled: Executor | None = None,
) -> None:
    """Run a step of each kind, whose first run compiles kernels and makes the handles of libraries, so that no request
    waits for that.

    The thread that runs the steps calls this, because each thread has its own handles, and may have its own compiled
    code: `compiled` is an executor that has some. The kernels for long prompts and long sequences have been compiled
    when memory was measured.
    """
    steps = sampling_steps()
    if compiled is not None:
        from oaiserve.engine.start.gpu.compiled import runs_compiled

        batch = build_batch(steps[0], block_size, loaded.device)
        if not runs_compiled(loaded, torch.inference_mode()(lambda: compiled.forward(batch))):
            log.warning("The model's compiled layers do not run on the engine's thread, so its steps are slower")
    for step in steps:
        runner.collect(runner.launch(step))
    if apply_masks is not None:
        words = np.zeros((1, -(-loaded.vocab_size // 32)), dtype=np.uint32)
        apply_masks(torch.zeros(1, loaded.vocab_size, device=loaded.device), [0], words)
