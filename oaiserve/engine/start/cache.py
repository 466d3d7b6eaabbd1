"""Models whose native step was found to compute what transformers' code does, as an earlier start remembers them.

What is remembered is all that transformers was needed for: the limits of the model, its description, and the logits of
transformers' code. So a later start loads no code of transformers, and still compares the native step with its logits.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, fields
from functools import partial
from pathlib import Path
from threading import Thread, main_thread
from typing import Any, NamedTuple

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model import layer_operations
from oaiserve.engine.model.adapters import probe_adapter
from oaiserve.engine.model.attention import rotation
from oaiserve.engine.model.checkpoints.weights import PlaceInFile
from oaiserve.engine.model.cpu import (
    blocks,
    build,
    describe,
    describe_experts,
    describe_mixers,
    description,
    expert_operations,
    fit,
    mixer_operations,
    module_reader,
    operation_list,
    operations,
    pack_weights,
)
from oaiserve.engine.model.cpu.build import BuildError
from oaiserve.engine.model.cpu.description import Decoder, NotKnown
from oaiserve.engine.model.cpu.library import Library
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.cpu.quantized_file import FileIdentity, QuantizedFile, find
from oaiserve.engine.model.cpu.reserved import ReservedMemory
from oaiserve.engine.model.spec import KVShape, LayerStateShapes, LoadedModel, ModelSpec, StateShape
from oaiserve.engine.start import some_layers
from oaiserve.engine.start.check import may_round_more, refuse_unless_equal
from oaiserve.engine.start.some_layers import Part
from oaiserve.engine.start.stored import StoredFiles, StoredTensors, TooLarge, from_json, to_json
from oaiserve.files import gguf
from oaiserve.files.gguf import GgufTensor
from oaiserve.files.private import NotPrivate
from oaiserve.files.start_cache import (
    NotRemembered,
    Subject,
    name_of,
    recall,
    refound,
    remember,
    start_of_content,
    subject,
)

log = logging.getLogger(__name__)

_FILES = (".json", ".safetensors")
_PACKAGES = ("oaiserve", "torch", "transformers")
# What describes a model, and makes operations of the description.
_CODE = (
    *(describe, describe_experts, describe_mixers, description, fit, module_reader),
    *(
        layer_operations,
        expert_operations,
        mixer_operations,
        operation_list,
        operations,
        pack_weights,
        rotation,
    ),
)
# The settings that a start could refuse, or that change what the native step computes.
_OPTIONS = (
    *("task", "device", "dtype", "compile", "attention", "nvtx", "tensor_parallel", "quantize", "kv_cache_dtype"),
    "max_model_len",
)
_MODEL = Path(__file__).parent.parent / "model"
_FAMILIES = sorted((_MODEL / "families").glob("*.py"))  # which say how layers are described, and files are read
# What reads a GGUF file: the configuration of its model, and the names of its tensors.
_GGUF_READERS = [_MODEL / "checkpoints" / f"gguf_{name}.py" for name in ("config", "names", "weights")]
_QUANTIZER = Path(__file__).parent.parent / "model/checkpoints/int4_weights.py"  # which decides what is quantized how
BLOCK_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}  # by --dtype


class CheckedModel(NamedTuple):
    """A model whose native step has been checked."""

    spec: ModelSpec
    decoder: Decoder
    expected: list[torch.Tensor]  # the logits of transformers' code for the batches of the check
    part: Part | None  # of the decoder, which these are the logits of; None: of all of it
    weights: build.Form
    files: StoredFiles
    day: str  # of the check


def checked_subject(model: Path, options: EngineOptions) -> Subject | None:
    """Return what the check of a model, a folder or a GGUF file, depends on, apart from the native library.

    None if the options, or this machine, ask for something else than the native step.
    """
    is_gguf = model.is_file()
    if not (keeps_blocks(options) if is_gguf else _is_native(options)):
        return None
    asked = {name: str(getattr(options, name)) for name in (*_OPTIONS, "block_size", "has_adapters")}
    packages: tuple[str, ...] = _PACKAGES
    digest: Callable[[Path], str] | None = None
    modules = [*_CODE]
    code = hashlib.sha256()
    for path in _FAMILIES:
        code.update(path.read_bytes())
    parts: list[Path] = []
    if is_gguf:
        parts = gguf.shard_paths(model)
        if len({part.resolve().parent for part in parts}) > 1:  # a record is of one folder
            return None
        # The record may have copies of these tensors. All others are read from the file at each start.
        packages, digest = (*_PACKAGES, "gguf"), partial(gguf.digest, counts=_is_copied)
        modules += [blocks, some_layers]
        for reader in _GGUF_READERS:
            code.update(reader.read_bytes())
    elif options.quantize == "int4":
        modules += [blocks, some_layers]
        code.update(_QUANTIZER.read_bytes())
    for module in modules:
        code.update(Path(str(module.__file__)).read_bytes())
    found = subject("model", model, _FILES, options=asked, packages=packages, digest=digest, parts=parts)
    return refound(found, description=code.hexdigest()[:16])


def keeps_blocks(options: EngineOptions) -> bool:
    """Return whether the options leave the weights of a GGUF file as they are, if its family is known."""
    return (
        _is_native(options)
        and options.quantize == "none"
        and options.draft_model is None
        and options.dtype in BLOCK_DTYPES
    )


def block_dtype(model: Path, options: EngineOptions) -> torch.dtype | None:
    """Return in what a model computes whose weights will be in blocks: a GGUF file's, or those that are quantized here.

    None for all others; what they will be in is in their files.
    """
    has_blocks = keeps_blocks(options) if model.is_file() else _is_native(options) and options.quantize == "int4"
    return BLOCK_DTYPES.get(options.dtype) if has_blocks else None


def _is_native(options: EngineOptions) -> bool:
    on_cpu = options.device == "cpu" or (options.device == "auto" and not torch.cuda.is_available())
    return on_cpu and options.compile and options.tensor_parallel == 1 and options.task in ("auto", "generate")


def _is_copied(tensor: GgufTensor) -> bool:
    return tensor.kind not in blocks.FORMATS or len(tensor.shape) < 2


def _weights_of(asked: Subject, options: EngineOptions) -> build.Form:
    return "blocks" if asked.model.is_file() or options.quantize == "int4" else options.quantize


def recall_model(asked: Subject, options: EngineOptions) -> CheckedModel:
    """Return the model as an earlier start has checked it. Raises NotRemembered."""
    found = recall(asked)
    weights = _weights_of(asked, options)
    try:
        dtype = getattr(torch, found.data["dtype"])
        if found.data["library"] != build.library_path(dtype, weights, native_build=options.native_build).name:
            raise NotRemembered("the CPU, the compiler or the native code is another")
        if not build.is_built(dtype, weights, native_build=options.native_build):
            raise NotRemembered("the native library is not on disk")
        made = found.data.get("quantized")
        blocks_file = asked.model.name if made is None else _quantized(FileIdentity(**made))
        files = StoredFiles(asked.folder, found.content, start_of_content(found), blocks_file)
        data = found.data["spec"]
        spec = ModelSpec(
            **data
            | {
                "device": torch.device("cpu"),
                "dtype": dtype,
                "eos_token_ids": frozenset(data["eos_token_ids"]),
                "kv_shapes": {int(layer): KVShape(*shape) for layer, shape in data["kv_shapes"].items()},
                "state_shapes": {int(layer): _state_shapes(*parts) for layer, parts in data["state_shapes"].items()},
            }
        )
        decoder = from_json(found.data["decoder"], files)
        expected = [files.read_tensor(place) for place in found.data["expected"]]
        stands_for_all = found.data.get("part")  # which older records do not have
        compared = None if stands_for_all is None else Part(**stands_for_all)
    except (BuildError, NotPrivate, OSError) as error:
        raise NotRemembered(str(error)) from error
    except (KeyError, TypeError, ValueError) as error:
        raise NotRemembered(f"{found.path} has another form") from error
    return CheckedModel(spec, decoder, expected, compared, weights, files, found.day)


def _stored_shape(state: StateShape | None) -> list[Any] | None:
    return None if state is None else [state.shape, str(state.dtype).removeprefix("torch.")]


def _state_shapes(*parts: list[Any] | None) -> LayerStateShapes:
    return LayerStateShapes(
        *(None if part is None else StateShape(tuple(part[0]), getattr(torch, part[1])) for part in parts)
    )


def _quantized(asked: FileIdentity) -> str:
    path = find(asked)
    if path is None:
        raise NotRemembered("the weights that were quantized are not in the cache any more")
    return str(path)


def start_checked(
    checked: CheckedModel,
    options: EngineOptions,
    *,
    num_blocks: int,
    num_threads: int,
    reserved: ReservedMemory | None = None,
) -> NativeDecoder:
    """Make the native step, with its weights in `reserved`, and compare its logits with those that are remembered.

    Raises NotRemembered if they differ, or if the native step cannot be made any more.
    """
    num_torch_threads = torch.get_num_threads()
    torch.set_num_threads(NativeDecoder.torch_threads)  # before torch computes anything and starts more
    try:
        library = Library(checked.spec.dtype, checked.weights, native_build=options.native_build)
        make = partial(
            NativeDecoder,
            library,
            num_threads=num_threads,
            block_size=options.block_size,
            has_adapters=options.has_adapters,
        )
        compare = partial(
            refuse_unless_equal,
            expected=checked.expected,
            block_size=options.block_size,
            is_quantized=may_round_more(checked.decoder, checked.spec.dtype, is_quantized=checked.weights != "none"),
        )
        compared = checked.decoder if checked.part is None else checked.part.decoder(checked.decoder)
        probe = probe_adapter(compared.adaptable(), checked.spec.dtype) if options.has_adapters else None
        if checked.part is not None:
            passing = make(compared, num_blocks=1, reserved=reserved, is_passing=True)
            compare(passing, checked.part.spec(checked.spec), probe=probe)
            del passing  # whose weights are where those of the whole decoder are packed
            native = make(checked.decoder, num_blocks=num_blocks, reserved=reserved)
        else:
            native = make(checked.decoder, num_blocks=num_blocks, reserved=reserved)
            compare(native, checked.spec, probe=probe)
    except (BuildError, MemoryError, NotKnown) as error:
        torch.set_num_threads(num_torch_threads)
        raise NotRemembered(str(error)) from error
    checked.files.give_back()
    return native


def remember_checked(
    asked: Subject,
    loaded: LoadedModel,
    decoder: Decoder,
    expected: list[torch.Tensor],
    options: EngineOptions,
    compared: Part | None = None,
    in_files: Mapping[str, PlaceInFile] | None = None,
    quantized: QuantizedFile | None = None,
    after_seconds: float = 0.0,
) -> Thread:
    """Remember a model that has just been checked, in a thread, which is returned: no request waits for it.

    It begins `after_seconds`, or when the process ends.

    `compared` is the part of it that was, and `in_files` has the places of its parameters, if they are not in
    safetensors files. `quantized` has its blocks, if they were made at this start.
    """

    def run() -> None:
        main_thread().join(after_seconds)
        try:
            tensors = StoredTensors(asked.folder, loaded.model.named_parameters(remove_duplicate=False), in_files)
            weights = _weights_of(asked, options)
            data: dict[str, Any] = {
                "spec": {field.name: getattr(loaded, field.name) for field in fields(ModelSpec)}
                | {
                    "device": "cpu",
                    "dtype": None,
                    "eos_token_ids": sorted(loaded.eos_token_ids),
                    "kv_shapes": {layer: astuple(shape) for layer, shape in loaded.kv_shapes.items()},
                    "state_shapes": {
                        layer: [_stored_shape(shapes.conv), _stored_shape(shapes.recurrent)]
                        for layer, shapes in loaded.state_shapes.items()
                    },
                },
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "library": build.library_path(loaded.dtype, weights, native_build=options.native_build).name,
                "decoder": to_json(decoder, tensors),
                "expected": [tensors.place(logits) for logits in expected],
                "part": None if compared is None else asdict(compared),
                "quantized": None if quantized is None else asdict(quantized.finish(name_of(asked))),
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
