"""The files of a model on this disk: its configuration, the headers of its weight files, and a list of these files.

Stdlib only. `soundness` checks them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from oaiserve.checkpoints.bad_file import BadFile
from oaiserve.checkpoints.gguf import GgufHead, read_head
from oaiserve.checkpoints.safetensors_header import read_header
from oaiserve.errors import StartupError

CONFIG = "config.json"
GENERATION = "generation_config.json"
INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MOST_CONFIG_BYTES = 2**24


class Checkpoint:
    """A model's folder, or its GGUF file. Each file is read once, when something first needs it.

    Properties and methods raise BadFile and OSError for a file that cannot be read.
    """

    def __init__(self, folder: Path, gguf_file: str | None = None) -> None:
        self.folder = folder
        self.path = folder / (gguf_file or "")
        self._objects: dict[str, Mapping[str, Any]] = {}
        self._headers: dict[Path, tuple[dict[str, Any], int]] = {}

    @staticmethod
    def at(path: Path) -> Checkpoint:
        return Checkpoint(path.parent, path.name) if path.suffix == ".gguf" else Checkpoint(path)

    @cached_property
    def head(self) -> GgufHead:
        """The metadata of a GGUF file, and the positions of its tensors."""
        return read_head(self.path)

    def head_digest(self, path: Path) -> str:
        """Return the SHA-256 of the head (metadata and tensor list) of one of a GGUF model's files."""
        return self.head.digest(path)

    @property
    def config(self) -> Mapping[str, Any]:
        return self.object(CONFIG)

    def object(self, name: str) -> Mapping[str, Any]:
        """Return the object in a JSON file of the folder."""
        if name not in self._objects:
            self._objects[name] = json_object(self.folder / name)
        return self._objects[name]

    def header(self, path: Path) -> tuple[Mapping[str, Any], int]:
        """Return the header of a safetensors file, and the offset at which its data begin."""
        if path not in self._headers:
            self._headers[path] = read_header(path)
        return self._headers[path]

    @cached_property
    def weight_files(self) -> list[Path]:
        """The safetensors files as transformers chooses them. Raises StartupError if there are none."""
        named = self.config.get("transformers_weights")
        if named is not None and not (
            isinstance(named, str) and named.endswith((".safetensors", ".safetensors.index.json"))
        ):
            raise BadFile("its transformers_weights is not a safetensors file")
        first = self.folder / (named or "model.safetensors")
        if first.is_file() and first.suffix == ".safetensors":
            return [first]
        index = first if named else self.folder / INDEX
        if not index.is_file():
            pickled = sorted(
                (path for path in self.folder.iterdir() if path.suffix in PICKLED),
                key=lambda path: (not path.name.startswith("pytorch_model"), path.name),
            )
            if pickled:
                raise StartupError(
                    f"'{self.folder}' has weights only as pickle ({pickled[0].name}), a format that can run code when "
                    f"it is opened, so oaiserve does not open it. Convert it with: {conversion(pickled[0], first.name)}"
                )
            raise StartupError(f"'{self.folder}' has no weights: there is neither model.safetensors nor {INDEX}.")
        try:
            files = self.object(index.name).get("weight_map")
            if not isinstance(files, dict) or not files:
                raise BadFile("it has no weight_map")
            names = set()
            for name in files.values():
                if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                    raise BadFile(f"it names {str(name)[:100]!r}, which is not a .safetensors file of this folder")
                names.add(name)
            for name in sorted(names):
                if not (self.folder / name).is_file():
                    raise BadFile(f"it names {name[:100]}, which is missing")
        except BadFile as error:
            raise StartupError(f"'{index}' cannot be used: {error}.") from error
        return [self.folder / name for name in sorted(names)]


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises BadFile and OSError."""
    with path.open("rb") as file:
        data = file.read(_MOST_CONFIG_BYTES + 1)
    if len(data) > _MOST_CONFIG_BYTES:
        raise BadFile(f"it has more than {_MOST_CONFIG_BYTES >> 20} MiB")
    try:
        parsed = json.loads(data, parse_constant=_refuse_nan)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"it is not valid JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise BadFile("it is not a JSON object")
    return parsed


def conversion(pickled: Path, name: str) -> str:
    """Return a shell command that converts a pickled file, or all its shards, to a safetensors file of this name. The
    command runs none of the code in them."""
    shards = re.sub(r"-\d{5}-of-\d{5}", "-*-of-*", pickled.name)
    return (
        f'python -c \'import pathlib, torch, safetensors.torch as s; d = pathlib.Path("{pickled.parent}"); '
        f'w = {{n: t.contiguous().clone() for f in d.glob("{shards}") for n, t in torch.load(f, weights_only=True)'
        f'.items()}}; s.save_file(w, d / "{name}", {{"format": "pt"}})\''
    )


def _refuse_nan(constant: str) -> float:
    if constant == "NaN":
        raise BadFile("it has the number NaN")
    return float(constant)
