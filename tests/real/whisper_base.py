"""Whisper base in transformers' form, made of the only weights of it in a package index: those of CTranslate2."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor

_NUMBERS = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
_END = 50257
_START = 50258
_TRANSLATE = 50358
_TRANSCRIBE = 50359
_NO_TIMESTAMPS = 50363


class _File:
    """The bytes of a model.bin, which are read one after the other."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from(f"<{form}", self._content, self._at)
        self._at += struct.calcsize(f"<{form}")
        return int(value)

    def text(self) -> str:
        length = self.number("H")
        self._at += length
        return self._content[self._at - length : self._at - 1].decode()

    def array(self, kind: type, num_bytes: int, shape: list[int]) -> Any:
        self._at += num_bytes
        count = num_bytes // np.dtype(kind).itemsize
        return np.frombuffer(self._content, kind, count, self._at - num_bytes).reshape(shape)


def _read(content: bytes) -> dict[str, Any]:
    file = _File(content)
    file.number("I")  # version
    assert file.text() == "WhisperSpec"
    file.number("I")  # revision
    tensors = {}
    for _ in range(file.number("I")):
        name = file.text()
        shape = [file.number("I") for _ in range(file.number("B"))]
        kind = _NUMBERS[file.number("B")]
        tensors[name] = file.array(kind, file.number("I"), shape)
    return tensors


def _renamed(tensors: dict[str, Any], layers: int, size: int) -> dict[str, Any]:
    """Return the tensors by transformers' names. CTranslate2 joins queries, keys and values."""
    weights: dict[str, Any] = {}

    def norm(new: str, old: str) -> None:
        weights[f"{new}.weight"] = tensors[f"{old}/gamma"]
        weights[f"{new}.bias"] = tensors[f"{old}/beta"]

    def linear(new: str, old: str, part: int | None = None) -> None:
        rows = slice(None) if part is None else slice(part * size, (part + 1) * size)
        weights[f"{new}.weight"] = tensors[f"{old}/weight"][rows]
        if not new.endswith("k_proj"):
            weights[f"{new}.bias"] = tensors[f"{old}/bias"][rows]

    for side in ("encoder", "decoder"):
        for layer in range(layers):
            old = f"{side}/layer_{layer}"
            new = f"model.{side}.layers.{layer}"
            norm(f"{new}.self_attn_layer_norm", f"{old}/self_attention/layer_norm")
            for part, name in enumerate("qkv"):
                linear(f"{new}.self_attn.{name}_proj", f"{old}/self_attention/linear_0", part)
            linear(f"{new}.self_attn.out_proj", f"{old}/self_attention/linear_1")
            if side == "decoder":
                norm(f"{new}.encoder_attn_layer_norm", f"{old}/attention/layer_norm")
                linear(f"{new}.encoder_attn.q_proj", f"{old}/attention/linear_0")
                linear(f"{new}.encoder_attn.k_proj", f"{old}/attention/linear_1", 0)
                linear(f"{new}.encoder_attn.v_proj", f"{old}/attention/linear_1", 1)
                linear(f"{new}.encoder_attn.out_proj", f"{old}/attention/linear_2")
            norm(f"{new}.final_layer_norm", f"{old}/ffn/layer_norm")
            linear(f"{new}.fc1", f"{old}/ffn/linear_0")
            linear(f"{new}.fc2", f"{old}/ffn/linear_1")
        norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        weights[f"model.{side}.embed_positions.weight"] = tensors[f"{side}/position_encodings/encodings"]
    linear("model.encoder.conv1", "encoder/conv1")
    linear("model.encoder.conv2", "encoder/conv2")
    weights["model.decoder.embed_tokens.weight"] = tensors["decoder/embeddings/weight"]
    return weights


def write_whisper_base(parts: list[Path], folder: Path) -> Path:
    """Write the model into a folder, given those of the packages."""
    settings = json.loads((parts[0] / "config.json").read_text())
    tensors = _read(b"".join((part / f"model.bin.part{n}").read_bytes() for n, part in enumerate(parts, start=1)))
    weights = _renamed(tensors, 6, 512)
    save_file({name: torch.from_numpy(np.array(each)) for name, each in weights.items()}, folder / "model.safetensors")
    shutil.copy(parts[0] / "tokenizer.json", folder)
    names = {
        each["id"]: each["content"] for each in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    }
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _END)
    of_side = {"layers": 6, "attention_heads": 8, "ffn_dim": 2048}
    sizes = {f"{side}_{name}": number for side in ("encoder", "decoder") for name, number in of_side.items()}
    config = WhisperConfig(
        vocab_size=len(tensors["decoder/embeddings/weight"]),
        d_model=512,
        num_mel_bins=80,
        decoder_start_token_id=_START,
        architectures=["WhisperForConditionalGeneration"],
        dtype="float32",
        **sizes,
        **ends,
    )
    config.save_pretrained(folder)
    GenerationConfig(
        alignment_heads=settings["alignment_heads"],
        suppress_tokens=settings["suppress_ids"],
        begin_suppress_tokens=settings["suppress_ids_begin"],
        lang_to_id={names[each]: each for each in settings["lang_ids"]},
        task_to_id={"transcribe": _TRANSCRIBE, "translate": _TRANSLATE},
        no_timestamps_token_id=_NO_TIMESTAMPS,
        max_initial_timestamp_index=50,
        is_multilingual=True,
        decoder_start_token_id=_START,
        max_length=448,
        **ends,
    ).save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    return folder
