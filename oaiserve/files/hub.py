"""Fetch the files of a model from the Hugging Face hub into the hub's own cache, from where all starts read them.

Of a repository, only the files that are read are fetched: no weights of other programs, and no second copy of them. Of
the many GGUF files in one repository, it is the named one.
"""

from __future__ import annotations

import logging
import re
import threading
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from oaiserve.errors import StartupError
from oaiserve.files.gguf import SHARD
from oaiserve.files.load_errors import reported
from oaiserve.files.progress import Progress
from oaiserve.files.source import ModelSource, best_mmproj, find_model

log = logging.getLogger(__name__)

_TEXTS = (".json", ".txt", ".model", ".tiktoken", ".jinja")
_WEIGHTS = ".safetensors"
_MODULE = re.compile(r"\d+_\w+")  # the folders of sentence-transformers' modules behind a model
_MOST_SHOWN = 12
TIMEOUT_SECONDS = 3.0
PROXIES = "Behind a proxy, set HTTPS_PROXY; HF_ENDPOINT names a mirror of the hub"
_WAYS_OUT = (
    f"{PROXIES}, and HF_TOKEN opens a model that is not public. Without the hub there are a folder, a .gguf file, and "
    "'oaiserve serve demo', a small model that the package index has, too."
)


def local_source(model: str | Path) -> ModelSource:
    """Return the place of a model on this machine, after fetching it if it is ID or ID:FORMAT on the hub.

    If the hub does not answer, the model must be in its cache. Raises StartupError if there is no such model.
    """
    source = find_model(model)
    return source if source.is_local else fetched(source)


def fetched(source: ModelSource, *, with_media: bool = True) -> ModelSource:
    """Return the place of a model of the hub on this machine, see `local_source`. With `with_media`, a GGUF file has
    beside it what reads its images, if the repository has that."""
    from huggingface_hub import HfApi, snapshot_download

    for client in ("httpx", "httpx2"):  # whichever the hub's client has: a line for each of its requests
        logging.getLogger(client).setLevel(logging.WARNING)
    repository, _, named = source.location.partition(":")
    offline = not is_reachable()
    if offline:
        try:
            folder = Path(snapshot_download(repository, allow_patterns=[], local_files_only=True))
        except OSError as error:
            raise StartupError(
                f"'{repository}' is no folder here, the Hugging Face hub does not answer, and its cache has none such. "
                f"{_WAYS_OUT}"
            ) from error
        names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    else:
        with _reported(f"No model could be loaded from {source.shown}"):
            names = HfApi().list_repo_files(repository)
    try:
        wanted = gguf_files(repository, names, named) if named else files_of_model(repository, names)
    except StartupError as error:
        if offline:
            raise StartupError(f"The Hugging Face hub does not answer. In its cache, {error}") from error
        raise
    if named and with_media:
        beside = [name for name in names if PurePosixPath(name).parent == PurePosixPath(wanted[0]).parent]
        wanted += filter(None, [best_mmproj(beside)])
    log.info("'%s' is read from the hub's cache%s", repository, ", for the hub does not answer" if offline else "")
    with _reported(f"The files of '{repository}' could not be fetched"):
        folder = Path(
            snapshot_download(repository, allow_patterns=wanted, local_files_only=offline, tqdm_class=Progress)
        )
    if not named:
        return ModelSource(str(folder), None, is_local=True)
    path = folder / wanted[0]
    return ModelSource(str(path.parent), path.name, is_local=True)


@contextmanager
def _reported(failure: str) -> Iterator[None]:
    """Raise StartupError in place of any error in the `with` block, with what may help."""
    try:
        with reported(failure):
            yield
    except StartupError as error:
        raise StartupError(f"{str(error).rstrip('.')}. {_WAYS_OUT}") from error.__cause__


def gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the GGUF files of each model in a repository, shards in order, by the name without a number."""
    models: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        if name.endswith(".gguf") and "mmproj" not in name.lower():  # which is for images
            models[SHARD.sub("", name)].append(name)
    return models


def gguf_files(repository: str, names: Iterable[str], named: str) -> list[str]:
    """Return the named GGUF file of a repository, with all its shards in order. The name is Q4_K_M or the file's.

    Raises StartupError unless exactly one file has it.
    """
    models = gguf_models(names)
    named = SHARD.sub("", named)
    ending = re.compile(rf"(^|[-./]){re.escape(named.removesuffix('.gguf'))}\.gguf$", re.IGNORECASE)
    found = [name for name in models if name.lower() == named.lower()]
    found = found or [name for name in models if ending.search(name)]
    if len(found) == 1:
        return models[found[0]]
    why = "more than one GGUF file" if found else "no GGUF file"
    raise StartupError(f"'{repository}' has {why} of the name '{named}': it has {_shown(found or models)}.")


def files_of_model(repository: str, names: list[str]) -> list[str]:
    """Return the files of a repository that are read. Raises StartupError if none has readable weights."""
    at_root = [name for name in names if "/" not in name]
    weights = [name for name in at_root if name.endswith(_WEIGHTS)]
    weights = [name for name in weights if name.startswith("model")] or weights
    if not weights:
        ggufs = [name for name in names if name.endswith(".gguf")]
        if ggufs:
            raise StartupError(
                f"'{repository}' has its weights in GGUF files. Name one of them behind a colon, by its format or by "
                f"its name, such as '{repository}:{PurePosixPath(ggufs[0]).name}': it has {_shown(ggufs)}."
            )
        raise StartupError(
            f"'{repository}' has no weights that are read: there are neither safetensors nor GGUF files."
        )
    texts = [name for name in at_root if name.endswith(_TEXTS) or name.startswith("tokenizer")]
    of_modules = [
        name
        for name in names
        if len(parts := PurePosixPath(name).parts) == 2
        and _MODULE.fullmatch(parts[0])
        and name.endswith((*_TEXTS, _WEIGHTS))
    ]
    return [*texts, *weights, *of_modules]


def _shown(names: Iterable[str]) -> str:
    found = sorted(names)
    more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    return ", ".join(found[:_MOST_SHOWN]) + more if found else "none"


def is_reachable() -> bool:
    """Return whether the hub, or the mirror that HF_ENDPOINT names, answers a request, with any status.

    Its own client would try for a minute. With HF_HUB_OFFLINE, no request is made.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def ask() -> None:
        try:
            request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):
                answered.set()
        except urllib.error.HTTPError:
            answered.set()
        except (OSError, ValueError):
            pass  # unreachable, refused, or not a URL: the event stays unset

    # The request runs on a thread, because resolving a host name has no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(TIMEOUT_SECONDS)
    return answered.is_set()
