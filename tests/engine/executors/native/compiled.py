"""Compiles programs and libraries of tests once: like the native code itself, they stay in the cache for later runs."""

import subprocess
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from oaiserve.engine.executors.native import build, variants
from oaiserve.storage import private

HERE = Path(__file__).parent


class CompilerError(Exception):
    """A compiler failed. The message is all that it said."""


def compiled(compiler: str, flags: Iterable[str], *sources: Path) -> Path:
    """Return the output of the compiler for the sources, which may include headers of this folder and of the product.

    No flag names a folder, so that all checkouts share the output. Other processes wait for the one that compiles.
    Raises CompilerError.
    """
    includes = [f"-I{build.SOURCES}", f"-I{HERE}"]
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    contents = [path.read_text() for path in (*sources, *sorted(HERE.glob("*.h")))]
    digest = variants.digest(version, build._cpu_features(), *flags, *contents).hex()
    folder = private.cache_folder() / "tests" / f"{sources[0].stem}-{digest[:16]}"
    output = folder / "output"
    private.make_folder(folder)
    with private.locked(folder):
        if not output.exists():
            with TemporaryDirectory(dir=folder) as scratch:
                unfinished = Path(scratch) / "output"
                command = [compiler, *flags, *includes, *map(str, sources), "-o", str(unfinished)]
                run = subprocess.run(command, capture_output=True, text=True)
                if run.returncode != 0:
                    raise CompilerError(run.stderr)
                unfinished.replace(output)
    return output
