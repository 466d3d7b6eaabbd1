"""Fetches the files of a model from the Hugging Face hub into the hub's own cache, from which every start reads them.

Only the files that are read are fetched: no weights for other programs, no second copy in another format, and only the
named one of a repository's many GGUF files.
"""

from __future__ import annotations

import errno
import logging
import re
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

from oaiserve.checkpoints.bad_file import BadFile
from oaiserve.checkpoints.checkpoint import INDEX, PICKLED, json_object
from oaiserve.checkpoints.gguf import SHARD
from oaiserve.checkpoints.load_errors import named as as_text
from oaiserve.checkpoints.progress import Progress
from oaiserve.checkpoints.proxies import advice_on_proxy
from oaiserve.checkpoints.source import ModelSource, best_mmproj, find_model, is_mmproj
from oaiserve.errors import StartupError
from oaiserve.storage.private import expanded

T = TypeVar("T")
log = logging.getLogger(__name__)

_TEXTS = (".json", ".txt", ".model", ".tiktoken", ".jinja")
_WEIGHTS = ".safetensors"
_LAYERS_FOR_TOKENS = ("sparse_linear.safetensors", "colbert_linear.safetensors")  # BGE-M3 has these files
# Files with these prefixes affect a model's answers. Other files at the root are licences or for other programs.
_CONFIGURATIONS = (
    *("config", "generation_config", "tokenizer.json", "tokenizer_config", "special_tokens_map", "added_tokens"),
    *("chat_template", "preprocessor_config", "processor_config", "model.safetensors.index", "modules", "sentence_"),
    "tekken",
)
# Folders of sentence-transformers modules that are applied after a model, and of named chat templates.
_FOLDER = re.compile(r"\d+_\w+|additional_chat_templates")
_MOST_SHOWN = 12
TIMEOUT_SECONDS = 3.0
RETRY_SECONDS = (1.0, 3.0)  # pauses between requests to the hub, if a model is not in the cache
_WITHOUT_HUB = (
    "Without the hub you can serve a folder, a .gguf file, or the small model of 'oaiserve serve demo', which the "
    "package index has, too"
)
# Errors of the local disk while files from the hub are written
_OF_DISK = {
    *(errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENAMETOOLONG, errno.ENOSPC, errno.ENOTDIR),
    *(errno.EPERM, errno.EROFS),
}
# The meaning of the hub's status codes, and what the user can do. Any other status is an error of the hub itself.
_STATUSES = {
    401: ("shows this model to nobody without a valid token", "Check the name, or set HF_TOKEN to a valid token"),
    403: (
        "does not let this token read the model, or it is gated",
        "Accept its licence at {url}, and set HF_TOKEN to a token of that account",
    ),
    404: ("has no such model", "Check the name"),
    429: ("gets too many requests from here", "Wait some minutes, or set HF_TOKEN: requests with a token may be more"),
}


class HubTrouble(Exception):
    """The hub does not send the requested files. The message continues a sentence after "the Hugging Face hub"."""

    def __init__(self, reason: str, advice: str | None = None, status: int | None = None) -> None:
        super().__init__(reason)
        self.advice = advice if advice is not None else f"{how_to_reach()}. {_WITHOUT_HUB}"
        self.status = status

    @property
    def is_passing(self) -> bool:
        """Return whether the error is temporary, so that a retry may succeed."""
        return self.status is not None and (self.status == 429 or self.status >= 500)


class _Request(NamedTuple):
    """The files of a repository that a start requests."""

    repository: str
    named: str  # one of its GGUF files, or ""
    with_media: bool

    def files_in(self, names: Iterable[str]) -> list[str]:
        """Return the files to read, given all names in the repository, which may be unsafe paths. Raises
        StartupError."""
        safe = [name for name in names if not name.startswith("/") and ".." not in PurePosixPath(name).parts]
        if not self.named:
            return files_of_model(self.repository, safe)
        files = gguf_files(self.repository, safe, self.named)
        beside = [name for name in safe if PurePosixPath(name).parent == PurePosixPath(files[0]).parent]
        mmproj = best_mmproj(beside) if self.with_media else None
        if mmproj is None:
            return files
        return [*files, mmproj]

    def source(self, folder: Path, files: list[str]) -> ModelSource:
        if not self.named:
            return ModelSource(str(folder), None, is_local=True)
        path = folder / files[0]
        return ModelSource(str(path.parent), path.name, is_local=True)


def local_source(model: str | Path) -> ModelSource:
    """Return the local path of a model, after fetching it if it is ID or ID:FORMAT on the hub.

    If the hub can't be reached, its cache must have a complete copy. Raises StartupError if there is none.
    """
    source = find_model(model)
    if source.is_local:
        return source
    return fetched(source)


def in_cache(source: ModelSource) -> ModelSource:
    """Return the path of a hub model in the hub's cache. Raises StartupError unless the cache has a complete copy."""
    repository, _, named = source.location.partition(":")
    return _cached(_Request(repository, named, with_media=False))


def fetched(source: ModelSource, *, with_media: bool = True) -> ModelSource:
    """Return the local path of a hub model; see `local_source`. With `with_media`, the file that reads images for a
    GGUF file is next to it, if the repository has one."""
    from huggingface_hub import snapshot_download

    for client in ("httpx", "httpx2"):  # Either may be the hub's client, and it logs each of its requests.
        logging.getLogger(client).setLevel(logging.WARNING)
    repository, _, named = source.location.partition(":")
    request = _Request(repository, named, with_media)
    cached: ModelSource | None = None
    try:
        cached = _cached(request)
        why_not = ""
    except StartupError as error:
        why_not = str(error)
    try:
        commit, names = _listed(repository, is_patient=cached is None)
        try:
            files = request.files_in(names)
        except StartupError as error:
            if cached is None:
                raise
            raise HubTrouble(f"has other files now ({str(error).rstrip('.')})") from error
        folder = _storage(repository) / "snapshots" / commit
        if _missing(folder, files):
            try:
                folder = Path(snapshot_download(repository, allow_patterns=files, tqdm_class=Progress))
            except Exception as error:  # The hub's client raises what its libraries raise.
                raise _trouble(error, repository) from error
        if missing := _missing(folder, files):
            raise HubTrouble(f"has not sent {_shown(missing)}")
    except HubTrouble as trouble:
        if cached is None:
            raise StartupError(
                f"No model could be loaded from {source.shown}: the hub {trouble}, and {why_not.rstrip('.')}. "
                f"{trouble.advice}."
            ) from trouble
        level = logging.INFO if is_offline() else logging.WARNING
        log.log(level, "'%s' starts from the cache, because the Hugging Face hub %s", source.location, trouble)
        return cached
    log.debug("'%s' is read from the hub's cache", repository)
    return request.source(folder, files)


def _listed(repository: str, *, is_patient: bool) -> tuple[str, list[str]]:
    """Return the newest commit of a repository on the hub, and the names of its files. Raises HubTrouble, after several
    tries if `is_patient`."""
    for seconds in (*RETRY_SECONDS, None) if is_patient else (None,):
        try:
            return ask_hub(repository)
        except HubTrouble as trouble:
            if seconds is None or not trouble.is_passing:
                raise
            log.warning("The Hugging Face hub %s; trying again in %g s", trouble, seconds)
            time.sleep(seconds)
    raise AssertionError


def ask_hub(repository: str) -> tuple[str, list[str]]:
    """Return the newest commit of a repository on the hub, and the names of its files, with one request. Raises
    HubTrouble."""
    from huggingface_hub import HfApi

    if is_offline():
        raise HubTrouble("is not asked, because HF_HUB_OFFLINE is set", "Unset that once, to fetch it")
    api = HfApi()
    try:
        info = _in_time(lambda: api.model_info(repository, timeout=TIMEOUT_SECONDS))
    except Exception as error:  # The hub's client raises what its libraries raise.
        raise _trouble(error, repository) from error
    return info.sha or "", [file.rfilename for file in info.siblings or ()]


def _in_time(ask: Callable[[], T]) -> T:
    """Call `ask` on a thread and return its result. The thread is needed because resolving a host name has no timeout.

    Raises the function's errors, and TimeoutError if there is no answer soon after the timeout of its request.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(TIMEOUT_SECONDS + 1)
    except TimeoutError:
        raise TimeoutError(f"no answer in {TIMEOUT_SECONDS:g} s") from None


def _trouble(error: BaseException, repository: str) -> HubTrouble:
    from huggingface_hub import constants

    if isinstance(error, OSError) and error.errno in _OF_DISK:
        return HubTrouble(
            f"sends files that cannot be stored in {_storage(repository)} ({error.strerror})",
            "Set HF_HOME to a folder with room for them that you can write to",
        )
    cause: BaseException | None = error
    while cause is not None and getattr(cause, "response", None) is None:
        cause = cause.__cause__
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if status is None:
        return HubTrouble(f"does not answer ({as_text(error).rstrip('.')})")
    does, advice = _STATUSES.get(status, ("has trouble of its own", "Try again later"))
    url = f"{constants.ENDPOINT}/{repository}"
    return HubTrouble(f"{does} (status {status})", f"{advice.format(url=url)}. {_WITHOUT_HUB}", status)


def how_to_reach() -> str:
    """Return advice for a hub that does not answer: sentences without the last full stop."""
    from huggingface_hub import constants

    return f"{advice_on_proxy(constants.ENDPOINT)}; HF_ENDPOINT names a mirror of the hub"


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE is set, so that the hub must get no requests."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def storage_folder() -> Path:
    """Return the folder of the hub's own cache, which stores the files of all models from the hub."""
    from huggingface_hub import constants

    return expanded(constants.HF_HUB_CACHE, "HF_HOME")


def _storage(repository: str) -> Path:
    return storage_folder() / f"models--{repository.replace('/', '--')}"


def _cached(request: _Request) -> ModelSource:
    """Return a complete copy in the hub's cache: of the main branch, or else of the newest commit. Raises StartupError
    with the reason if there is none."""
    storage = _storage(request.repository)
    reasons = []
    try:
        main = (storage / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        main = ""
    folders = [path for path in storage.glob("snapshots/*") if path.is_dir()]
    for folder in sorted(folders, key=lambda path: (path.name != main, -path.stat().st_mtime)):
        try:
            listed = _files_by_hub(storage, folder.name)
            if listed is not None:
                files = request.files_in(listed)
                needed = _needed(files)
            else:
                files = request.files_in(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
                needed = [*files, *_further_parts(folder, files)]
            if not (missing := _missing(folder, needed)):
                if lost := _missing(folder, filter(is_mmproj, files)):
                    log.warning("The cache lacks %s, so no images are read", lost[0])
                return request.source(folder, files)
            reasons.append(f"its cache lacks {_shown(missing)}, as after a download that was cut off")
        except StartupError as error:
            reasons.append(f"in its cache, {error}")
    raise StartupError(reasons[0] if reasons else "its cache has none such")


def _files_by_hub(storage: Path, commit: str) -> list[str] | None:
    with suppress(BadFile, OSError):
        files = json_object(storage / "trees" / f"{commit}.json").get("files")
        if isinstance(files, dict):
            return [*files]
        return None
    return None


def _needed(files: list[str]) -> list[str]:
    """Return the files without which a model can't start. A copy that another program fetched may have only these."""
    if files[0].endswith(".gguf"):
        return [name for name in files if not is_mmproj(name)]
    read = _CONFIGURATIONS if "tokenizer.json" in files else (*_CONFIGURATIONS, "vocab", "merges", "tokenizer.model")
    return [name for name in files if name.endswith(_WEIGHTS) or "/" in name or name.startswith(read)]


def _further_parts(folder: Path, files: list[str]) -> list[str]:
    """Return further files that the model needs: its config, and the shards that a file name or an index implies."""
    needed = [] if files[0].endswith(".gguf") else ["config.json"]
    if (shard := SHARD.search(files[0])) is not None:
        start = files[0][: shard.start()]
        number = shard[2]
        needed += [f"{start}-{part + 1:05}-of-{number}.gguf" for part in range(int(number))]
    if INDEX in files and "model.safetensors" not in files:
        with suppress(BadFile, OSError, AttributeError, KeyError):  # Loading the model reports the error.
            needed += {str(name) for name in json_object(folder / INDEX)["weight_map"].values()}
    return needed


def _missing(folder: Path, files: Iterable[str]) -> list[str]:
    return sorted(name for name in {*files} if not (folder / name).is_file())


def gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the GGUF files of each model in a repository, with shards in order, keyed by the name without a shard
    number."""
    models: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        if name.endswith(".gguf") and not is_mmproj(name):
            models[SHARD.sub("", name)].append(name)
    return models


def gguf_files(repository: str, names: Iterable[str], named: str) -> list[str]:
    """Return the named GGUF file of a repository, with all its shards in order. The name is a format such as Q4_K_M, or
    the file's.

    Raises StartupError unless exactly one model matches.
    """
    models = gguf_models(names)
    named = SHARD.sub("", named)
    ending = re.compile(rf"(^|[-./]){re.escape(named.removesuffix('.gguf'))}\.gguf$", re.IGNORECASE)
    matches = [name for name in models if name.lower() == named.lower()]
    matches = matches or [name for name in models if ending.search(name)]
    if len(matches) == 1:
        return models[matches[0]]
    why = "more than one GGUF file" if matches else "no GGUF file"
    raise StartupError(f"'{repository}' has {why} of the name '{named}': it has {_shown(matches or models)}.")


def files_of_model(repository: str, names: list[str]) -> list[str]:
    """Return the files of a repository that are read. Raises StartupError if none has readable weights."""
    at_root = [name for name in names if "/" not in name]
    weights = [name for name in at_root if name.endswith(_WEIGHTS)]
    weights = [name for name in weights if name.startswith("model") or name in _LAYERS_FOR_TOKENS] or weights
    if not weights:
        ggufs = [name for name in names if name.endswith(".gguf")]
        if ggufs:
            raise StartupError(
                f"'{repository}' has its weights in GGUF files. Name one of them after a colon, by its format or by "
                f"its name, such as '{repository}:{PurePosixPath(ggufs[0]).name}': it has {_shown(ggufs)}."
            )
        pickled = ""
        if any(name.endswith(PICKLED) for name in at_root):
            pickled = (
                f" It has pickled ones: fetch them with 'hf download {repository} --local-dir FOLDER'; the error of "
                "'oaiserve serve FOLDER' has a command that converts them."
            )
        raise StartupError(
            f"'{repository}' has no weights that are read: there are neither safetensors nor GGUF files.{pickled}"
        )
    texts = [name for name in at_root if name.endswith(_TEXTS) or name.startswith("tokenizer")]
    in_folders = [
        name
        for name in names
        if len(parts := PurePosixPath(name).parts) == 2
        and _FOLDER.fullmatch(parts[0])
        and name.endswith((*_TEXTS, _WEIGHTS))
    ]
    return [*texts, *weights, *in_folders]


def _shown(names: Iterable[str]) -> str:
    ordered = sorted(names)
    if len(ordered) > _MOST_SHOWN:
        more = f" and {len(ordered) - _MOST_SHOWN} more"
    else:
        more = ""
    if ordered:
        return ", ".join(ordered[:_MOST_SHOWN]) + more
    return "none"


def is_reachable() -> bool:
    """Return whether the hub, or the mirror in HF_ENDPOINT, answers a request, with any status.

    The hub's own client would retry for a minute. With HF_HUB_OFFLINE, no request is made.
    """
    from huggingface_hub import constants

    if is_offline():
        return False
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        _in_time(lambda: urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS).close())
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):  # unreachable, rejected, no answer in time, or not a URL
        return False
    return True
