"""Models whose native step was found to compute what transformers' code does, as an earlier start remembers them.

What is remembered is all that transformers was needed for: the limits of the model, its description, and the logits of
transformers' code. So a later start loads no code of transformers, and still compares the native step with its logits.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import fields
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model.adapters import probe_adapter
from oaiserve.engine.model.cpu import build, describe, description, operations
from oaiserve.engine.model.cpu.build import BuildError
from oaiserve.engine.model.cpu.check import may_round_more, refuse_unless_equal
from oaiserve.engine.model.cpu.description import Decoder, NotKnown
from oaiserve.engine.model.cpu.library import Library
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.cpu.stored import StoredFiles, StoredTensors, TooLarge, from_json, to_json
from oaiserve.engine.model.spec import KVShape, LoadedModel, ModelSpec
from oaiserve.private import NotPrivate
from oaiserve.remembered import NotRemembered, Subject, recall, refound, remember, start_of_content, subject

log = logging.getLogger(__name__)

_FILES = (".json", ".safetensors")
_PACKAGES = ("oaiserve", "torch", "transformers")
# The settings that a start could refuse, or that change what the native step computes.
_OPTIONS = ("task", "device", "dtype", "compile", "attention", "nvtx", "tensor_parallel", "quantize", "max_model_len")


class CheckedModel(NamedTuple):
    """A model whose native step has been checked."""

    spec: ModelSpec
    decoder: Decoder
    expected: list[torch.Tensor]  # the logits of transformers' code for the batches of the check
    files: StoredFiles
    day: str  # of the check


def checked_subject(folder: Path, options: EngineOptions) -> Subject | None:
    """Return what the check of a model depends on, apart from the native library.

    None if the options, or this machine, ask for something else than the native step.
    """
    on_cpu = options.device == "cpu" or (options.device == "auto" and not torch.cuda.is_available())
    if not on_cpu or not options.compile or options.tensor_parallel > 1 or options.task not in ("auto", "generate"):
        return None
    asked = {name: str(getattr(options, name)) for name in (*_OPTIONS, "block_size", "has_adapters")}
    found = subject("model", folder, _FILES, options=asked, packages=_PACKAGES)
    code = hashlib.sha256()
    for module in (describe, description, operations):
        code.update(Path(str(module.__file__)).read_bytes())
    return refound(found, description=code.hexdigest()[:16])


def recall_model(asked: Subject, options: EngineOptions) -> CheckedModel:
    """Return the model as an earlier start has checked it. Raises NotRemembered."""
    found = recall(asked)
    try:
        dtype = getattr(torch, found.data["dtype"])
        if found.data["library"] != build.library_path(dtype, options.quantize, native_build=options.native_build).name:
            raise NotRemembered("the CPU, the compiler or the native code is another")
        if not build.is_built(dtype, options.quantize, native_build=options.native_build):
            raise NotRemembered("the native library is not on disk")
        files = StoredFiles(asked.folder, found.content, start_of_content(found))
        data = found.data["spec"]
        spec = ModelSpec(
            **data
            | {
                "device": torch.device("cpu"),
                "dtype": dtype,
                "eos_token_ids": frozenset(data["eos_token_ids"]),
                "kv_shapes": {int(layer): KVShape(*shape) for layer, shape in data["kv_shapes"].items()},
            }
        )
        decoder = from_json(found.data["decoder"], files)
        expected = [files.read_tensor(place) for place in found.data["expected"]]
    except (BuildError, OSError) as error:
        raise NotRemembered(str(error)) from error
    except (KeyError, TypeError, ValueError) as error:
        raise NotRemembered(f"{found.path} has another form") from error
    return CheckedModel(spec, decoder, expected, files, found.day)


def start_checked(checked: CheckedModel, options: EngineOptions, *, num_blocks: int, num_threads: int) -> NativeDecoder:
    """Make the native step, and compare its logits with those that are remembered.

    Raises NotRemembered if they differ, or if the native step cannot be made any more.
    """
    num_torch_threads = torch.get_num_threads()
    torch.set_num_threads(NativeDecoder.torch_threads)  # before torch computes anything and starts more
    try:
        library = Library(checked.spec.dtype, options.quantize, native_build=options.native_build)
        native = NativeDecoder(
            library,
            checked.decoder,
            num_threads=num_threads,
            num_blocks=num_blocks,
            block_size=options.block_size,
            has_adapters=options.has_adapters,
        )
        shapes = checked.decoder.adaptable()
        refuse_unless_equal(
            native,
            checked.spec,
            checked.expected,
            block_size=options.block_size,
            is_quantized=may_round_more(checked.decoder, checked.spec.dtype, is_quantized=options.quantize != "none"),
            probe=probe_adapter(shapes, checked.spec.dtype) if options.has_adapters else None,
        )
    except (BuildError, MemoryError, NotKnown) as error:
        torch.set_num_threads(num_torch_threads)
        raise NotRemembered(str(error)) from error
    checked.files.give_back()
    return native


def remember_checked(
    asked: Subject, loaded: LoadedModel, decoder: Decoder, expected: list[torch.Tensor], options: EngineOptions
) -> Thread:
    """Remember a model that has just been checked, in a thread, which is returned: no request waits for it."""

    def run() -> None:
        try:
            tensors = StoredTensors(asked.folder, loaded.model.named_parameters(remove_duplicate=False))
            data = {
                "spec": {field.name: getattr(loaded, field.name) for field in fields(ModelSpec)}
                | {
                    "device": "cpu",
                    "dtype": None,
                    "eos_token_ids": sorted(loaded.eos_token_ids),
                    "kv_shapes": {
                        layer: (shape.kv_heads, shape.key_dim, shape.value_dim)
                        for layer, shape in loaded.kv_shapes.items()
                    },
                },
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "library": build.library_path(loaded.dtype, options.quantize, native_build=options.native_build).name,
                "decoder": to_json(decoder, tensors),
                "expected": [tensors.place(logits) for logits in expected],
            }
            path = remember(asked, data, bytes(tensors.content))
        except (BuildError, NotPrivate, OSError, TooLarge) as error:
            log.info("The next start will check the model again: %s", error)
        else:
            if path is None:
                log.info("The next start will check the model again: its files have changed meanwhile")
            else:
                log.info("The next start need not ask transformers' code again: the check is remembered in %s", path)

    # It is waited for at the end: a process must not end while a thread is in torch.
    thread = Thread(target=run, name="remember", daemon=False)
    thread.start()
    return thread
