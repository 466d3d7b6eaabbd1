"""Code for aarch64 computes what the references do, under emulators of several CPUs, and rows alike in any company.

A program without Python has the products, attention, functions, states, experts and adapters.
"""

import shlex
import shutil
import struct
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import IO

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from oaiserve.engine.decoder.blocks import FORMATS, Blocks
from oaiserve.engine.decoder.grids import IN_NATIVE_CODE, points_of
from oaiserve.engine.executors.native import variants
from tests.engine.executors.native.compiled import HERE, compiled
from tests.engine.executors.native.test_blocks import KINDS, N, in_integers, inputs, random_matrix

pytestmark = [pytest.mark.kernels, pytest.mark.compiler]
COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
OLD = "aarch64"
DOT = "aarch64-dotprod"
MATRIX = "aarch64-i8mm-bf16"
MACHINES = [
    ("cortex-a53", OLD),
    ("cortex-a76", OLD),
    ("cortex-a76", DOT),
    ("neoverse-n1", DOT),
    ("max", DOT),
    ("max", MATRIX),
]
K = 512
# Rows together, then some of them in other company, which makes tiles of each height.
ROWS = 21
RANGES = [(0, ROWS), (3, 4), (0, 2), (1, 4), (5, 9), (2, 7), (0, 6), (4, 11), (3, 11), (0, 13)]
LENGTHS = [40, 300, 17]
QUERIES = [3, 5, 17]
END = -1  # as in aarch64_requests.h
Floats = NDArray[np.float32]


@cache
def program(variant_name: str) -> Path:
    for needed, package in ((COMPILER, "g++-aarch64-linux-gnu"), (EMULATOR, "qemu-user")):
        if not shutil.which(needed):
            pytest.skip(f"{needed} is missing: install {package}")
    (variant,) = (variant for variant in variants.VARIANTS if variant.name == variant_name)
    flags = [flag for flag in variants.FLAGS if flag not in ("-O3", "-fPIC", "-shared")]
    sources = (HERE / "aarch64_products.cpp", HERE / "aarch64_layers.cpp")
    return compiled(COMPILER, [*flags, "-O1", "-static", *variant.flags], *sources)


class Machine:
    """A CPU whose emulator answers requests in one process, until a request ends it."""

    def __init__(self, cpu: str, variant: str) -> None:
        # pointer authentication, which libraries use, takes most of an emulator's time unless it is simplified
        options = ",pauth-impdef=on" if cpu == "max" else ""
        self._command = [EMULATOR, "-cpu", cpu + options, str(program(variant))]
        self._process: subprocess.Popen[bytes] | None = None
        self.variant = variant

    def _streams(self) -> tuple[IO[bytes], IO[bytes]]:
        if self._process is None:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        return process.stdin, process.stdout

    def end(self) -> int:
        """Let the program end, and return its exit code."""
        process = self._process
        self._process = None
        if process is None:
            return 0
        with process:
            pass
        return process.returncode

    def answer(self, operation: str, numbers: list[int], *arrays: NDArray[np.generic]) -> Floats:
        """Return the arrays of the reply, one after another."""
        request = b""
        for array in (np.array(numbers, np.int64), *arrays):
            content = np.ascontiguousarray(array).tobytes()
            request += struct.pack("<q", len(content)) + content
        question, reply = self._streams()
        parts = []
        try:
            question.write(operation.encode() + request)
            question.flush()
            while (length := struct.unpack("<q", reply.read(8))[0]) != END:
                parts.append(reply.read(length))
        except (BrokenPipeError, struct.error) as error:
            raise AssertionError(f"{shlex.join(self._command)} ended with {self.end()}") from error
        return np.frombuffer(bytearray().join(parts), np.float32)

    def products(self, operation: str, numbers: list[int], *arrays: NDArray[np.generic]) -> Floats:
        """Return the products of all rows, after comparing them with those of the rows in other company."""
        n = numbers[1]
        found = self.answer(operation, numbers, *arrays, np.array(RANGES, np.int64)).reshape(-1, n)
        together = found[:ROWS]
        rest = found[ROWS:]
        for first, end in RANGES[1:]:
            assert (rest[: end - first] == together[first:end]).all(), (first, end)
            rest = rest[end - first :]
        return together

    def blocks(self, kind: int, k: int, rests: int, *arrays: NDArray[np.generic]) -> Floats:
        """Return the products of all rows with weights in blocks."""
        points = points_of(kind) if kind in IN_NATIVE_CODE else np.zeros(0, np.int8)
        return self.products("b", [kind, N, k, rests], points, *arrays)


@pytest.fixture(params=MACHINES, ids=" for ".join, scope="module")
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    cpu, variant = request.param
    machine = Machine(cpu, variant)
    yield machine
    assert machine.end() == 0


def bytes_of(matrix: Blocks) -> NDArray[np.uint8]:
    return np.ascontiguousarray(matrix.data[matrix.rows])


def test_products_with_blocks_are_those_of_the_reference_in_any_company(machine: Machine) -> None:
    bias = np.linspace(-1, 1, N).astype(np.float32)
    for kind in KINDS:
        matrix = random_matrix(kind)
        columns = np.arange(K) if matrix.columns is None else matrix.columns
        x = np.ascontiguousarray(inputs().numpy()[:, columns])
        found = machine.blocks(kind, K, 0, bytes_of(matrix), x, bias)
        exact = in_integers(x, kind, in_tiles=False) @ matrix.expand().double().numpy()[:, columns].T + bias
        assert np.abs(found - exact).max() < 2e-5 * np.abs(exact).max(), FORMATS[kind].name


def test_products_with_groups_that_fill_no_chunk_are_those_of_the_reference(machine: Machine) -> None:
    for kind in (Kind.Q8_0, Kind.Q4_0, Kind.Q5_1, Kind.MXFP4):
        data = bytes_of(random_matrix(int(kind)))[:, : 5 * FORMATS[int(kind)].num_bytes]
        x = np.ascontiguousarray(inputs().numpy()[:, :160])
        found = machine.blocks(int(kind), 160, 0, data, x, np.zeros(0, np.float32))
        exact = in_integers(x, int(kind), in_tiles=False) @ gguf.dequantize(data, kind).astype(float).T
        assert np.abs(found - exact).max() < 2e-5 * np.abs(exact).max(), kind.name


def test_rows_with_a_number_far_from_the_others_have_more_bits(machine: Machine) -> None:
    x = np.random.default_rng(1).standard_normal((ROWS, K)).astype(np.float32)
    x[::3, 100] = 2000
    no_bias = np.zeros(0, np.float32)
    for kind in (Kind.Q4_K, Kind.Q6_K):
        data = bytes_of(random_matrix(int(kind)))
        exact = x.astype(float) @ gguf.dequantize(data, kind).astype(float).T
        plain, precise = (machine.blocks(int(kind), K, rests, data, x, no_bias) for rests in (0, 1))
        far = np.arange(ROWS) % 3 == 0
        assert (precise[~far] == plain[~far]).all()
        assert np.abs(precise - exact)[far].max() < 0.1 * np.abs(plain - exact)[far].max()


def test_the_largest_sums_have_no_error(machine: Machine) -> None:
    """All codes, scales and numbers are as large as they can be, so a sum that overflows somewhere would be wrong."""
    halves = np.frombuffer(np.float16(1 / 64).tobytes(), np.uint8)
    x = np.ones((ROWS, K), np.float32)
    x[1::2] = -1
    x[::5, 64:256] *= 8  # shifted by three, next to others that are not
    for kind, places in ((Kind.Q4_K, (0, 2)), (Kind.Q5_K, (0, 2)), (Kind.Q6_K, (208,)), (Kind.Q2_K, (80, 82)),
                         (Kind.Q3_K, (108,)), (Kind.IQ4_XS, (0,)), (Kind.Q8_0, (0,)), (Kind.IQ3_S, (0,))):  # fmt: skip
        for byte in (0x00, 0x77, 0x80, 0xFF):
            num_bytes = FORMATS[int(kind)].num_bytes
            data = np.full((N, K // FORMATS[int(kind)].weights * num_bytes), byte, np.uint8)
            for at in places:
                data.reshape(-1, num_bytes)[:, at : at + 2] = halves
            exact = in_integers(x, int(kind), in_tiles=False) @ gguf.dequantize(data, kind).astype(float).T
            found = machine.blocks(int(kind), K, 0, data, x, np.zeros(0, np.float32))
            np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-6 * np.abs(exact).max(), err_msg=kind.name)


@pytest.mark.parametrize("is_bf16", [0, 1])
def test_products_with_plain_weights_are_those_of_the_reference_in_any_company(machine: Machine, is_bf16: int) -> None:
    rng = np.random.default_rng(2)
    for k in (K, 83):
        w, x = (torch.from_numpy(rng.standard_normal((size, k)).astype(np.float32)) for size in (N, ROWS))
        if is_bf16:
            w = w.bfloat16().float()
            x = x.bfloat16().float()
        bias = rng.standard_normal(N).astype(np.float32)
        found = machine.products("l", [is_bf16, N, k], w.numpy(), x.numpy(), bias)
        exact = x.double().numpy() @ w.double().numpy().T + bias
        np.testing.assert_allclose(found, exact, atol=1e-5 * np.abs(exact).max(), err_msg=f"k is {k}")


def attended(q: Floats, k: Floats, v: Floats, window: int, softcap: int) -> NDArray[np.float64]:
    """Attend to the keys of each sequence, in double precision: [new tokens, heads, value_dim]."""
    found = []
    starts = np.cumsum([0, *LENGTHS])
    row = 0
    for start, length, queries in zip(starts, LENGTHS, QUERIES, strict=False):
        keys, values = (np.repeat(x[start : start + length], q.shape[1] // x.shape[1], 1).astype(float) for x in (k, v))
        for position in range(length - queries, length):
            seen = slice(max(0, position - window + 1) if window else 0, position + 1)
            scores = np.einsum("hd,khd->hk", q[row].astype(float), keys[seen]) * np.float32(0.2)
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            found.append(np.einsum("hk,khd->hd", weights / weights.sum(1, keepdims=True), values[seen]))
            row += 1
    return np.stack(found)


@pytest.mark.parametrize(("is_bf16", "is_int8", "tolerance"), [(0, 0, 1e-5), (1, 0, 0.02), (0, 1, 0.03), (1, 1, 0.04)])
def test_attention_is_that_of_the_reference_however_it_is_divided(
    machine: Machine, is_bf16: int, is_int8: int, tolerance: float
) -> None:
    rng = np.random.default_rng(3)
    shapes = [(4, 2, 64, 48, 0, 0, 0), (3, 3, 32, 32, 100, 5, 0)]
    if not is_int8:
        shapes.append((4, 1, 96, 64, 0, 0, 1))  # over latent vectors
    for heads, kv_heads, key_dim, value_dim, window, softcap, is_latent in shapes:
        sizes = ((sum(QUERIES), heads, key_dim), (sum(LENGTHS), kv_heads, key_dim), (sum(LENGTHS), kv_heads, value_dim))
        q, k, v = (torch.from_numpy(rng.standard_normal(size).astype(np.float32)).bfloat16().float() for size in sizes)
        if is_latent:
            v = k[..., :value_dim].contiguous()
        arrays = (np.array(LENGTHS, np.int64), np.array(QUERIES, np.int64), q.numpy(), k.numpy(), v.numpy())
        one, four = (
            machine.answer(
                "a",
                [is_bf16, is_int8, heads, kv_heads, key_dim, value_dim, window, threads, softcap, is_latent],
                *arrays,
            )
            for threads in (1, 4)
        )
        assert (one == four).all()
        expected = attended(q.numpy(), k.numpy(), v.numpy(), window, softcap)
        np.testing.assert_allclose(one.reshape(expected.shape), expected, atol=tolerance)


def test_functions_are_those_of_the_reference(machine: Machine) -> None:
    x = torch.linspace(-30, 30, 256)
    x[128] = 2.0**-20
    weight = torch.linspace(0.5, 2, 256)
    found = torch.from_numpy(machine.answer("f", [], x.numpy(), weight.numpy())).reshape(-1, 256)
    exact = x.double()
    mean = exact.mean()
    expected = [
        exact.exp(), exact.abs().log(), exact.tanh(), torch.nn.functional.softplus(exact), exact,
        torch.nn.functional.silu(exact), torch.nn.functional.gelu(exact),
        torch.nn.functional.gelu(exact, approximate="tanh"), exact.relu(), exact.relu() ** 2, exact.sigmoid(),
        exact / (exact.square().mean() + 1e-6).sqrt() * weight + weight,
        (exact - mean) / ((exact - mean).square().mean() + 1e-6).sqrt() * weight + weight,
        x.bfloat16().double(),
    ]  # fmt: skip
    assert len(found) == len(expected)
    for actual, one in zip(found, expected, strict=True):
        torch.testing.assert_close(actual.double(), one, rtol=3e-6, atol=3e-6)


TOKENS = 9
CUTS = [[TOKENS], [1] * TOKENS, [4, 1, 4]]  # steps of which each has some tokens of a sequence


def normal(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape).astype(np.float32)


def sigmoid(x: Floats) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-x.astype(float)))


def softplus(x: Floats) -> NDArray[np.float64]:
    return np.logaddexp(0, x.astype(float))


def in_each_cut(machine: Machine, operation: str, numbers: list[int], *arrays: NDArray[np.generic]) -> Floats:
    """Return the outputs of a sequence, after comparing them for all ways to cut it into steps."""
    whole, *others = (machine.answer(operation, numbers, *arrays, np.array(cut, np.int64)) for cut in CUTS)
    for other in others:
        assert (other == whole).all()
    return whole.reshape(TOKENS, -1)


@pytest.mark.parametrize("fades_by_row", [0, 1])
def test_a_delta_net_computes_what_the_reference_does_however_a_prompt_is_cut(
    machine: Machine, fades_by_row: int
) -> None:
    key_heads = 2
    value_heads = 4
    key_dim = 32
    value_dim = 48
    taps = 4
    keys = key_heads * key_dim
    decays_each = key_dim if fades_by_row else 1
    rng = np.random.default_rng(5)
    x = normal(rng, TOKENS, 2 * keys + value_heads * value_dim)
    weight = normal(rng, taps, x.shape[1])
    rates = normal(rng, TOKENS, value_heads)
    decays = normal(rng, TOKENS, value_heads * decays_each)
    speeds = -np.exp(normal(rng, decays.shape[1]))
    biases = normal(rng, decays.shape[1])
    numbers = [key_heads, value_heads, key_dim, value_dim, fades_by_row, taps]
    found = in_each_cut(machine, "d", numbers, x, rates, decays, weight, speeds, biases)

    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    convolved = sum(padded[tap : tap + TOKENS] * weight[tap] for tap in range(taps))
    convolved *= sigmoid(convolved)
    state = np.zeros((value_heads, key_dim, value_dim))
    for token, row in enumerate(convolved):
        query, key = row[: 2 * keys].reshape(2, key_heads, key_dim)
        query, key = (part / np.sqrt((part**2).sum(1, keepdims=True) + 1e-6) for part in (query, key))
        query, key = (np.repeat(part, value_heads // key_heads, 0) for part in (query / np.sqrt(key_dim), key))
        value = row[2 * keys :].reshape(value_heads, value_dim)
        decay = np.exp(speeds * softplus(decays[token] + biases)).reshape(value_heads, decays_each, 1)
        state = state * decay
        missing = value - np.einsum("hkv,hk->hv", state, key)
        state += np.einsum("hk,hv->hkv", key, missing * sigmoid(rates[token])[:, None])
        expected = np.einsum("hkv,hk->hv", state, query).ravel()
        np.testing.assert_allclose(found[token], expected, atol=1e-5)


def test_the_recurrence_of_mamba_is_that_of_the_reference_however_a_prompt_is_cut(machine: Machine) -> None:
    heads = 4
    head_dim = 8
    groups = 2
    state_dim = 32
    width = heads * head_dim
    rng = np.random.default_rng(6)
    x = normal(rng, TOKENS, width + 2 * groups * state_dim + heads)
    speeds = -np.exp(normal(rng, heads))
    biases = normal(rng, heads)
    skips = normal(rng, heads)
    found = in_each_cut(machine, "s", [heads, head_dim, groups, state_dim], x, speeds, biases, skips)
    state = np.zeros((heads, head_dim, state_dim))
    for token, row in enumerate(x.astype(float)):
        value = row[:width].reshape(heads, head_dim)
        b, c = np.repeat(row[width:-heads].reshape(2, groups, state_dim), heads // groups, 1)
        time = softplus(x[token, -heads:] + biases).clip(0.001, 10)
        state = state * np.exp(speeds * time)[:, None, None] + np.einsum("h,hi,hs->his", time, value, b)
        expected = np.einsum("his,hs->hi", state, c) + skips[:, None] * value
        np.testing.assert_allclose(found[token], expected.ravel(), atol=2e-5)


@pytest.mark.parametrize(("is_bf16", "tolerance"), [(0, 1e-5), (1, 0.02)])
def test_experts_give_what_the_reference_does_in_any_company(machine: Machine, is_bf16: int, tolerance: float) -> None:
    experts = 6
    top_k = 2
    hidden = 64
    inner = 48
    rng = np.random.default_rng(7)
    sizes = (
        (TOKENS, hidden),
        (experts, hidden),
        (experts, inner, hidden),
        (experts, inner, hidden),
        (experts, hidden, inner),
    )
    arrays = [torch.from_numpy(normal(rng, *size)).bfloat16().float().numpy() / 8 for size in sizes]
    numbers = [is_bf16, experts, top_k, hidden, inner]
    found = machine.answer("e", numbers, *arrays).reshape(TOKENS, hidden)
    x, router, gate, up, down = (array.astype(float) for array in arrays)
    for token, row in enumerate(x):
        alone = machine.answer("e", numbers, arrays[0][token], *arrays[1:])
        assert (alone == found[token]).all()
        logits = router @ row
        chosen = np.argsort(-logits)[:top_k]
        weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
        gated = gate[chosen] @ row
        between = gated / (1 + np.exp(-gated)) * (up[chosen] @ row)
        expected = np.einsum("e,ehi,ei->h", weights, down[chosen], between)
        np.testing.assert_allclose(found[token], expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize(("is_bf16", "tolerance"), [(0, 1e-5), (1, 0.02)])
def test_an_adapter_adds_what_the_reference_does_to_its_own_rows(
    machine: Machine, is_bf16: int, tolerance: float
) -> None:
    k = 64
    n = 48
    rank = 6
    rng = np.random.default_rng(8)
    x, a, b = (
        torch.from_numpy(normal(rng, *size)).bfloat16().float().numpy() for size in ((21, k), (rank, k), (n, rank))
    )
    scales = np.linspace(0.5, 2, rank).astype(np.float32)
    of_tokens = np.where(np.arange(21) % 3 == 1, -1, 0).astype(np.int32)
    found = machine.answer("r", [is_bf16, k, n, rank], x, a, b, scales, of_tokens).reshape(21, n)
    expected = (x.astype(float) @ a.T * scales) @ b.T * (of_tokens == 0)[:, None]
    np.testing.assert_allclose(found, expected, atol=tolerance * np.abs(expected).max())
    alone = machine.answer("r", [is_bf16, k, n, rank], x[2], a, b, scales, of_tokens[2:3])
    assert (alone == found[2]).all()


def test_a_program_that_ends_fails_only_its_own_request(machine: Machine) -> None:
    with pytest.raises(AssertionError, match="qemu-aarch64 .* ended with 4$"):
        machine.answer("?", [])
    assert machine.answer("f", [], np.ones(256, np.float32), np.ones(256, np.float32)).size


def test_each_variant_has_the_instructions_that_it_is_for(machine: Machine) -> None:
    code = subprocess.run(
        [COMPILER.replace("g++", "objdump"), "-d", "--no-show-raw-insn", str(program(machine.variant))],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for instruction, least in (("sdot", DOT), ("smmla", MATRIX), ("bfdot", MATRIX)):
        has = machine.variant == MATRIX or machine.variant == least
        assert (f"\t{instruction}\t" in code) == has
