"""What transformers learns from the head of a GGUF file is the same without the texts of the vocabulary."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFEndian, GGUFReader, GGUFWriter
from transformers import AutoConfig, AutoTokenizer
from transformers.integrations.gguf import reader

from oaiserve.engine.text.gguf_head import without_vocabulary
from tests.models.gguf_files import finish

TOKENS = [*"abcdefgh", "ab", "cd", "é", "", "<end>"]


def write(path: Path, endian: GGUFEndian = GGUFEndian.LITTLE, vocab_size: int | None = None) -> Path:
    """Write the head of a small Llama with a vocabulary, and one tensor."""
    writer = GGUFWriter(path, "llama", endianess=endian)
    sizes = {"block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 48}
    for name, size in (sizes | {"head_count": 4, "head_count_kv": 2}).items():
        getattr(writer, f"add_{name}")(size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if vocab_size is not None:
        writer.add_vocab_size(vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 1) + [3])
    writer.add_token_scores([0.25 * i for i in range(len(TOKENS))])
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(len(TOKENS) - 1)
    writer.add_array("general.tags", ["one", "two"])
    writer.add_array("numbers", range(5))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    finish(writer)
    return path


def numbers(head: GGUFReader) -> dict[str, list[Any]]:
    """Return all values but texts, and but those that describe a tokenizer."""
    return {
        name: [field.parts[place].tolist() for place in field.data]
        for name, field in head.fields.items()
        if gguf.GGUFValueType.STRING not in field.types and not name.startswith("tokenizer.")
    }


@pytest.mark.parametrize("endian", [GGUFEndian.LITTLE, GGUFEndian.BIG], ids=lambda endian: endian.name)
def test_all_numbers_and_tensors_are_read_and_texts_are_counted(tmp_path: Path, endian: GGUFEndian) -> None:
    path = write(tmp_path / "m.gguf", endian)
    whole = GGUFReader(path)
    with without_vocabulary():
        assert gguf.GGUFReader is not GGUFReader
        head = gguf.GGUFReader(path)
    assert gguf.GGUFReader is GGUFReader
    assert numbers(head) == numbers(whole)
    assert numbers(head)["numbers"] == [[i] for i in range(5)]
    assert [(t.name, t.shape.tolist(), t.data_offset) for t in head.tensors] == [
        (t.name, t.shape.tolist(), t.data_offset) for t in whole.tensors
    ]
    for name, field in whole.fields.items():
        assert head.fields[name].types == field.types
        is_left_out = name in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores", "tokenizer.ggml.merges")
        assert len(head.fields[name].data) == (0 if is_left_out else len(field.data))
    texts = head.fields["tokenizer.ggml.tokens"]
    is_counted = all(texts.parts[place].size == 0 for place in texts.data)
    assert is_counted == (endian == GGUFEndian.LITTLE)


@pytest.mark.parametrize("vocab_size", [None, 40])
def test_transformers_makes_the_same_configuration_and_tokenizer(tmp_path: Path, vocab_size: int | None) -> None:
    write(tmp_path / "m.gguf", vocab_size=vocab_size)

    def found() -> tuple[dict[str, Any], dict[str, Any], str]:
        config = AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf")
        tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
        return config.to_dict(), tokenizer.special_tokens_map, tokenizer.backend_tokenizer.to_str()

    whole = found()
    with without_vocabulary():
        assert found() == whole
    assert whole[0]["vocab_size"] == (vocab_size or len(TOKENS))


def test_two_threads_may_read_heads_at_once_and_the_reader_comes_back_after_an_error(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(IndexError), without_vocabulary():
        gguf.GGUFReader(tmp_path / "m.gguf")
    read = reader._read_value
    with ExitStack() as second:
        with without_vocabulary():
            second.enter_context(without_vocabulary())
        assert gguf.GGUFReader is not GGUFReader
        assert reader._read_value is not read
    assert gguf.GGUFReader is GGUFReader
    assert reader._read_value is read
