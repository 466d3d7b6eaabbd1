"""The counter of instructions reads what its plug-in, objdump and llvm-mca write."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.bench.instructions import __main__ as instructions
from tools.bench.instructions import whole

PROGRAM = """
#include <unistd.h>

int main() {
  int sum = 0;
  getppid();
  asm volatile("mov x1, #1000\\n1: ldr q0, [sp]\\nldr w2, [sp]\\nsubs x1, x1, #1\\nb.ne 1b" ::: "x1", "x2", "v0", "cc");
  getppid();
  return sum;
}
"""
OBJDUMP = """
0000000000400734 <main>:
  400734:	smmla	v0.4s, v1.16b, v2.16b
  400738:	adrp	x0, 4a0000 <__libc_early_init+0x10>
  40073c:	b.ne	400734 <main>  // b.any
"""
MCA = """Iterations:        100
Total Cycles:      250

Resources:
[0.0] - N1UnitL
[0.1] - N1UnitL
[1]   - N1UnitV0

Resource pressure per iteration:
[0.0]  [0.1]  [1]
 -     0.50   2.25

Resource pressure by instruction:
[0.0]  [0.1]  [1]    Instructions:
"""


def row(program: str, num_rows: int, instructions: int, cycles: float) -> dict[str, object]:
    named = {"variant": "aarch64-dotprod", "format": "Q4_K", "rows": num_rows, "program": program}
    cores = {
        "neoverse-n1": {"cycles": cycles, "busiest": "N1UnitV0", "busy_share": 0.9},
        "apple-m1": {"cycles": 2 * cycles, "busiest": "CyUnitV.1", "busy_share": 0.8},
    }
    return named | {"cores": cores, "instructions": instructions, "loaded_bytes": 2 * instructions}


@pytest.mark.compiler
def test_the_plugin_counts_instructions_and_loaded_bytes_between_marks(tmp_path: Path) -> None:
    for needed in ("g++", instructions.COMPILER, instructions.EMULATOR):
        if shutil.which(needed) is None:
            pytest.skip(f"{needed} is missing: install g++, g++-aarch64-linux-gnu and qemu-user, as .ci/run does")
    source = tmp_path / "program.cpp"
    source.write_text(PROGRAM)
    program = tmp_path / "program"
    subprocess.run([instructions.COMPILER, "-static", "-O1", str(source), "-o", str(program)], check=True)
    counter = instructions.build_counter(tmp_path)
    said, (section,) = instructions.count(counter, program)
    assert said == ""
    assert 4001 <= section.instructions < 4050
    assert 20_000 <= section.loaded_bytes < 20_400
    (loop,) = (block for block in section.blocks if block.times > 900)
    assert loop.instructions == 4
    code = instructions.disassemble(program, loop)
    assert [line.split("\t")[0] for line in code.splitlines()] == ["ldr", "ldr", "subs", "b.ne"]

    _, (alone,) = instructions.counted([instructions.EMULATOR, "-plugin", f"{counter},loads=off", str(program)])
    assert (alone.instructions, alone.loaded_bytes) == (section.instructions, 0)


def test_code_is_read_without_the_places_of_jumps() -> None:
    code = instructions.readable(OBJDUMP)
    assert code == "smmla\tv0.4s, v1.16b, v2.16b\nadrp\tx0, #0\nb.ne\t#0\n"


def test_blocks_that_only_a_page_divides_are_one() -> None:
    blocks = [instructions.Block(*block) for block in ((96, 1, 7), (4092, 1, 9), (4096, 2, 9), (4104, 5, 3))]
    assert instructions.joined([blocks[2], blocks[0], blocks[3], blocks[1]]) == [(96, 1, 7), (4092, 3, 9), (4104, 5, 3)]


def test_what_follows_a_loop_and_the_way_into_it_is_joined_with_both() -> None:
    blocks = [instructions.Block(*block) for block in ((4080, 4, 2), (4084, 3, 14), (4096, 2, 16))]
    assert instructions.joined(blocks) == [(4080, 6, 2), (4084, 5, 14)]


def test_cycles_and_busy_parts_of_a_model_are_those_of_one_iteration() -> None:
    assert instructions.read_model(MCA) == (2.5, {"N1UnitL.1": 0.5, "N1UnitV0": 2.25})


def test_the_tables_have_ours_for_1000_multiply_adds_and_as_a_share_of_the_peers() -> None:
    rows = []
    for num_rows in instructions.ROWS:
        work = num_rows * instructions.MULTIPLY_ADDS
        rows += [row("llama.cpp", num_rows, work // 4, work / 8), row("oaiserve", num_rows, work // 8, work / 10)]
    counts, cycles = instructions.report({"rows": rows}).split("\n\n")
    assert counts.splitlines()[2:] == [
        "| dotprod | Q4_K | 125/125/125 | 0.50/0.50/0.50 | 250/250/250 | 0.50/0.50/0.50 |"
    ]
    assert cycles.splitlines()[2:] == [
        "| dotprod | Q4_K | neoverse-n1 | 100/100/100 | 0.80/0.80/0.80 | N1UnitV0 90% |",
        "| dotprod | Q4_K | apple-m1 | 200/200/200 | 0.80/0.80/0.80 | CyUnitV.1 80% |",
    ]


def test_whole_models_have_millions_of_instructions_for_a_token_and_ours_as_a_share() -> None:
    rows = [{"variant": "aarch64-dotprod", "dtype": "float32", "step": "decode", "llama.cpp": 4e8, "oaiserve": 3e8}]
    assert whole.report({"rows": rows}).splitlines()[-1] == "| dotprod | float32 | decode | 400 | 300 | 0.75 |"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(os.environ, "PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="This needs aarch64-linux-gnu-g.*qemu-aarch64.*On Debian, install"):
        instructions.measure(instructions.argparse.Namespace(mca="llvm-mca", cores=None))
