"""Decides which faster ways of computing a start uses: those that passed a probe, unless the GPU has failed.

The result of a probe is stored for later starts. It is valid for one model, one GPU, its driver, and the versions of
the packages that create kernels.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import TypeVar

import torch
from msgspec.structs import replace

from oaiserve.checkpoints.load_errors import named
from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.start.request import StartRequest
from oaiserve.errors import DeviceLost, StartupError
from oaiserve.plugins.cuda.start.child import Order, probed
from oaiserve.plugins.cuda.start.features import Probed, all_off, by_options, log_off
from oaiserve.plugins.cuda.start.fitting import fitting
from oaiserve.plugins.cuda.start.stored import folder, recall, remember
from oaiserve.storage.start_cache import version_of

log = logging.getLogger(__name__)

T = TypeVar("T")

_DRIVER = Path("/proc/driver/nvidia/version")


class Usable:
    """The result of the probe for one model on one GPU."""

    def __init__(self, request: StartRequest, spec: ModelSpec) -> None:
        """Read the result of an earlier start, or probe the GPU."""
        self._device = spec.device
        about = "\n".join(map(str, _about(request, spec)))
        self._path = folder() / hashlib.sha256(about.encode()).hexdigest()[:16]
        self.found = self._decide(request)

    def _decide(self, request: StartRequest) -> Probed:
        options = request.options
        verdict = by_options(options)
        if verdict["kernels"]:
            return Probed(verdict)
        found = None if options.recheck else recall(self._path)
        if found is None:
            log.info("Another process computes some layers of the model, to find out which kernels are usable here")
            found = probed(Order(str(request.source.path), options, str(self._device), verdict))
            if found is None:  # The start itself will fail with the reason.
                return Probed(all_off("the probe could not start the model"))
            found = replace(found, about=f"{request.source.location} on {torch.cuda.get_device_name(self._device)}")
            if _has_usable(found):
                remember(self._path, found)
        log_off(found)
        return found

    def started(self, start: Callable[[Probed], T]) -> T:
        """Start with the result of the probe. A kernel that doesn't fit is turned off, also for later starts."""
        result, found = fitting(self.found, start)
        if found is not self.found:
            self.found = found
            remember(self._path, found)
        return result

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
            can_be_plain = _has_usable(self.found) and recall(self._path) is not None
            kind = DeviceLost if can_be_plain else StartupError
            raise kind(f"The GPU failed, and fails from now on: {named(error)}.") from error

    def forbid_if_failed(self, error: BaseException) -> bool:
        """If this process can no longer use the device, make the next start use none of the features."""
        try:
            torch.cuda.synchronize(self._device)
        except Exception:
            reason = f"the GPU failed on {date.today()} (--recheck probes it again): {named(error)}"
            remember(self._path, Probed(all_off(reason)))
            return True
        return False


def _has_usable(found: Probed) -> bool:
    return not all(found.verdict.values())


def _about(request: StartRequest, spec: ModelSpec) -> Iterable[object]:
    """Return everything that a probe's result depends on."""
    options = request.options
    sizes = (options.block_size, options.max_running, options.max_step_tokens, options.max_model_len)
    ways = (options.cuda_graph, options.kv_cache_dtype, options.quantize, options.has_adapters, spec.dtype)
    of_device = (torch.cuda.get_device_name(spec.device), driver_version(), torch.version.cuda)
    versions = map(version_of, ("oaiserve", "torch", "triton"))
    path = request.source.path.resolve()
    return path, content_of(path), *sizes, *ways, *of_device, *versions


def content_of(model: Path) -> list[tuple[str, int, int]]:
    """Return the name, size and modification time of a file, or of each file in a folder.

    They differ for other weights at the same path. Returns an empty list if they can't be read.
    """
    with suppress(OSError):
        files = sorted(filter(Path.is_file, model.iterdir())) if model.is_dir() else [model]
        stats = [(file.name, file.stat()) for file in files]
        return [(name, status.st_size, status.st_mtime_ns) for name, status in stats]
    return []


def driver_version() -> str:
    """Return the version of NVIDIA's driver, or an empty text if the system has none."""
    with suppress(OSError):
        return _DRIVER.read_text()
    return ""
