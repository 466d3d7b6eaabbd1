"""Counts what products take on aarch64, next to llama.cpp's: python -m tools.bench.instructions

Both are compiled for a CPU of aarch64 and run in QEMU, where a plug-in counts instructions and loaded bytes. Each
multiplies the same matrix with 1, 8 and 64 rows, with what it does to the rows before, on one thread.

A model of the pipeline, llvm-mca, says how many cycles the counted instructions take on a core, and which part of it
they keep busiest. It knows neither caches nor wrong guesses of jumps.

Needs aarch64-linux-gnu-g++, qemu-aarch64 (7 or 8), cmake, ninja, and llvm-mca of LLVM 18 or newer.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from oaiserve.engine.executors.native import variants
from oaiserve.engine.executors.native.variants import Variant
from tools.bench import prepare
from tools.markdown import add_publishing, as_markdown, publish, results_of

COMPILER = "aarch64-linux-gnu-g++"
DISASSEMBLER = "aarch64-linux-gnu-objdump"
EMULATOR = "qemu-aarch64"
NEEDED = (COMPILER, DISASSEMBLER, EMULATOR, "g++", "cmake", "ninja")
HERE = Path(__file__).parent
VARIANTS = {variant.name: variant for variant in variants.VARIANTS if variant.machine == "aarch64"}
FORMATS = ("Q4_K", "Q6_K", "Q4_0", "Q8_0", "BF16")
ROWS = (1, 8, 64)  # those of products.h
MULTIPLY_ADDS = 1024 * 2048  # those of one row
PROGRAMS = ("llama.cpp", "oaiserve")
# The cores that llvm-mca models for a variant. LLVM has one model for all of Apple's, that of the A7 of 2013.
CORES = {
    "aarch64-dotprod": ("neoverse-n1", "apple-m1"),
    "aarch64-i8mm-bf16": ("neoverse-v1", "neoverse-n2", "apple-m2"),
}
ITERATIONS = 100
MOST_DIFFERENCE = 0.03  # Products may differ by this share of the largest, since both round rows to eight bits.
MARKERS = "aarch64-instructions"


class Block(NamedTuple):
    """Instructions without a jump in between, as QEMU translates them."""

    address: int
    instructions: int
    times: int


@dataclass(frozen=True, slots=True)
class Section:
    """What a program executed between two marks. `blocks` took most of it."""

    instructions: int
    loaded_bytes: int
    blocks: list[Block]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--variants", nargs="+", default=[*CORES], choices=CORES, help="of our native code")
    add("--formats", nargs="+", default=FORMATS, choices=FORMATS, help="of weights")
    add(
        "--mca",
        default="llvm-mca",
        help="the program llvm-mca, of LLVM 18 or newer: older ones take the Neoverse for a Cortex-A57",
    )
    add(
        "--cores",
        nargs="+",
        help="the cores to model, as llvm-mca calls them (default: two or three for each variant)",
    )
    add_publishing(parser, MARKERS)
    arguments = parser.parse_args()
    results = results_of(arguments, measure)
    publish(arguments, MARKERS, results, report(results))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    if missing := [name for name in (*NEEDED, arguments.mca) if shutil.which(name) is None]:
        packages = "g++-aarch64-linux-gnu, qemu-user, cmake, ninja-build and llvm-19"
        sys.exit(f"This needs {', '.join(missing)}. On Debian, install {packages}.")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        counter = build_counter(folder)
        for variant in (VARIANTS[name] for name in arguments.variants):
            peer = build_peer(variant)
            ours = build_ours(variant, folder)
            for weight_format in arguments.formats:
                products = str(folder / "products")
                _, of_peer = count(counter, peer, weight_format, products)
                difference, of_ours = count(counter, ours, weight_format, products)
                if not float(difference) < MOST_DIFFERENCE:
                    sys.exit(
                        f"Products with {weight_format} differ by {difference} of the largest, so one of both is wrong."
                    )
                for name, program, sections in zip(PROGRAMS, (peer, ours), (of_peer, of_ours), strict=True):
                    for num_rows, section in zip(ROWS, sections, strict=True):
                        row = {"variant": variant.name, "format": weight_format, "rows": num_rows, "program": name}
                        row |= {"instructions": section.instructions, "loaded_bytes": section.loaded_bytes}
                        cores = arguments.cores or CORES[variant.name]
                        modelled = {core: asdict(model(arguments.mca, program, section, core)) for core in cores}
                        rows.append(row | {"cores": modelled})
    return {"rows": rows}


def build_counter(folder: Path) -> Path:
    path = folder / "counter.so"
    flags = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
    prepare.run("g++", *flags, HERE / "counter.cpp", "-o", path)
    return path


def build_ours(variant: Variant, folder: Path) -> Path:
    path = folder / f"ours-{variant.name}"
    flags = [flag for flag in variants.FLAGS if flag not in ("-fPIC", "-shared")]
    sources = (f"-I{variants.SOURCES}", HERE / "ours.cpp")
    prepare.run(COMPILER, *flags, "-static", *variant.flags, *sources, "-o", path)
    return path


def build_peer(variant: Variant) -> Path:
    """Return llama.cpp's program for the same instructions."""
    return build_peer_program(variant, "products", HERE / "peer.cpp", "ggml")


def build_peer_program(variant: Variant, name: str, program: Path, library: str) -> Path:
    """Compile a program for the same instructions. The library of llama.cpp, `ggml` or `llama`, is compiled once."""
    (march,) = (flag.partition("=")[2] for flag in variant.flags)
    source = prepare.llama_source()
    build = prepare.FOLDER / f"llama-{variant.name}"
    options = {
        **{name: value for name, value in prepare.LLAMA_OPTIONS.items() if not name.startswith("GGML")},
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_C_COMPILER": COMPILER.replace("g++", "gcc"),
        "CMAKE_CXX_COMPILER": COMPILER,
        "GGML_NATIVE": "OFF",
        "GGML_OPENMP": "OFF",
        "GGML_CPU_ARM_ARCH": march,
        "LLAMA_BUILD_COMMON": "OFF",
        "LLAMA_BUILD_TOOLS": "OFF",
    }
    libraries = [build / f"ggml/src/lib{part}.a" for part in ("ggml", "ggml-cpu", "ggml-base")]
    if library == "llama":
        libraries.insert(0, build / "src/libllama.a")
    if not all(path.exists() for path in libraries):
        print(f"Compiling llama.cpp for {march} (some minutes, only this once) ...", file=sys.stderr, flush=True)
        flags = [f"-D{name}={value}" for name, value in options.items()]
        prepare.run("cmake", "-S", source, "-B", build, "-G", "Ninja", *flags)
        prepare.run("cmake", "--build", build, "--target", library)
    path = build / name
    includes = (f"-I{source / 'ggml/include'}", f"-I{source / 'include'}")
    prepare.run(COMPILER, "-std=c++20", "-O2", "-static", "-pthread", *includes, program, *libraries, "-o", path)
    return path


def count(counter: Path, program: Path, *arguments: str) -> tuple[str, list[Section]]:
    """Run a program in the emulator. Return its output, and the sections between two marks each."""
    return counted([EMULATOR, "-cpu", "max,pauth-impdef=on", "-plugin", str(counter), str(program), *arguments])


def counted(command: list[str]) -> tuple[str, list[Section]]:
    """Run a command of the emulator with its plug-in, and return as `count` does."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"'{' '.join(command)}' ended with {done.returncode}: {done.stderr[-500:]}")
    return done.stdout.strip(), sections_of(done.stderr)[1::2]


def sections_of(lines: str) -> list[Section]:
    """Read what the counter has written."""
    sections: list[Section] = []
    for line in lines.splitlines():
        match line.split():
            case ["section", instructions, loaded_bytes]:
                sections.append(Section(int(instructions), int(loaded_bytes), []))
            case ["block", address, instructions, times]:
                sections[-1].blocks.append(Block(int(address, 16), int(instructions), int(times)))
    return sections


@dataclass(frozen=True, slots=True)
class Modelled:
    """What a model of a core says: cycles of a section, and the share of them in which each part is busy."""

    cycles: float
    busiest: str
    busy_share: float


def model(mca: str, program: Path, section: Section, core: str) -> Modelled:
    """Add up the cycles of the blocks, each as a loop, and extend them to all of the section's instructions."""
    blocks = joined(section.blocks)
    covered = sum(block.instructions * block.times for block in blocks)
    cycles = 0.0
    busy: Counter[str] = Counter()
    for block in blocks:
        cycles_each, pressures = model_block(mca, program, block, core)
        cycles += cycles_each * block.times
        for part, pressure in pressures.items():
            busy[part] += pressure * block.times
    ((busiest, most),) = busy.most_common(1)
    return Modelled(cycles * section.instructions / covered, busiest, most / cycles)


def joined(blocks: list[Block]) -> list[Block]:
    """Join blocks with what follows all of them: QEMU also ends a block with its page, or if it gets too long."""
    found: list[Block] = []
    for block in sorted(blocks):
        before = [i for i, first in enumerate(found) if first.address + 4 * first.instructions == block.address]
        times = sum(found[i].times for i in before)
        if abs(times - block.times) < 0.05 * block.times:  # Rare divisions of the same code are not among the blocks.
            for i in before:
                found[i] = found[i]._replace(instructions=found[i].instructions + block.instructions)
        else:
            found.append(block)
    return found


@cache
def model_block(mca: str, program: Path, block: Block, core: str) -> tuple[float, dict[str, float]]:
    """Return the cycles that a block takes in a loop, and for how many of them it uses each part of the core."""
    flags = ("-march=aarch64", f"-mcpu={core}", "-mattr=+i8mm,+bf16,+dotprod,+fullfp16", f"-iterations={ITERATIONS}")
    code = disassemble(program, block)
    done = subprocess.run([mca, *flags], input=code, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{mca} can't read a block of {program.name}: {done.stderr[-500:]}")
    return read_model(done.stdout)


def read_model(text: str) -> tuple[float, dict[str, float]]:
    """Read the cycles and the use of each part, for one iteration, from what llvm-mca has written."""
    (cycles,) = re.findall(r"^Total Cycles: +(\d+)$", text, re.MULTILINE)
    names = dict(re.findall(r"^\[([\d.]+)\] +- (\w+)$", text, re.MULTILINE))
    _, _, table = text.partition("Resource pressure per iteration:\n")
    head, values, *_ = table.splitlines()
    used = {}
    for place, value in zip(re.findall(r"\[([\d.]+)\]", head), values.split(), strict=True):
        if value != "-":
            used[f"{names[place]}{place.partition('.')[1]}{place.partition('.')[2]}"] = float(value)
    return int(cycles) / ITERATIONS, used


def disassemble(program: Path, block: Block) -> str:
    """Return the instructions of a block, as llvm-mca reads them."""
    end = block.address + 4 * block.instructions
    command = [
        DISASSEMBLER,
        "-d",
        "--no-show-raw-insn",
        f"--start-address={block.address:#x}",
        f"--stop-address={end:#x}",
    ]
    return readable(subprocess.run([*command, str(program)], check=True, capture_output=True, text=True).stdout)


def readable(disassembly: str) -> str:
    """Return the instructions alone. Where a jump leads does not matter, and gets the place 0."""
    code = re.findall(r"^ +[0-9a-f]+:\t([^/\n]*)", disassembly, re.MULTILINE)
    return "".join(re.sub(r"\b[0-9a-f]+ <.*>", "#0", line).rstrip() + "\n" for line in code)


def report(results: dict[str, Any]) -> str:
    """Return tables of what was counted and of what was modelled, with all numbers of rows side by side."""
    programs: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for row in results["rows"]:
        programs.setdefault((row["variant"], row["format"]), {}).setdefault(row["program"], []).append(row)
    counts = [["code", "weights", "instructions", "share", "bytes", "share"]]
    cycles = [["code", "weights", "core", "cycles", "share", "busiest part"]]
    for (variant, weight_format), of_program in programs.items():
        names = [variant.removeprefix("aarch64-"), weight_format]
        peer, ours = (of_program[name] for name in PROGRAMS)
        cells = list(names)
        for key in ("instructions", "loaded_bytes"):
            cells += compare([row[key] for row in ours], [row[key] for row in peer])
        counts.append(cells)
        for core, most in ours[-1]["cores"].items():
            of_core = ([row["cores"][core]["cycles"] for row in rows] for rows in (ours, peer))
            cycles.append([*names, core, *compare(*of_core), f"{most['busiest']} {most['busy_share']:.0%}"])
    return "\n".join([*as_markdown(counts), "", *as_markdown(cycles)])


def compare(ours: list[float], peer: list[float]) -> list[str]:
    """Return two cells: ours for 1,000 multiply-adds, and divided by the peer's, for each number of rows."""
    each = [f"{1000 * value / rows / MULTIPLY_ADDS:.0f}" for value, rows in zip(ours, ROWS, strict=True)]
    ratios = [f"{value / other:.2f}" for value, other in zip(ours, peer, strict=True)]
    return ["/".join(each), "/".join(ratios)]


if __name__ == "__main__":
    main()
