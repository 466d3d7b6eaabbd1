"""Random blocks replace the matrices of the layers and nothing else, and ratios are those of the same turns."""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from tests.engine.executors.native.small_models import config
from tests.models.in_blocks import file_of
from tools.bench.gguf_steps import report, report_served, times_in, write_with_random_blocks


def test_only_matrices_of_layers_with_whole_blocks_are_random(tmp_path: Path) -> None:
    sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 288, "num_hidden_layers": 1}
    source = file_of(config("llama", **sizes), tmp_path, rest=Kind.Q8_0)
    write_with_random_blocks(source, Kind.IQ2_S, tmp_path / "random.gguf")
    before = gguf.GGUFReader(source)
    after = gguf.GGUFReader(tmp_path / "random.gguf")
    assert after.fields["tokenizer.ggml.tokens"].contents() == before.fields["tokenizer.ggml.tokens"].contents()
    changed = set()
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert (old.name, old.shape.tolist()) == (new.name, new.shape.tolist())
        if new.tensor_type != old.tensor_type:
            changed.add(new.name)
            assert new.tensor_type == Kind.IQ2_S
            assert np.isfinite(gguf.dequantize(new.data, Kind.IQ2_S)).all()
        else:
            assert np.array_equal(old.data, new.data)
    # The rows of attn_output and ffn_down are no whole blocks.
    matrices = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
    assert changed == {f"blk.0.{name}.weight" for name in matrices}


def test_ratios_are_those_of_the_same_turns() -> None:
    theirs = times_in("llama_model_loader: seconds\nseconds 1 0.064000\nseconds 8 0.500000\n")
    assert theirs == {"decode": 64.0, "8 decodes": 500.0}
    turns = [
        {"oaiserve": {"decode": ours, "8 decodes": 250.0}, "llama.cpp": {**theirs, "decode": their}}
        for ours, their in ((32.0, 32.0), (16.0, 64.0), (48.0, 48.0))
    ]
    row = "| a file | 16.0 | 32.0 | 1.00 (1.00..4.00) | 250 | 500 | 2.00 (2.00..2.00) |"
    assert report({"a file": turns}).splitlines()[-1] == row


def test_served_ratios_are_those_of_the_same_turns() -> None:
    turns = [
        {
            "oaiserve": {"8": {"per_second": ours, "per_cpu_second": 30.0, "other_cores": 0.5}},
            "llama.cpp": {"8": {"per_second": theirs, "per_cpu_second": 20.0, "other_cores": others}},
        }
        for ours, theirs, others in ((40.0, 10.0, 0.25), (20.0, 20.0, 1.5), (60.0, 20.0, 0.0))
    ]
    row, _, load = report_served({"a file": turns}).splitlines()[-3:]
    assert row == "| a file | 8 | 40.0 | 20.0 | 3.00 (1.00..4.00) | 1.50 (1.50..1.50) |"
    assert "used 1.50 cores at most" in load
