"""Dry runs of the figures of the GPU check with tiny models on a CPU, and what they make of what they measure."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.engine.decoder.description import Decoder, Experts
from tests.models.decoders import real_shape
from tests.models.packed import Packing
from tests.models.small_configs import config_of
from tools.bench.floor import DecoderShape, step_work
from tools.engine_load import random_step
from tools.gpu import dry_run, gpt2, offload, parts, quantized, reference, steps, streams
from tools.gpu.models import described_on
from tools.gpu.profiles import Kernel, needed, parts_of
from tools.gpu.sections import Target

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")]

DEVICE = torch.device("cpu")
CPU = Target(DEVICE, quick=True)


def found_by(found: Iterator[dict[str, Any]]) -> dict[str, Any]:
    return {key: value for part in found for key, value in part.items()}


def decoder(name: str = "llama-3.1-8b") -> Decoder:
    return described_on(real_shape(name, tiny=True), DEVICE).decoder


def test_the_section_of_a_model_has_all_figures() -> None:
    found = found_by(steps.run(CPU, "llama-3.1-8b"))
    assert "problems" not in found
    sizes = steps.Sizes(quick=True)
    assert [row["sequences"] for row in found["decode"]] == [*sizes.batches]
    two, one, four = found["decode"]
    assert four["bytes"] - two["bytes"] == pytest.approx(2 * 40 * found["kv_bytes_per_token"], rel=0.03)
    assert four["operations"] == pytest.approx(4 * one["operations"])
    assert {row["rows"] for row in found["reference"]} >= {1, 2, 4, sizes.chunk, 3 + 8}
    assert len(found["steps"]) == len(sizes.mixed_rows) * len(sizes.mixed_tokens) + 4 + 1 + 1
    of_chunks = [found["steps"][f"16 prompt tokens behind {start}"] for start in (0, 16, 32, 48)]
    whole = found["steps"]["prompt of 64, 4 steps"]
    assert whole["device_ms"] == pytest.approx(sum(one["device_ms"] for one in of_chunks))
    assert whole["operations"] > 4 * of_chunks[0]["operations"]
    assert all(row["launch_ms"] > 0 and row["alone_ms"] > 0 for row in found["steps"].values())
    assert len(found["profiles"]) == 6
    assert [row["by"] for row in found["attention"]] == ["math"] * 2


def test_a_part_that_fails_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> Iterator[dict[str, Any]]:
        yield {"begun": 1}
        raise ValueError("the reason")

    found = found_by(parts.in_turn({"one": fails, "two": lambda: iter([{"found": 2}])}))
    assert (found["begun"], found["found"]) == (1, 2)
    assert found["problems"]["one"].endswith("ValueError: the reason")
    assert dry_run.is_whole({"status": "done", "off": {}})
    assert not dry_run.is_whole({"status": "done", **found})
    assert not dry_run.is_whole({"status": "done", "a case": {"equal": False}})


def test_products_alone_have_the_shapes_of_the_executor() -> None:
    description = decoder()
    (inputs, out, gate_up, down), *_, (head,) = reference.matrix_shapes(description)
    assert (inputs, out, gate_up, down) == ((128, 64), (64, 64), (256, 64), (64, 128))
    assert head == (512, 64)
    assert len(reference.matrix_shapes(description)) == len(description.layers) + 1


def test_a_step_needs_what_its_matrices_and_keys_need() -> None:
    config = real_shape("llama-3.2-1b")
    shape = DecoderShape.of(described_on(config, torch.device("meta")).spec, config)
    step = random_step([(511, 1)] * 64, 16)
    least = needed(shape, step)
    whole = step_work(shape, [(511, 512)] * 64)
    of_numbers = least["norm"].num_bytes + least["activation"].num_bytes + least["write"].num_bytes
    embedding = 64 * 2048 * 2
    assert sum(part.num_bytes for part in least.values()) - of_numbers == whole.num_bytes - embedding
    assert sum(part.flops for part in least.values()) == whole.flops
    assert least["write"].num_bytes == 0  # the kernel of decodes writes
    assert needed(shape, random_step([(0, 100)], 16))["write"].num_bytes == 200 * shape.cached_bytes


def test_kernels_of_libraries_are_of_the_part_between_ours() -> None:
    order = ["plan_kernel", "gather", "add_and_norm_kernel"]
    layer = ["gemm", "decode_kernel", "split", "reduce", "add_and_norm_kernel", "gemm", "activate_kernel"]
    layer += ["Memset (Device)", "gemm", "add_and_norm_kernel"]
    order += layer * 2 + ["select", "gemm", "best_of_chunk_kernel", "best_kernel"]
    found = parts_of([Kernel(name, 1.0) for name in order * 2])
    count: dict[str, int] = {}
    for part, _ in found:
        count[part] = count.get(part, 0) + 1
    assert count == {
        "plan": 2,
        "others": 2,
        "norm": 10,
        "qkv": 4,
        "attention": 4,
        "output": 8,
        "gate and up": 4,
        "activation": 4,
        "copies": 4,
        "down": 4,
        "logits": 4,
        "draw": 4,
    }
    # A prompt in the middle draws nothing, so its step ends with the last norm and products.
    assert parts_of([Kernel("add_and_norm_kernel", 1.0), Kernel("gemm", 1.0)])[-1][0] == "logits"


def test_each_load_of_gpt2_has_figures() -> None:
    found = found_by(gpt2.run(CPU))
    loads = found["loads"]
    assert loads.keys() == gpt2.loads(quick=True).keys()
    assert all(load["output_tokens_per_second"] > 0 and load["submit_p99"] > 0 for load in loads.values())
    assert loads["at once"]["steps"]["sequences"] == found["batch"]
    assert loads["every 20 ms"]["tpot_p50"] > 0
    assert loads["every 20 ms"]["submit_wall"] >= 0.06  # three intervals


def test_models_in_few_bits_have_figures() -> None:
    found = found_by(quantized.run(CPU))
    assert found.keys() == quantized.CASES.keys()
    few, many = sorted(found["MXFP4, 32 experts"]["decode"], key=lambda row: row["sequences"])
    assert few["weight_bytes"] <= many["weight_bytes"] <= found["MXFP4, 32 experts"]["weight_bytes"]
    assert all(one["profile"]["parts"] for one in found.values())


def test_experts_that_no_token_chooses_are_not_read() -> None:
    config = config_of("gpt_oss", intermediate_size=128, num_local_experts=8, num_experts_per_tok=2)
    description = described_on(config, DEVICE, packing="mxfp4").decoder
    mixture = description.layers[0].mlp
    assert isinstance(mixture, Experts)
    share = 1 - mixture.router.top_k / len(mixture.experts)
    one = quantized.unread_bytes(description, 1)
    assert 0 < share < 1
    assert quantized.unread_bytes(description, 2) == pytest.approx(share * one)
    dense = described_on(config_of("llama"), DEVICE, packing=Packing("awq")).decoder
    assert quantized.unread_bytes(dense, 1) == 0


def test_blocks_are_copied_out_and_in_and_an_evicted_prompt_comes_back() -> None:
    found = found_by(offload.run(CPU))
    assert "problems" not in found
    assert [row["blocks"] for row in found["copies"]] == [*offload.BLOCKS[:2]]
    assert all(row["in_ms"] > 0 and row["bytes"] > 0 for row in found["copies"])
    assert found["bytes"]["equal"]
    assert found["restored prompt"] == {"equal": True, "hits": 1}


def test_the_cpu_time_of_each_thread_is_read() -> None:
    busy = "import threading\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            before = streams.thread_seconds(process.pid)
            after = before
            while not streams.spent(before, after):
                after = streams.thread_seconds(process.pid)
            assert f"first {process.pid}" in streams.thread_seconds(os.getpid())
        finally:
            process.kill()
    ((thread, seconds),) = streams.spent(before, after)
    assert thread == f"first {process.pid}"
    assert seconds >= streams.LEAST_SECONDS
