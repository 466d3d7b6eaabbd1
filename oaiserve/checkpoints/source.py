"""Finds the weights that MODEL names: a folder, a GGUF file, or a repository of the Hugging Face hub. Stdlib only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from itertools import islice
from pathlib import Path

from oaiserve.checkpoints.checkpoint import Checkpoint
from oaiserve.errors import StartupError

# A repository, and optionally one of its GGUF files after a colon.
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?|[\w.-]+/[\w.-]+:[\w./-]+")
# A name in Ollama's library, such as llama3.2:1b
_OF_OLLAMA = re.compile(r"([\w.-]+/)?[\w.-]+:[\w.-]+")
_WITH_NAME = re.compile(r"([\w.-]+)=(.+)")
_WITH_HOST = re.compile(r"(https?://)?(hf\.co|huggingface\.co)/")
_MOST_ENTRIES = 10_000  # A folder is searched for a similar name only up to this many entries.
_SIMILAR = 0.75


@dataclass(frozen=True)
class ModelSource:
    location: str  # a folder, or a name on the hub: ID, or ID:FORMAT for a GGUF file
    gguf_file: str | None  # the file's name within the folder
    is_local: bool

    @property
    def path(self) -> Path:
        return Path(self.location) / (self.gguf_file or "")

    @property
    def folder(self) -> Path:
        return Path(self.location)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The files of a local model. All readers share this object, so that each file is opened once."""
        return Checkpoint(self.folder, self.gguf_file)

    @property
    def shown(self) -> str:
        """Return the name as an error should show it: a hub id, or perhaps a misspelt folder."""
        if self.is_local:
            return f"'{self.path}'"
        there = nearest(Path(self.location))
        similar = f" (there is '{there}')" if there else ""
        return f"'{self.location}', which is no folder here{similar} and so was looked for on the Hugging Face hub"


def find_model(model: str | Path) -> ModelSource:
    """Return the source of a model, without loading it. Raises StartupError for an impossible name."""
    allowed = "It must be a folder, a .gguf file, a hub id (of GGUF files ID:Q4_K_M), or demo."
    name = str(model)
    path = Path(model)
    is_gguf = path.suffix == ".gguf" and (":" not in name or path.is_file())
    if not name:
        raise StartupError(f"MODEL is empty. {allowed}")
    if path.is_file() and not is_gguf:
        raise StartupError(f"MODEL is '{name}', a file that is not a .gguf file. {allowed}")
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(file.name for file in path.glob("*.gguf") if not is_mmproj(file.name))
        if files:
            instead = f" Give one of its .gguf files instead, such as '{path / files[0]}'."
        elif (path / "adapter_config.json").is_file():
            instead = f" It has an adapter: serve the model that it is for, with --lora NAME={name}."
        elif (path / "modules.json").is_file():
            instead = (
                " sentence-transformers saved it long ago. Save it again: python -c 'import sentence_transformers as "
                f's; s.SentenceTransformer("{name}").save_pretrained("NEW")\''
            )
        else:
            instead = ""
        raise StartupError(f"MODEL is '{name}', a folder without a config.json, so it has no model to load.{instead}")
    could_be_hub_id = _HUB_ID.fullmatch(name) and not name.startswith(".") and not is_gguf
    if not path.exists() and not could_be_hub_id:
        raise StartupError(f"MODEL is '{name}', which does not exist. {_hint(name) or allowed}")
    if is_gguf:
        return ModelSource(str(path.parent), path.name, is_local=True)
    return ModelSource(name, None, is_local=path.exists())


def _hint(name: str) -> str | None:
    """Return a hint at what was probably meant by a path that does not exist, or None."""
    if match := _WITH_NAME.fullmatch(name):
        return (
            f"NAME=MODEL is for several models. To serve one under a name: oaiserve serve {match[2]} "
            f"--served-model-name {match[1]}"
        )
    if there := nearest(Path(name)):
        return f"There is '{there}'."
    if match := _WITH_HOST.match(name):
        return f"Give a hub id without {match[0]!r}: {name[match.end() :]}."
    if _OF_OLLAMA.fullmatch(name):
        return (
            "It looks like a name of Ollama's library. Give a hub id, such as bartowski/Llama-3.2-1B-Instruct-GGUF:"
            f"Q4_K_M; or link Ollama's file under a name that ends with .gguf: 'ollama show {name} --modelfile' prints "
            "its path after FROM."
        )
    return None


def nearest(path: Path) -> str | None:
    """Return the path of an existing folder or GGUF file whose name is similar to a missing one's, or None."""
    missing = next((each for each in (*reversed(path.parents), path) if not each.exists()), path)
    try:
        with os.scandir(missing.parent) as entries:
            names = [
                entry.name
                for entry in islice(entries, _MOST_ENTRIES)
                if entry.is_dir() or (entry.name.endswith(".gguf") and missing == path)
            ]
    except OSError:  # The parent is a file, or can't be read.
        return None
    wanted = missing.name.lower()
    plain = {name.lower(): name for name in names} | {name.lower().removesuffix(".gguf"): name for name in names}
    similar = get_close_matches(wanted, plain, 1, _SIMILAR)
    if not similar:
        return None
    there = missing.with_name(plain[similar[0]])
    whole = there / path.relative_to(missing)
    return str(whole if whole.exists() else there)


def find_mmproj(source: ModelSource, named: Path | None) -> Path | None:
    """Return the file that reads images for a GGUF file: the named one, or one in the same folder. Raises StartupError
    if the named file does not exist, or if the model is not a GGUF file."""
    if named is not None and (source.gguf_file is None or not named.is_file()):
        if source.gguf_file is not None:
            why = "which does not exist"
        else:
            why = "but only a GGUF file has such a file next to it"
        raise StartupError(f"--mmproj is '{named}', {why}.")
    if named is not None or source.gguf_file is None:
        return named
    best = best_mmproj(path.name for path in source.path.parent.glob("*.gguf"))
    if best is None:
        return None
    return source.path.with_name(best)


def is_mmproj(name: str) -> bool:
    return "mmproj" in name.lower()


def best_mmproj(names: Iterable[str]) -> str | None:
    """Return the file that reads images, given the names of files. If there are several, float16 is preferred."""
    encoders = [name for name in names if name.endswith(".gguf") and is_mmproj(name)]
    return min(encoders, key=lambda name: (re.search(r"(?<!b)f16", name.lower()) is None, name), default=None)
