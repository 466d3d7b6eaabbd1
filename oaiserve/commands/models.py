"""The models on this disk: the demo, those in the hub's cache, and those elsewhere that have been started before."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oaiserve.checkpoints import demo, gguf, hub
from oaiserve.checkpoints.bad_file import BadFile
from oaiserve.checkpoints.checkpoint import Checkpoint
from oaiserve.errors import StartupError
from oaiserve.storage import start_cache
from oaiserve.storage.private import cache_folder

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, HFCacheInfo

# Names of `general.file_type` in GGUF files, as in the package gguf, whose import would delay a start's banner.
GGUF_FORMS: dict[Any, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
    39: "NVFP4",
    40: "Q1_0",
    1024: "GUESSED",
}


@dataclass(frozen=True, slots=True)
class StoredModel:
    name: str  # a name that `serve` accepts
    path: Path  # a folder, or the first GGUF file
    num_bytes: int
    records: list[start_cache.Record] = field(default_factory=list)
    # Removes the model's files, and returns how many bytes that frees. None: they are the user's own.
    remove: Callable[[], int] | None = None

    @property
    def remembered(self) -> str:
        """Return the day of the newest start record that still fits the model, or ""."""
        return max((record.day for record in self.records if record.kind == "model" and record.holds), default="")

    def described(self) -> tuple[str, str]:
        try:
            if self.path.is_dir():
                return _folder(self.path)
            return _gguf_file(self.path)
        except StartupError:
            return "no weights", "-"
        except (BadFile, OSError):
            return "damaged", "-"


def stored_models() -> list[StoredModel]:
    records: dict[Path, list[start_cache.Record]] = {}
    for record in start_cache.records():
        records.setdefault(record.model, []).append(record)
    models = [*_demo(), *_in_hub_cache()]
    for model in models:
        model.records.extend(records.pop(model.path.resolve(), []))
    for path, of_path in records.items():
        if path.suffix == ".gguf" or path.is_dir():
            models.append(StoredModel(str(path), path, _num_bytes(path), of_path))
    return sorted(models, key=lambda model: model.name.lower())


def model_at(name: str, path: Path) -> StoredModel:
    return StoredModel(name, path, _num_bytes(path))


def _demo() -> Iterator[StoredModel]:
    folder = cache_folder() / "models" / demo.NAME
    if (folder / demo.DIGESTS).is_file():
        yield StoredModel("demo", folder, _num_bytes(folder), remove=lambda: _removed(folder))


def _in_hub_cache() -> Iterator[StoredModel]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return
    for repo in cache.repos:
        if repo.repo_type == "model":
            yield from _of_repository(cache, repo)


def _of_repository(cache: HFCacheInfo, repo: CachedRepoInfo) -> Iterator[StoredModel]:
    """Yield the models of a repository: one for each GGUF file, or the whole repository if it has none."""
    revision = repo.refs.get("main") or max(repo.revisions, key=lambda each: each.last_modified, default=None)
    if revision is None:
        return
    folder = revision.snapshot_path
    files = {str(file.file_path.relative_to(folder)): file for file in revision.files}
    models = hub.gguf_models(files)

    def remove_all() -> int:
        return _executed(cache.delete_revisions(*(each.commit_hash for each in repo.revisions)))

    for parts in models.values():

        def remove(parts: list[str] = parts) -> int:
            return _executed(cache.delete_files(*(files[part] for part in parts)))

        size = sum(files[part].size_on_disk for part in parts)
        name = f"{repo.repo_id}:{_short_name(repo.repo_id, parts[0], list(files))}"
        yield StoredModel(name, folder / parts[0], size, remove=remove if len(models) > 1 else remove_all)
    if not models:
        yield StoredModel(repo.repo_id, folder, revision.size_on_disk, remove=remove_all)


def _removed(folder: Path) -> int:
    num_bytes = _num_bytes(folder)
    shutil.rmtree(folder)
    return num_bytes


def _executed(strategy: Any) -> int:
    """Remove files from the hub's cache. Return how many bytes that frees. Raises OSError."""
    cache = logging.getLogger("huggingface_hub.utils._cache_manager")
    cache.setLevel(logging.ERROR)  # It only warns, with a traceback, of files that it may not delete.
    strategy.execute()
    removed = (*strategy.repos, *strategy.snapshots, *strategy.refs, *strategy.blobs)
    if left := [path for path in removed if os.path.lexists(path)]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(left[0]))
    return int(strategy.expected_freed_size)


def _short_name(repository: str, name: str, names: list[str]) -> str:
    """Return the format in a GGUF file's name, or the whole name if several files have that format."""
    whole = gguf.SHARD.sub("", name).removesuffix(".gguf")
    short = whole.rpartition("/")[2].rpartition("-")[2]
    try:
        if name in hub.gguf_files(repository, names, short):
            return short
        return f"{whole}.gguf"
    except StartupError:
        return f"{whole}.gguf"


def _num_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else gguf.shard_paths(path)
    return sum(file.stat().st_size for file in files if file.is_file())


def _folder(folder: Path) -> tuple[str, str]:
    checkpoint = Checkpoint(folder)
    config = checkpoint.config
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        form = str(quantization.get("quant_method", "quantized"))
    else:
        tensors = checkpoint.header(checkpoint.weight_files[0])[0].values()
        form = max(tensors, key=lambda tensor: tensor["data_offsets"][1] - tensor["data_offsets"][0])["dtype"].lower()
    return f"safetensors {form}", str(config.get("model_type", "-"))


def _gguf_file(path: Path) -> tuple[str, str]:
    values = gguf.read_head(path).values
    form = GGUF_FORMS.get(values.get("general.file_type"), "")
    return f"GGUF {form}", gguf.architecture(values) or "-"
