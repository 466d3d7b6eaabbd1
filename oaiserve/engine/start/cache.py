"""The start cache of models: a native step that was found to compute what transformers' code does.

A record has all that transformers was needed for: the limits of the model, its description, and the logits of
transformers' code. So a later start loads no code of transformers, and still compares the native step with its logits.
A record holds for the files, the options, the packages, the native library and the code that it was made with.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from threading import Thread, main_thread
from typing import Any, NamedTuple

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder import blocks
from oaiserve.engine.decoder.description import Decoder, NotKnown
from oaiserve.engine.decoder.quantized_file import FileIdentity, QuantizedFile, find
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.model.checkpoints.weights import PlaceInFile
from oaiserve.engine.model.cpu import build
from oaiserve.engine.model.cpu.build import BuildError
from oaiserve.engine.model.cpu.library import Library
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.cpu.reserved import ReservedMemory
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.start.check import Checked, refuse_unless_as_checked
from oaiserve.engine.start.stored import StoredFiles, StoredTensors, TooLarge, from_json, to_json
from oaiserve.files import gguf
from oaiserve.files.private import NotPrivate
from oaiserve.files.start_cache import (
    NotRemembered,
    StartRecord,
    Subject,
    name_of,
    of_record,
    recall,
    remember,
    subject,
)

log = logging.getLogger(__name__)

_FILES = (".json", ".safetensors")
_PACKAGES = ("oaiserve", "torch", "transformers")
# The settings that a start could refuse, or that change what the native step computes.
_OPTIONS = (
    *("task", "device", "dtype", "compile", "attention", "quantize", "kv_cache_dtype"),
    *("cpu_features", "max_model_len", "block_size", "has_adapters"),
)
_ROOMS = (
    "oaiserve.engine.decoder.",
    "oaiserve.engine.model.",
    "oaiserve.engine.start.",
    "oaiserve.files.",
)  # whose code makes a record
_ROOT = Path(__file__).parents[2]
BLOCK_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}  # by --dtype


class CheckedModel(NamedTuple):
    """A model whose native step has been checked."""

    spec: ModelSpec
    decoder: Decoder
    checked: Checked
    files: StoredFiles
    day: str  # of the check
    path: Path  # of the record


def cache_key(model: Path, options: EngineOptions) -> Subject | None:
    """Make the key of a model, a folder or a GGUF file, in the start cache.

    None if the options, or this machine, ask for something else than the native step.
    """
    settings = {name: str(getattr(options, name)) for name in _OPTIONS}
    if not model.is_file():
        return subject("model", model, _FILES, options=settings, packages=_PACKAGES) if is_native(options) else None
    if not keeps_blocks(options):
        return None
    parts = gguf.shard_paths(model)
    if len({part.resolve().parent for part in parts}) > 1:  # a record is of one folder
        return None
    if (defaults := model.parent / "generation_config.json").is_file():
        settings["generation_config"] = _digest(defaults)
    # The record may have copies of some tensors. All others are read from the file at each start.
    digest = partial(gguf.digest, counts=lambda tensor: tensor.kind not in blocks.FORMATS or len(tensor.shape) < 2)
    packages = (*_PACKAGES, "gguf")
    return subject("model", model, _FILES, options=settings, packages=packages, digest=digest, parts=parts)


def keeps_blocks(options: EngineOptions) -> bool:
    """Decide whether the options leave the weights of a GGUF file as they are, if its family is known."""
    return is_native(options) and options.quantize == "none" and options.dtype in BLOCK_DTYPES


def block_dtype(model: Path, options: EngineOptions) -> torch.dtype | None:
    """Choose the dtype of a model with weights in quantization blocks: a GGUF file's, or made by --quantize.

    None for all others, whose files have to be read for it.
    """
    has_blocks = keeps_blocks(options) if model.is_file() else is_native(options) and options.quantize != "none"
    return BLOCK_DTYPES.get(options.dtype) if has_blocks else None


def is_native(options: EngineOptions) -> bool:
    """Decide whether the options allow the native step."""
    on_cpu = options.device == "cpu" or (options.device == "auto" and not torch.cuda.is_available())
    return on_cpu and options.compile and options.task in ("auto", "generate")


def _digest(source: Path) -> str:
    return hashlib.sha256(source.read_bytes()).hexdigest()[:16]


def recall_model(key: Subject, options: EngineOptions) -> CheckedModel:
    """Read the record of a model. Raises NotRemembered."""
    record = recall(key)
    try:
        with of_record(record.path):
            return _checked_model(record, key)
    except BuildError as error:
        raise NotRemembered(str(error)) from error


def _checked_model(record: StartRecord, key: Subject) -> CheckedModel:
    for name, digest in record.data["code"].items():
        path = _ROOT / name
        if not path.is_file() or _digest(path) != digest:
            raise NotRemembered(f"the code in oaiserve/{name} has changed")
    dtype = getattr(torch, record.data["dtype"])
    if record.data["library"] != build.library_path(dtype).name:
        raise NotRemembered("the CPU, the compiler or the native code is another")
    if not build.is_built(dtype):
        raise NotRemembered("the native library is not on disk")
    quantized = record.data["quantized"]
    blocks_file: str | Path | None = key.model.name if quantized is None else find(FileIdentity(**quantized))
    if blocks_file is None:
        raise NotRemembered("the weights that were quantized are not in the cache any more")
    files = StoredFiles(key.folder, record.content, record.start, str(blocks_file))
    spec, decoder, checked = from_json(record.data["model"], files)
    return CheckedModel(spec, decoder, checked, files, record.day, record.path)


def start_checked(
    checked: CheckedModel,
    options: EngineOptions,
    *,
    num_blocks: int,
    num_threads: int,
    reserved: ReservedMemory | None = None,
) -> NativeDecoder:
    """Make the native step, with its weights in `reserved`, and compare its logits with the recorded ones.

    Raises NotRemembered if they differ, or if the native step cannot be made any more.
    """
    num_torch_threads = torch.get_num_threads()
    torch.set_num_threads(NativeDecoder.torch_threads)  # before torch computes anything and starts more
    try:
        library = Library(checked.spec.dtype)
        sizes: Any = {"num_threads": num_threads, "reserved": reserved}
        refuse_unless_as_checked(library, checked.decoder, checked.spec, checked.checked, options, **sizes)
        native = NativeDecoder(
            library,
            checked.decoder,
            num_blocks=num_blocks,
            block_size=options.block_size,
            has_adapters=options.has_adapters,
            **sizes,
        )
    except (BuildError, MemoryError, NotKnown) as error:
        torch.set_num_threads(num_torch_threads)
        raise NotRemembered(str(error)) from error
    checked.files.give_back()
    return native


def remember_checked(
    key: Subject,
    loaded: LoadedModel,
    decoder: Decoder,
    checked: Checked,
    in_files: Mapping[str, PlaceInFile] | None = None,
    quantized: QuantizedFile | None = None,
    after_seconds: float = 0.0,
) -> Thread:
    """Record a model that has just been checked, in a thread, which is returned: no request waits for it.

    It begins `after_seconds`, or when the process ends. `in_files` has the places of the model's parameters, if they
    are not in safetensors files. `quantized` has the blocks that this start made.
    """
    # The source of each module that this process has imported from the rooms whose code makes a record.
    sources = [module.__file__ for name, module in sys.modules.copy().items() if name.startswith(_ROOMS)]
    code = {str(Path(file).relative_to(_ROOT)): _digest(Path(file)) for file in sources if file is not None}

    def run() -> None:
        main_thread().join(after_seconds)
        try:
            parameters = loaded.model.named_parameters(remove_duplicate=False)
            tensors = StoredTensors(key.folder, parameters, in_files)
            spec = ModelSpec(**{field.name: getattr(loaded, field.name) for field in fields(ModelSpec)})
            data: dict[str, Any] = {
                "code": code,
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "library": build.library_path(loaded.dtype).name,
                "model": to_json([spec, decoder, checked], tensors),
                "quantized": None if quantized is None else asdict(quantized.finish(name_of(key))),
            }
            path = remember(key, data, bytes(tensors.content))
        except (BuildError, NotPrivate, OSError, TooLarge) as error:
            log.debug("The next start checks the model again: %s", error)
        else:
            if path is None:
                log.debug("The next start checks the model again, because its files have changed meanwhile")
            else:
                log.debug("The result of the check is stored in %s, so the next start is faster", path)

    # It is waited for at the end: a process must not end while a thread is in torch.
    thread = Thread(target=run, name="remember", daemon=False)
    thread.start()
    return thread
