"""Decides which faster ways to compute a start uses: those that passed a probe, unless the GPU has failed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date

import torch

from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.start.gpu.child import Order, probed
from oaiserve.engine.start.gpu.trials import FEATURES
from oaiserve.engine.start.gpu.verdict import Verdict, driver_version, recall, remember, verdict_path
from oaiserve.engine.start.request import StartRequest
from oaiserve.errors import DeviceLost, StartupError
from oaiserve.files.load_errors import named
from oaiserve.files.start_cache import version_of

log = logging.getLogger(__name__)


class Usable:
    """The verdict of a probe for one model on one GPU."""

    def __init__(self, request: StartRequest, spec: ModelSpec) -> None:
        """Read the verdict of an earlier start, or probe the GPU."""
        self._device = spec.device
        self._path = verdict_path(_about(request, spec))
        self.verdict = self._decide(request)

    def _decide(self, request: StartRequest) -> Verdict:
        options = request.options
        if not options.compile:
            return Verdict()
        verdict = None if options.recheck else recall(self._path)
        if verdict is not None:
            return verdict
        log.info("Another process computes some layers of the model, to find out which kernels are usable on this GPU")
        verdict = probed(Order(str(request.source.path), options, str(self._device)))
        if verdict is None:  # The start itself will fail with the reason.
            return _all_off("the probe could not start the model")
        if len(verdict.problems) < len(FEATURES):
            remember(self._path, verdict)
        return verdict

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise DeviceLost if the device fails in the block. The next start then uses none of the features."""
        try:
            yield
        except (NotKnown, StartupError):
            raise
        except Exception as error:
            if not self.forbid_if_failed(error):
                raise
            had_features = len(self.verdict.problems) < len(FEATURES)
            kind = DeviceLost if had_features and recall(self._path) is not None else StartupError
            raise kind(f"The GPU failed, and fails from now on: {named(error)}.") from error

    def forbid_if_failed(self, error: BaseException) -> bool:
        """If this process can't use the device any more, let the next start use none of the features."""
        try:
            torch.cuda.synchronize(self._device)
        except Exception:
            reason = f"the GPU failed on {date.today()} (--recheck probes it again): {named(error)}"
            remember(self._path, _all_off(reason))
            return True
        return False


def _all_off(reason: str) -> Verdict:
    return Verdict(dict.fromkeys(FEATURES, reason), frozenset(FEATURES))


def _about(request: StartRequest, spec: ModelSpec) -> list[str]:
    """Return everything on which the verdict depends."""
    options = request.options
    sizes = (options.block_size, options.max_running, options.max_step_tokens, options.max_model_len)
    ways = (options.attention, options.cuda_graph, options.kv_cache_dtype, options.has_adapters, spec.dtype)
    of_device = (torch.cuda.get_device_name(spec.device), driver_version(), torch.version.cuda)
    versions = map(version_of, ("oaiserve", "torch", "triton"))
    return [str(one) for one in (request.source.path.resolve(), *sizes, *ways, *of_device, *versions)]
