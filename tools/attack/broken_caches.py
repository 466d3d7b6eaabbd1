"""Starts a model with spoiled files in the cache, hundreds of times: python -m tools.attack.broken_caches --seed 1

A small model is started once with --quantize int8, which leaves a record of its tokenizer, a record of the start, and a
file with the quantized weights. A record is edited, with a right checksum, or any of the three is replaced by something
else. Whatever a file has, it may only count as missing: each start has to answer as the first one did. The exit code is
1 if one does not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from oaiserve.storage.private import cache_folder
from tests.engine.executors.native.small_models import FAMILIES, make_model
from tests.engine.remembered import OPTIONS as ON_CPU
from tests.engine.remembered import answer, save
from tools.attack.broken_files import WALL_SECONDS
from tools.attack.spoils import changed_bytes, cut, edited

DIGEST_BYTES = hashlib.sha256().digest_size
OPTIONS = ON_CPU | {"quantize": "int8"}
FOLDERS = ("remembered", "quantized")  # folders of records, and of weights
PARTS = ("data", "data", "data", "files", "versions", "format", "day")  # parts of a header; most of it is data


def edited_record(content: bytes, rng: random.Random) -> bytes:
    """Return a record with an edited header and a right checksum."""
    line, _, rest = content[:-DIGEST_BYTES].partition(b"\n")
    header = json.loads(line)
    part = rng.choice(PARTS)
    header[part] = edited(header[part], rng)
    written = json.dumps(header).encode() + b"\n" + rest
    return written + hashlib.sha256(written).digest()


def nested(content: bytes, rng: random.Random) -> bytes:
    written = b"[" * rng.choice((10, 1_000, 1_000_000)) + b"\n"
    return written + hashlib.sha256(written).digest()


def spoil(path: Path, content: bytes, rng: random.Random) -> str:
    """Put something else in the place of a file, and return what. Weights have no header to edit."""
    path.unlink()
    edits = () if path.parent.name == "quantized" else ("edited",) * 8
    match rng.choice((*edits, "nested", "cut", "bytes", "folder", "link", "pipe")):
        case "edited" as way:
            path.write_bytes(edited_record(content, rng))
        case "nested" as way:
            path.write_bytes(nested(content, rng))
        case "cut" as way:
            path.write_bytes(cut(content, rng))
        case "bytes" as way:
            path.write_bytes(changed_bytes(content, rng, len(content)))
        case "folder" as way:
            path.mkdir()
        case "link" as way:
            path.symlink_to(rng.choice(("nothing", path.name, "/dev/zero")))
        case way:
            os.mkfifo(path)
    return way


def starts_as_before(model: Path, expected: list[list[int]], log: Path) -> bool:
    """Start in a process of its own, and return whether that answers as expected."""
    if (pid := os.fork()) == 0:
        code = 1
        with log.open("wb", buffering=0) as file:
            os.dup2(file.fileno(), 2)
        signal.alarm(WALL_SECONDS)
        try:
            code = int(answer(model, **OPTIONS) != expected)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=500, help="starts")
    arguments = parser.parse_args(argv)
    counts = Counter[str]()
    wrong = 0
    with TemporaryDirectory() as work:
        cache = Path(work) / "cache"
        shutil.copytree(cache_folder() / "native", cache / "native")
        os.environ["OAISERVE_CACHE"] = str(cache)
        model = save(make_model(FAMILIES["llama"]), Path(work) / "model")
        expected = answer(model, **OPTIONS)
        sound = Path(work) / "sound"
        sound.mkdir()
        for folder in FOLDERS:
            (cache / folder).rename(sound / folder)
        for number in range(arguments.number):
            rng = random.Random(f"{arguments.seed} {number}")
            for folder in FOLDERS:
                shutil.rmtree(cache / folder, ignore_errors=True)
                # Hard links are the same files, by whose inodes the record knows the weights.
                shutil.copytree(sound / folder, cache / folder, copy_function=os.link)
            path = rng.choice([path for folder in FOLDERS for path in sorted((cache / folder).iterdir())])
            way = spoil(path, path.read_bytes(), rng)
            name = path.name.partition("-")[0] if path.parent.name == "remembered" else path.parent.name
            counts[f"{name}, {way}"] += 1
            if not starts_as_before(model, expected, Path(work) / "log"):
                wrong += 1
                print(f"{number}, {path.name}, {way}: {(Path(work) / 'log').read_text()[-1500:]}", file=sys.stderr)
    print(f"{arguments.number} starts of seed {arguments.seed}, {wrong} wrong: {dict(sorted(counts.items()))}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
