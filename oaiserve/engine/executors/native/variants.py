"""The flags of the native code's compiler, and the kinds of CPU in a wheel.

Stdlib only, because the wheel's build imports it, too. It doesn't depend on where libraries are stored.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent / "src"
MAIN_SOURCE = "decoder.cpp"
BLOCKS_SOURCE = "blocks.cpp"  # compiled into all kinds of libraries
KINDS = ("bf16", "float")  # kinds of libraries, named after the type of activations, keys and values
FLAGS = [
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi"),
    # Without this flag, GCC on aarch64 would load early what doesn't fit into registers. On x86, it is the default.
    "-fno-schedule-insns",
]
_DIGEST_BYTES = hashlib.sha256().digest_size


class Variant(NamedTuple):
    name: str
    machine: str  # as in platform.machine(); the compiler's target must begin with it
    flags: tuple[str, ...]
    features: frozenset[str]  # names as in /proc/cpuinfo


AMX_FEATURES = frozenset({"amx_tile", "amx_bf16", "amx_int8"})  # names as in /proc/cpuinfo
AMX_FLAG = "-DWITH_AMX"  # makes src/amx.h use the compiler's support
_V2 = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_V4_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}
_V4_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
_AMX_FLAGS = ("-mamx-tile", "-mamx-bf16", "-mamx-int8", AMX_FLAG)
_ARM = frozenset({"fp", "asimd"})
_ARM_DOT = _ARM | {"atomics", "crc32", "asimdrdm", "fphp", "asimdhp", "asimddp"}
_ARM_DOT_MARCH = "-march=armv8.2-a+fp16+dotprod"
# Ordered from the best to the one for most CPUs.
VARIANTS = (
    Variant("x86-64-v4-bf16-amx", "x86_64", (*_V4_BF16_FLAGS, *_AMX_FLAGS), _V4_BF16 | AMX_FEATURES),
    Variant("x86-64-v4-bf16", "x86_64", _V4_BF16_FLAGS, _V4_BF16),
    Variant("x86-64-v4-vnni", "x86_64", ("-march=x86-64-v4", "-mavx512vnni"), _V4 | {"avx512_vnni"}),
    Variant("x86-64-v4", "x86_64", ("-march=x86-64-v4",), _V4),
    Variant("x86-64-v3-vnni", "x86_64", ("-march=x86-64-v3", "-mavxvnni"), _V3 | {"avx_vnni"}),
    Variant("x86-64-v3", "x86_64", ("-march=x86-64-v3",), _V3),
    Variant("aarch64-i8mm-bf16", "aarch64", (f"{_ARM_DOT_MARCH}+i8mm+bf16",), _ARM_DOT | {"i8mm", "bf16"}),
    Variant("aarch64-dotprod", "aarch64", (_ARM_DOT_MARCH,), _ARM_DOT),
    Variant("aarch64", "aarch64", ("-march=armv8-a",), _ARM),
)


def kind_flag(kind: str) -> str:
    return f"-DELEMENT={kind}"


def digest(*parts: str, sources: Path = SOURCES) -> bytes:
    """Return the SHA-256 of the sources and of everything else that the code depends on."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part.encode() + b"\0")
    for source in sorted(sources.iterdir()):
        hashed.update(source.name.encode() + b"\0" + source.read_bytes())
    return hashed.digest()


def origin(kind: str, variant: Variant) -> bytes:
    """Return the digest of what a wheel's library was built from, apart from the compiler. The library includes it."""
    return digest(*FLAGS, *variant.flags, kind_flag(kind))


def library_name(kind: str, variant: Variant) -> str:
    """Return the name of a wheel's library. Like the name of a compiled one, it is unique for its code."""
    return f"{kind}-{variant.name}-{origin(kind, variant).hex()[:16]}.so"


def seal(path: Path, made_of: bytes = b"") -> None:
    """Append to a library its origin, and the SHA-256 of everything before. Loaders ignore bytes after the code."""
    content = path.read_bytes() + made_of
    path.write_bytes(content + hashlib.sha256(content).digest())


def is_sound(content: bytes) -> bool:
    """Return whether this is the content of a sealed file, neither truncated nor changed."""
    code = content[:-_DIGEST_BYTES]
    stored = content[-_DIGEST_BYTES:]
    return bool(code) and hashlib.sha256(code).digest() == stored


def origin_of(content: bytes) -> bytes:
    return content[-2 * _DIGEST_BYTES : -_DIGEST_BYTES]
