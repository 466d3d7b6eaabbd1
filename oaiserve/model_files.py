"""Look at the files of a model before they are loaded: none may run code, or take time or memory without end.

The libraries that load a model believe its files: they make as many layers as config.json says, open the file that an
index names, and ask at the terminal whether to run the model's own code. Stdlib only, so that a refusal comes at once.
What only they can judge fails in them, and `reported` makes one sentence of it.
"""

from __future__ import annotations

import json
import logging
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import IO, Any, TypeVar

from oaiserve.errors import StartupError
from oaiserve.source import ModelSource

log = logging.getLogger(__name__)

T = TypeVar("T")

INDEX = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MOST_CONFIG_BYTES = 2**24
_MOST_HEADER_BYTES = 10**8  # safetensors refuses longer ones
_MOST_POSITIONS = 2**24  # which some tables have a row for
_MOST_COUNT = 10_000  # of experts, for example
_LAYERS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "block_count"}
_COUNT = re.compile(r"layers?$|experts?$|(layer|expert)_count$")
_SIZE = re.compile(r"(_size|_dim|_rank|_inner|_embd|_model|_heads?|_length|head_count(_kv)?|dimension_count)$")
_NO_SIZE = re.compile(r"(position|context|seq|window|max|chunk|sample|original|block_size|group_size)")
_AT_LEAST_ONE = _LAYERS | {
    *("vocab_size", "hidden_size", "n_embd", "num_attention_heads", "n_head"),
    *("max_position_embeddings", "n_positions", "context_length"),
}


class _Bad(Exception):
    """A file is not as it has to be. The message goes on after the file's name."""


def refuse_unless_sound(source: ModelSource) -> None:
    """Raise StartupError if the files of a local model are cut, lie about their sizes, or could run code.

    Of a model on the Hub, the files are not known yet.
    """
    if not source.is_local:
        return
    folder = Path(source.location)
    path = folder / (source.gguf_file or "config.json")
    try:
        if source.gguf_file is not None:
            _check_gguf(path)
            return
        config = _json_object(path)
        weights = _weights(folder, config)
        num_tensors = 0
        for path in weights:
            num_tensors += _count_tensors(path)
        path = folder / "config.json"
        _check_numbers(config, num_tensors, sum(weight.stat().st_size for weight in weights))
    except (_Bad, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StartupError(f"'{path}' cannot be used: {reason}.") from error


@contextmanager
def reported(failure: str) -> Iterator[None]:
    """Raise StartupError in place of any error in the `with` block, as in "No model could be loaded from 'x': why".

    What reads files of a model can raise anything, even a panic of Rust code, which is no Exception. The traceback is
    logged for those who look for it (--log-level debug).
    """
    try:
        yield
    except (StartupError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        log.debug("%s", failure, exc_info=True)
        text = " ".join(str(error).split())
        if "trust_remote_code" in text:
            reason = "it needs code that comes with the model (auto_map), and oaiserve never runs such code"
        elif isinstance(error, OSError | ValueError | RuntimeError | ImportError) and text:
            reason = text if len(text) <= 300 else text[:300] + "…"
        else:  # the text of other errors says nothing without their name
            reason = f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
        raise StartupError(f"{failure}: {reason}") from error


def within(seconds: float, make: Callable[[], T], failure: str) -> T:
    """Return what `make` returns or raises, or raise StartupError if that takes longer. It then goes on in a thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="load", daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError as error:
        if future.done():  # it is the error of `make`
            raise
        raise StartupError(f"{failure}: its chat template does not end within {seconds:g} s") from error


def _json_object(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        data = file.read(_MOST_CONFIG_BYTES + 1)
    if len(data) > _MOST_CONFIG_BYTES:
        raise _Bad(f"it has more than {_MOST_CONFIG_BYTES >> 20} MiB")
    try:
        parsed = json.loads(data, parse_constant=_refuse_nan)
    except (ValueError, RecursionError) as error:
        raise _Bad(f"it is not valid JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise _Bad("it is not a JSON object")
    return parsed


def _refuse_nan(constant: str) -> float:
    if constant == "NaN":
        raise _Bad("it has the number NaN")
    return float(constant)


# -- weights in a folder ----------------------------------------------------------------------------------------------


def _weights(folder: Path, config: Mapping[str, Any]) -> list[Path]:
    """Return the files that transformers will take the weights from. Raises _Bad, or StartupError if there are none."""
    named = config.get("transformers_weights")
    if named is not None and not (
        isinstance(named, str) and named.endswith((".safetensors", ".safetensors.index.json"))
    ):
        raise _Bad("its transformers_weights is not a safetensors file")
    first = folder / (named or "model.safetensors")
    if first.is_file() and first.suffix == ".safetensors":
        return [first]
    index = first if named else folder / INDEX
    if not index.is_file():
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLED)
        if pickled:
            raise StartupError(
                f"'{folder}' has weights only as pickle ({pickled[0]}), a format that can run code when it is opened, "
                "so oaiserve does not open it; convert it where you trust it: python -c 'from transformers import "
                f'AutoModelForCausalLM as M; M.from_pretrained("{folder}").save_pretrained("CONVERTED")\''
            )
        raise StartupError(f"'{folder}' has no weights: there is neither model.safetensors nor {INDEX}.")
    try:
        files = _json_object(index).get("weight_map")
        if not isinstance(files, dict) or not files:
            raise _Bad("it has no weight_map")
        names = set()
        for name in files.values():
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise _Bad(f"it names {str(name)[:100]!r}, which is not a .safetensors file of this folder")
            names.add(name)
        for name in sorted(names):
            if not (folder / name).is_file():
                raise _Bad(f"it names {name[:100]}, which is missing")
    except _Bad as error:
        raise StartupError(f"'{index}' cannot be used: {error}.") from error
    return [folder / name for name in sorted(names)]


def _count_tensors(path: Path) -> int:
    """Return the number of tensors in a safetensors file. Raises _Bad if its header and its size do not agree."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
            raise _Bad("it is cut, or no safetensors file")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise _Bad("its header is not valid JSON") from error
    if not isinstance(header, dict):
        raise _Bad("its header is not a JSON object")
    header.pop("__metadata__", None)
    end = 0
    for name, tensor in header.items():
        offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
            raise _Bad(f"its header does not say where the tensor {name[:100]!r} is")
        end = max(end, *offsets)
    if 8 + length + end != size:
        raise _Bad(f"it has {size} bytes where its header says {8 + length + end}, so it is cut or damaged")
    return len(header)


# -- numbers ----------------------------------------------------------------------------------------------------------


def _check_numbers(config: Mapping[str, Any], num_tensors: int, num_bytes: int, prefix: str = "") -> None:
    """Raise _Bad for a number that the weights cannot have: each layer has a tensor, and each row of one some bits."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            _check_numbers(value, num_tensors, num_bytes, f"{name[:100]}.")
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        last = key.rpartition(".")[2]
        most = None
        if last in _LAYERS:
            most = num_tensors
        elif _COUNT.search(last):
            most = max(_MOST_COUNT, num_tensors)
        elif _SIZE.search(last) and not _NO_SIZE.search(last):
            most = 8 * num_bytes
        elif last.endswith(("_positions", "position_embeddings", "context_length")):
            most = _MOST_POSITIONS
        elif isinstance(value, int):
            most = 2**63 - 1
        if most is not None and value > most:
            raise _Bad(f"its {name[:100]} is {value:.6g}, but can be at most {most}")
        if last in _AT_LEAST_ONE and value < 1:
            raise _Bad(f"its {name[:100]} is {value}, but must be at least 1")


# -- GGUF -------------------------------------------------------------------------------------------------------------

_STRING, _ARRAY = 8, 9
# By the number of the type: its format for `struct`.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class _Gguf:
    """Reads the parts of a GGUF file one after the other. Raises _Bad where the file ends before a part does."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self.size, self._at = file, size, 0

    def number(self, form: str) -> Any:
        width = struct.calcsize(form)
        self._advance(width)
        return struct.unpack(f"<{form}", self._file.read(width))[0]

    def text(self) -> str:
        length = self.number("Q")
        self._advance(length)
        return self._file.read(length).decode(errors="replace")

    def value(self) -> Any:
        """Return a number, or None for a value of another kind."""
        kind = self.number("I")
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            self.skip(self.number("Q"))
        elif kind == _ARRAY:
            self._skip_array()
        else:
            raise _Bad(f"it has a value of the unknown type {kind}")
        return None

    def _skip_array(self) -> None:
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[kind]))
        elif kind == _STRING:
            for _ in range(self.at_most(count, 8)):
                self.skip(self.number("Q"))
        else:
            raise _Bad(f"it has an array of the unknown type {kind}")

    def at_most(self, count: int, bytes_each: int) -> int:
        """Return the count, unless the rest of the file is too short for so many."""
        if count * bytes_each > self.size - self._at:
            raise _Bad("it is cut, or lies about its counts")
        return count

    def skip(self, num_bytes: int) -> None:
        self._advance(num_bytes)
        self._file.seek(num_bytes, 1)

    def _advance(self, num_bytes: int) -> None:
        self.at_most(num_bytes, 1)
        self._at += num_bytes


def _check_gguf(path: Path) -> None:
    """Raise _Bad if the counts, sizes or numbers in the head of a GGUF file cannot be true."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise _Bad("it is no GGUF file")
        gguf = _Gguf(file, size - 4)
        version = gguf.number("I")
        if version not in (2, 3):
            raise _Bad(f"its GGUF version is {version}, but must be 2 or 3")
        num_tensors, num_values = gguf.number("Q"), gguf.number("Q")
        gguf.at_most(num_tensors, 24)
        values = {}
        for _ in range(gguf.at_most(num_values, 13)):
            key = gguf.text()
            values[key] = gguf.value()
        for _ in range(num_tensors):
            name, num_dimensions = gguf.text(), gguf.number("I")
            if num_dimensions > 8:
                raise _Bad(f"its tensor {name[:100]!r} has {num_dimensions} dimensions")
            num_elements = 1
            for _ in range(num_dimensions):
                num_elements *= gguf.number("Q")
            kind_and_offset = gguf.number("I"), gguf.number("Q")
            if num_elements > 8 * size or kind_and_offset[1] > size:
                raise _Bad(f"its tensor {name[:100]!r} is larger than the file, so it is cut or lies about its sizes")
    _check_numbers(values, num_tensors, size)
