"""Reserves the host memory of --kv-offload for the blocks of a model."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from oaiserve.config import Bytes
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.block_copies import BlockCopies
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.tiers.host_pool import HostPool
from oaiserve.errors import StartupError

log = logging.getLogger(__name__)


def offload_blocks(served: ServedModel, num_bytes: Bytes) -> ServedModel:
    """Return the model with a host pool below its blocks. Raises StartupError if it can't have one."""
    tensors = served.runner.block_tensors if isinstance(served.runner, ModelRunner) else []
    if not tensors or served.num_states:
        raise StartupError("--kv-offload is for models whose layers keep nothing but keys and values in blocks.")
    if num_bytes < served.block_bytes:
        raise StartupError(
            f"--kv-offload is {num_bytes}, but one block of this model takes {served.block_bytes} bytes."
        )
    try:
        copies = BlockCopies(tensors, num_bytes)
    except RuntimeError as error:
        raise StartupError(f"--kv-offload: {num_bytes} of host memory cannot be reserved: {error}.") from error
    log.debug("Host memory for %d KV blocks more than the cache's %d", copies.num_slots, served.num_blocks)
    return replace(served, make_tier=partial(HostPool, copies))
