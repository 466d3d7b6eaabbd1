"""Decodes spoiled images and sounds, thousands of them: python -m tests.plugins.media.hostile --files 1000

Each is decoded, or refused with a sentence: within a second of CPU time, and within bounded memory. What is spoiled is
a function of the seed. Prints a table of outcomes; the exit code is 1 if one is wrong. Each type has a process of its
own, so that a crash of a decoder is seen. With --bombs, the images of tools.attack.media_files are decoded instead, as
the server does it and with its default limits.
"""

import argparse
import io
import os
import random
import resource
import struct
import sys
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import soundfile
from PIL import Image

from oaiserve.engine.types.media import MediaFile, MediaLimits
from oaiserve.errors import InvalidRequest
from oaiserve.plugins.media.model import decode
from oaiserve.plugins.media.model.decode import decode_image, image_size
from oaiserve.plugins.media.model.image_process import decoded, opened, reason_of
from oaiserve.plugins.media.model.sound_process import samples_of
from oaiserve.plugins.shared.decoding_process import Refused
from tools.attack.media_files import IMAGES as BOMBS

IMAGES = ("png", "jpeg", "webp", "gif", "bmp", "tiff")
SOUNDS = ("wav", "flac", "mp3")
MOST_PIXELS = 2_000_000
MOST_SECONDS = 20
MOST_BYTES = 2**20
MOST_CPU_SECONDS = 1.0
MOST_GROWTH_MIB = 192
MOST_BOMB_CPU_SECONDS = 6.0
MOST_BOMB_MIB = 700
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def whole_file(kind: str, rng: random.Random) -> bytes:
    """Return a small valid file of this kind."""
    file = io.BytesIO()
    if kind in SOUNDS:
        noise = np.random.default_rng(rng.getrandbits(32)).standard_normal((8000, rng.choice((1, 2)))) / 8
        soundfile.write(file, noise, rng.choice((8000, 16000, 44100)), format=kind.upper())
        return file.getvalue()
    mode = rng.choice(
        {"jpeg": ("L", "RGB", "CMYK"), "bmp": ("1", "L", "P", "RGB")}.get(kind, ("L", "P", "RGB", "RGBA"))
    )
    mode = "RGB" if kind == "webp" else mode
    frames = [Image.effect_noise((rng.randint(1, 90), 60), 80).convert(mode) for _ in range(rng.randint(1, 3))]
    frames = [frame.resize(frames[0].size) for frame in frames]
    more: dict[str, object] = {"save_all": True, "append_images": frames[1:]} if kind in ("gif", "webp", "tiff") else {}
    if kind == "tiff":
        more["compression"] = rng.choice((None, "tiff_lzw", "packbits", "tiff_adobe_deflate"))
    exif = Image.Exif()
    exif[0x0112] = rng.randint(1, 8)
    if kind in ("png", "jpeg", "webp"):
        more["exif"] = exif
    if kind == "jpeg":
        more["progressive"] = rng.random() < 0.5
    frames[0].save(file, kind, **more)
    return file.getvalue()


def spoiled(content: bytes, rng: random.Random) -> bytes:
    """Return the file with a few changes, most of them where headers are."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        reach = min(len(data), rng.choice((32, 128, 1024, len(data))))
        at = rng.randrange(reach) if reach else 0
        match rng.randrange(7):
            case 0:
                data[at : at + 1] = bytes([rng.getrandbits(8)])
            case 1:
                form = rng.choice(("<I", ">I", "<H", ">H"))
                size = struct.calcsize(form)
                data[at : at + size] = struct.pack(form, rng.choice(EXTREMES) & (256**size - 1))
            case 2:
                del data[rng.randrange(len(data) + 1) :]
            case 3:
                del data[at : at + rng.randint(1, 64)]
            case 4:
                data[at:at] = data[at : at + rng.randint(1, 512)] * rng.randint(1, 40)
            case 5:
                data[at:at] = rng.randbytes(rng.randint(1, 64))
            case _:
                data[at : at + 64] = bytes(64)
    is_png = data[:4] == b"\x89PNG" and rng.random() < 0.7
    return _with_sums(data[:MOST_BYTES]) if is_png else bytes(data[:MOST_BYTES])


def _with_sums(data: bytearray) -> bytes:
    """Return a PNG with right checksums, without which nothing in its chunks is looked at."""
    at = 8
    while at + 12 <= len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4])
        data[end : end + 4] = zlib.crc32(data[at + 4 : end]).to_bytes(4)[: max(0, len(data) - end)]
        at = end + 4
    return bytes(data)


def run(kind: str, num_files: int, seed: int) -> tuple[int, int, list[str], float, float]:
    """Return how many files were decoded and refused, what was wrong, the most CPU seconds, and the growth in MiB."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries tell of each fault
    rng = random.Random(f"{seed} {kind}")
    decoded = 0
    refused = 0
    slowest = 0.0
    wrong = []
    _decode(kind, whole_file(kind, rng))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(num_files):
        content = spoiled(whole_file(kind, rng), rng)
        began = time.thread_time()
        try:
            _decode(kind, content)
            decoded += 1
        except Refused:
            refused += 1
        except BaseException as error:
            wrong.append(f"{kind} {number}: {error!r}")
        took = time.thread_time() - began
        slowest = max(slowest, took)
        if took > MOST_CPU_SECONDS:
            wrong.append(f"{kind} {number}: {took:.2f} s of CPU time")
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if growth > MOST_GROWTH_MIB:
        wrong.append(f"{kind}: {growth:.0f} MiB more memory")
    return decoded, refused, wrong, slowest, growth


def _decode(kind: str, content: bytes) -> None:
    if kind in SOUNDS:
        samples_of(content, 16000, MOST_SECONDS)
    else:
        try:
            image = decoded(opened(content, MOST_PIXELS), on_white=True, is_low=False)
        except Exception as error:
            raise Refused(reason_of(error, MOST_PIXELS)) from error
        assert image.mode == "RGB"
        assert image.width * image.height <= MOST_PIXELS


def bomb(name: str) -> tuple[int, str, float, float]:
    """Return the bytes of a bomb, what becomes of it, and the CPU seconds and MiB of the process that decodes it."""
    limits = MediaLimits()
    image_size(MediaFile("image", whole_file("png", random.Random())), limits.max_pixels, limits.max_bytes)
    content = BOMBS[name]()
    try:
        image = decode_image(MediaFile("image", content), limits.max_pixels, limits.max_bytes, on_white=True)
        height, width, _ = image.shape
        outcome = f"{width} x {height}"
    except InvalidRequest as error:
        outcome = error.message
    decode._end_all()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return len(content), outcome, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def run_bombs(pool: ProcessPoolExecutor) -> list[str]:
    """Print a table of bombs. Return the faults."""
    wrong = []
    print("| bomb | bytes | becomes | s of CPU | MiB |", "|---|---|---|---|---|", sep="\n")
    for name in BOMBS:
        num_bytes, outcome, seconds, mib = pool.submit(bomb, name).result()
        print(f"| {name} | {num_bytes} | {outcome} | {seconds:.1f} | {mib:.0f} |", flush=True)
        if seconds > MOST_BOMB_CPU_SECONDS or mib > MOST_BOMB_MIB:
            wrong.append(f"{name}: {seconds:.1f} s of CPU time, {mib:.0f} MiB")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--bombs", action="store_true")
    options = parser.parse_args()
    all_wrong: list[str] = []
    if options.bombs:
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
            all_wrong = run_bombs(pool)
        print(*all_wrong, sep="\n", file=sys.stderr)
        return 1 if all_wrong else 0
    print(
        "| type | files | decoded | refused | wrong | slowest, ms of CPU | memory grows by, MiB |",
        "|---|---|---|---|---|---|---|",
        sep="\n",
    )
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        runs = {kind: pool.submit(run, kind, options.files, options.seed) for kind in (*IMAGES, *SOUNDS)}
        for kind, started in runs.items():
            decoded, refused, wrong, slowest, growth = started.result()
            all_wrong += wrong
            cells = (kind, options.files, decoded, refused, len(wrong), f"{slowest * 1e3:.0f}", f"{growth:.0f}")
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    print(*all_wrong, sep="\n", file=sys.stderr)
    return 1 if all_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
