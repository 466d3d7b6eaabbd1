"""Opens the folder of --prefix-cache-dir for a model, and finds its blocks in memory."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from oaiserve.checkpoints.kind import kind_of
from oaiserve.checkpoints.source import ModelSource, find_mmproj
from oaiserve.config import EngineOptions
from oaiserve.engine.executors.native.native import NativeDecoder
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.tiers.disk_tier import KeptBlocks, disk_tier
from oaiserve.errors import StartupError
from oaiserve.storage.block_files import open_blocks
from oaiserve.storage.private import NotPrivate

_ENGINE = Path(__file__).parents[1]


def keep_blocks(served: ServedModel, source: ModelSource, folder: Path, options: EngineOptions) -> ServedModel:
    """Return the model with a disk tier for its prefix cache. Raises StartupError if it can't have one."""
    native = served.runner.executor if isinstance(served.runner, ModelRunner) else None
    if not isinstance(native, NativeDecoder) or not native.caches or served.num_states:
        raise StartupError(
            "--prefix-cache-dir is for models that run in the native step of a CPU and whose layers keep nothing but "
            "keys and values."
        )
    # The bytes of all blocks, as [number of blocks, bytes], in the native step's own memory.
    arrays = [tensor.view(torch.uint8).flatten(1).numpy() for tensor in native.block_tensors]
    try:
        block_bytes = sum(array.shape[1] for array in arrays)
        kind = _kind(served, native.library_name, source, options, [array.shape[1] for array in arrays])
        files = open_blocks(folder, kind, block_bytes, options.prefix_cache_disk)
    except (NotPrivate, OSError) as error:
        raise StartupError(f"--prefix-cache-dir {folder} cannot be used: {error}.") from error
    return replace(served, make_tier=disk_tier(KeptBlocks(files, arrays)))


def _kind(served: ServedModel, library: str, source: ModelSource, options: EngineOptions, shapes: list[int]) -> str:
    """Return a digest of everything that determines a block's content, except its tokens, images and sounds."""
    # All code that computes or lays out keys and values, and the settings of families that files leave out.
    paths = [path for part in ("decoder", "executors", "model") for path in (_ENGINE / part).rglob("*")]
    mmproj: Path | None = None
    if served.media is not None:  # Keys and values of image tokens depend on the tower's vectors.
        paths += Path(inspect.getfile(type(served.media.tower))).parent.glob("*.py")
        mmproj = find_mmproj(source, options.mmproj)
    code = hashlib.sha256()
    for path in sorted(path for path in paths if path.suffix in (".py", ".json")):
        code.update(path.read_bytes())
    settings = (options.dtype, options.quantize, options.kv_cache_dtype, options.max_model_len, options.block_size)
    versions = (version("transformers"), library, code.hexdigest())
    return kind_of(str(source.path), (*versions, settings, shapes), mmproj)
