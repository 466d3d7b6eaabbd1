"""Writes small GGUF files of embedding models and rerankers, whose weights are the same on every machine.

`python -m tests.models.encoder_files LLAMA_SERVER` records what llama.cpp computes with them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np

from tests.models.gguf_files import finish

RECORDS = Path(__file__).with_name("encoder_vectors.json")
SIZE = 64
WIDTH = 96
HEADS = 4
LAYERS = 3
VOCAB = 120
LENGTH = 256
TEXTS = [[2, 17, 40, 9, 3], [2, *((7 * place + 5) % 110 + 5 for place in range(60)), 3]]
PAIR = ("ab ad bc", "ba ca")  # these are the tokens below
PAIR_IDS = [2, 6, 8, 33, 3, 3, 31, 57, 3]  # as llama.cpp joins them, with a separator
PAIR_TEMPLATE = "ac {query} bb {document} ae " + "aa " * 100  # longer than other metadata that are read

_MEAN = 1
_CLS = 2
_LAST = 3
_RANK = 4
_LINEAR = {"attn_q": (SIZE, SIZE), "attn_k": (SIZE, SIZE), "attn_v": (SIZE, SIZE), "attn_output": (SIZE, SIZE)}
_FFN = {"ffn_up": (WIDTH, SIZE), "ffn_down": (SIZE, WIDTH)}
_POST_NORMS = ("attn_output_norm", "layer_output_norm")
_EMBEDDED = {"token_embd.weight": (VOCAB, SIZE), "token_types.weight": (2, SIZE)}
_EMBED_NORM = {"token_embd_norm.weight": (SIZE,), "token_embd_norm.bias": (SIZE,)}
Shapes = dict[str, tuple[int, ...]]


def _layers(weights: Shapes, norms: tuple[str, ...], *, biases: bool, norm_biases: bool) -> Shapes:
    shapes: Shapes = {}
    for layer in range(LAYERS):
        for name, shape in weights.items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
            if biases:
                shapes[f"blk.{layer}.{name}.bias"] = shape[:1]
        for name in norms:
            shapes[f"blk.{layer}.{name}.weight"] = (SIZE,)
            if norm_biases:
                shapes[f"blk.{layer}.{name}.bias"] = (SIZE,)
    return shapes


_BERT = (
    _EMBEDDED | _EMBED_NORM | {"position_embd.weight": (LENGTH, SIZE)}
    | _layers(_LINEAR | _FFN, _POST_NORMS, biases=True, norm_biases=True)
)  # fmt: skip
_HEAD_DIM = SIZE // HEADS
_DECODER = {
    "attn_q": (SIZE, SIZE), "attn_k": (SIZE // 2, SIZE), "attn_v": (SIZE // 2, SIZE), "attn_output": (SIZE, SIZE),
    "ffn_gate": (WIDTH, SIZE), **_FFN,
}  # fmt: skip
_HEAD_NORMS = {
    f"blk.{layer}.attn_{part}_norm.weight": (_HEAD_DIM,) for layer, part in product(range(LAYERS), ("q", "k"))
}
_ENDS = {"token_embd.weight": (VOCAB, SIZE), "output_norm.weight": (SIZE,)}
_MODERN = (
    _ENDS | {"token_embd_norm.weight": (SIZE,)}
    | _layers(
        {"attn_qkv": (3 * SIZE, SIZE), "attn_output": (SIZE, SIZE), **_FFN, "ffn_up": (2 * WIDTH, SIZE)},
        ("ffn_norm", "attn_norm"), biases=False, norm_biases=False,
    )
)  # fmt: skip
del _MODERN["blk.0.attn_norm.weight"]
_RANK_HEAD = {"cls.weight": (SIZE, SIZE), "cls.output.weight": (1, SIZE), "cls.output.bias": (1,)}
_NORMS_OF_GEMMA = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")

# By the name of a file: its architecture, its pooling and the shapes of its tensors.
FILES: dict[str, tuple[str, int, Shapes]] = {
    "bert-cls": ("bert", _CLS, _BERT),
    "bert-rank": ("bert", _RANK, _BERT | _RANK_HEAD | {"cls.bias": (SIZE,)}),
    "nomic-bert": (
        "nomic-bert",
        _MEAN,
        _EMBEDDED
        | _EMBED_NORM
        | _layers({"attn_qkv": (3 * SIZE, SIZE), "attn_output": (SIZE, SIZE), "ffn_gate": (WIDTH, SIZE), **_FFN}, (),
                  biases=False, norm_biases=False)
        | _layers({}, _POST_NORMS, biases=False, norm_biases=True),
    ),
    "jina-bert-v2": (
        "jina-bert-v2",
        _MEAN,
        _EMBEDDED
        | _EMBED_NORM
        | _layers(_LINEAR | {"ffn_down": (SIZE, WIDTH)}, _POST_NORMS, biases=True, norm_biases=True)
        | _layers({"ffn_up": (WIDTH, SIZE), "ffn_gate": (WIDTH, SIZE)}, (), biases=False, norm_biases=False),
    ),
    "jina-bert-v2-code": (
        "jina-bert-v2",
        _MEAN,
        _EMBEDDED
        | _EMBED_NORM
        | _layers(_LINEAR | {"ffn_down": (SIZE, WIDTH)}, (*_POST_NORMS, "attn_q_norm", "attn_k_norm", "attn_norm_2"),
                  biases=True, norm_biases=True)
        | _layers({"ffn_up": (2 * WIDTH, SIZE)}, (), biases=False, norm_biases=False),
    ),
    "modern-bert": ("modern-bert", _CLS, _MODERN),
    "modern-bert-rank": ("modern-bert", _RANK, _MODERN | _RANK_HEAD | {"cls.norm.weight": (SIZE,)}),
    "gemma-embedding": (
        "gemma-embedding",
        _MEAN,
        _ENDS
        | {"dense_2.weight": (2 * SIZE, SIZE), "dense_3.weight": (SIZE, 2 * SIZE)}
        | _layers(_DECODER, _NORMS_OF_GEMMA, biases=False, norm_biases=False)
        | _HEAD_NORMS,
    ),
    "qwen3-rank": (
        "qwen3",
        _RANK,
        _ENDS
        | _layers(_DECODER, ("attn_norm", "ffn_norm"), biases=False, norm_biases=False)
        | _HEAD_NORMS
        | {"cls.output.weight": (2, SIZE)},
    ),
    "qwen3": (
        "qwen3",
        _LAST,
        _ENDS | _layers(_DECODER, ("attn_norm", "ffn_norm"), biases=False, norm_biases=False) | _HEAD_NORMS,
    ),
}  # fmt: skip


def write_encoder(folder: Path, name: str, *, pooling: int | None = None, names_pooling: bool = True) -> Path:
    """Write the file of this name, with its own type of pooling or another one. Without `names_pooling`, it has none,
    and the output of a reranker is a vector, as llama.cpp writes a matrix of one row."""
    architecture, own_pooling, shapes = FILES[name]
    path = folder / f"{name}.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(LENGTH)
    writer.add_embedding_length(SIZE)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    if names_pooling:
        writer.add_pooling_type(gguf.PoolingType(own_pooling if pooling is None else pooling))
    if architecture in ("qwen3", "gemma-embedding"):
        writer.add_head_count_kv(HEADS // 2)
        writer.add_key_length(_HEAD_DIM)
        writer.add_value_length(_HEAD_DIM)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(1e6)
    else:
        writer.add_layer_norm_eps(1e-5)
        writer.add_causal_attention(False)
        writer.add_token_type_count(2)
    if architecture == "nomic-bert":
        writer.add_rope_freq_base(1000.0)
    if architecture == "gemma-embedding":
        writer.add_sliding_window(16)
        writer.add_sliding_window_pattern(2)
        for dense, sizes in (("dense_2", (SIZE, 2 * SIZE)), ("dense_3", (2 * SIZE, SIZE))):
            writer.add_dense_features_dims(dense, *sizes)
    if architecture == "modern-bert":
        writer.add_sliding_window(16)
        writer.add_sliding_window_pattern(3)
        writer.add_rope_freq_base(160000.0)
        writer.add_rope_freq_base_swa(10000.0)
    if name == "qwen3-rank":
        writer.add_classifier_output_labels(["yes", "no"])
        writer.add_chat_template([{"name": "rerank", "template": PAIR_TEMPLATE}])
    _add_tokenizer(writer)
    rng = np.random.default_rng(7)
    for tensor, shape in shapes.items():
        numbers = rng.normal(size=shape).astype(np.float32)
        if not names_pooling and shape == (1, SIZE):
            numbers = numbers[0]
        is_norm = "norm" in tensor and tensor.endswith("weight")
        writer.add_tensor(tensor, 1 + 0.3 * numbers if is_norm else 0.3 * numbers)
    finish(writer)
    return path


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = ["\u2581" + "".join(letters) for letters in product(ascii_lowercase, repeat=2)]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    writer.add_token_list([*special, *words][:VOCAB])
    writer.add_token_types([3] * 5 + [1] * (VOCAB - 5))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    writer.add_unk_token_id(1)
    writer.add_sep_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)


def main(server: str) -> None:
    """Record llama.cpp's vectors, and the logits of its rerankers."""
    records = {}
    with TemporaryDirectory() as folder:
        for name, (_, pooling, _) in FILES.items():
            records[name] = _by_llama_server(server, write_encoder(Path(folder), name), is_ranker=pooling == _RANK)
    RECORDS.write_text(json.dumps(records) + "\n")


def _by_llama_server(server: str, path: Path, *, is_ranker: bool) -> Any:
    url = "http://127.0.0.1:18347"
    flags = ["--rerank"] if is_ranker else ["--embedding"]
    command = [
        server,
        "-m",
        str(path),
        "--port",
        "18347",
        "-c",
        "256",
        "-ub",
        "256",
        "--no-webui",
        "-fa",
        "off",
        *flags,
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(300):
                try:
                    urllib.request.urlopen(f"{url}/health").read()
                    break
                except OSError:
                    time.sleep(0.1)
            if is_ranker:
                result = _post(f"{url}/v1/rerank", {"query": PAIR[0], "documents": [PAIR[1]]})
                return result["results"][0]["relevance_score"]
            answers = [_post(f"{url}/embedding", {"content": text}) for text in TEXTS]
            return [[round(number, 4) for number in answer[0]["embedding"][0]] for answer in answers]
        finally:
            process.terminate()


def _post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))


if __name__ == "__main__":
    main(sys.argv[1])
