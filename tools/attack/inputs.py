"""Sound inputs of readers, which the fuzzer spoils, and inputs that it draws in place of spoiled ones."""

from __future__ import annotations

import gzip
import json
import zlib
from functools import cache
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
import soundfile
from backports import zstd
from hypothesis import strategies as st
from safetensors.numpy import save

from oaiserve.http.codings import CODINGS
from tests.engine.grammars.keywords import OBEYED
from tools.attack import model_formats
from tools.attack.families import generated
from tools.attack.media_files import plain
from tools.attack.spoils import (
    bytes_edited,
    header_edited,
    json_edited,
    token_replaced,
)

BOUNDARY = "fuzzed"


def small_tensors() -> list[bytes]:
    arrays = {f"model.layers.{layer}.{name}.weight": np.ones((4, 8), np.float32) for layer in (0, 1) for name in "qk"}
    return [save(arrays), save({"a": np.zeros(0, np.float16)}, {"format": "pt"})]


def small_adapters() -> list[bytes]:
    """Return configurations of adapters; all have the same weights."""
    sound = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    more = {"rank_pattern": {"0.q_proj": 2, "^model.*k": 4}, "alpha_pattern": {"q_proj": 4}, "use_rslora": True}
    return [json.dumps(sound).encode(), json.dumps(sound | more).encode()]


@cache
def small_gguf() -> list[bytes]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "small.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_embedding_length(8)
        writer.add_head_count(2)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b", "ab"])
        writer.add_token_types([1, 1, 1])
        writer.add_token_merges(["a b"])
        writer.add_tensor("token_embd.weight", np.ones((3, 8), np.float32))
        writer.add_tensor("blk.0.attn_q.weight", np.ones((8, 8), np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return [path.read_bytes()]


def configurations() -> list[bytes]:
    sound = model_formats.LLAMA | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    quantized = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "dynamic": {"-:.*k_proj": {}}}
    return [json.dumps(sound).encode(), json.dumps(sound | {"quantization_config": quantized}).encode()]


def response_templates() -> list[bytes]:
    """Return declarations of answers: calls in tags, and in JSON."""
    pattern = r"<\|call\|>(?P<name>\w+)\n"
    arguments = {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</>"}
    call = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
    tagged = {"open_pattern": pattern, "close": "</c>", "content": "xml-inline", "content_args": arguments}
    in_json = {"open": ["<c>", "<t>"], "close": "</c>", "content": "json"}
    thoughts = {"open_pattern": r"<\|think(?:ing)?\|>", "close": "</t>"}
    return [
        json.dumps(
            {"start_anchor": "a", "fields": {"thinking": thoughts, "tool_calls": field | {"transform": call}}}
        ).encode()
        for field in (tagged, in_json)
    ]


def images() -> list[bytes]:
    from oaiserve.plugins.media.model import image_process

    forms = [plain(form, side=9) for form in image_process.FORMATS]
    return [*forms, plain("PNG", "P", side=9), plain("GIF", "L", side=9), plain("WEBP", "RGBA", side=9)]


def sounds() -> list[bytes]:
    files = []
    for form, subtype in (("WAV", "PCM_16"), ("WAV", "FLOAT"), ("FLAC", "PCM_16"), ("MP3", "MPEG_LAYER_III")):
        file = BytesIO()
        soundfile.write(file, np.sin(np.arange(4000, dtype=np.float32) / 9), 8000, format=form, subtype=subtype)
        content = file.getvalue()
        peak = content.find(b"PEAK")
        if peak >= 0:  # a chunk with the time of writing
            content = content[: peak + 12] + bytes(4) + content[peak + 16 :]
        files.append(content)
    return files


def urls() -> list[bytes]:
    """Return a URL of a medium and where its host redirects to, in two lines."""
    return [
        b"http://pictures.example/a.png?b=c\nhttps://a.pictures.example/%C3%A9/../b#c",
        b"https://user.pictures.example/a\xc3\xa9?b\n../c.png",
        b"http://[2001:db8::1]:8000\n//pictures.example",
    ]


def compressed() -> list[bytes]:
    """Return bodies with the number of their coding before them."""
    body = b'{"prompt": "Hi"}' * 50
    coded = {"zstd": zstd.compress(body), "gzip": gzip.compress(body, mtime=0), "deflate": zlib.compress(body)}
    return [bytes([CODINGS.index(name)]) + content for name, content in coded.items()]


def forms() -> list[bytes]:
    def field(name: str, content: bytes, more: str = "") -> bytes:
        return (
            f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content + b"\r\n"
        )

    purpose = field("purpose", b"batch")
    end = f"--{BOUNDARY}--\r\n".encode()
    file = field("file", b'{"custom_id": "1"}\n', "; filename=\"a%22.jsonl\"; filename*=UTF-8''%c3%a9.jsonl")
    return [purpose + file + end, file + purpose + field("expires_after[seconds]", b"3600") + end]


def records() -> list[bytes]:
    """Return a record of a start without files, but for the digest at its end."""
    head = {"format": 2, "folder": "/models/a", "day": "2026-12-03", "versions": {}, "files": {}}
    more = {"warnings": [["a", 30, "b"]], "data": {"dtype": "float32"}}
    return [json.dumps(head | more).encode() + b"\n" + bytes(64)]


def schemas() -> list[bytes]:
    return [json.dumps(row.schema).encode() for row in OBEYED]


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Return a path with a body: a line of JSON, and the rest."""
    path = draw(st.sampled_from(sorted(generated.bodies())))
    content = draw(generated.contents(path))
    if draw(st.integers(0, 3)) == 0:
        content = token_replaced(draw, content)
    return json.dumps(path).encode() + b"\n" + content


@cache
def sound_files(name: str) -> list[bytes]:
    """Return the files of a model in a format that are spoiled, each with its path before it."""
    with TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model_formats.write(name, model)
        return [path.encode() + b"\n" + (model / path).read_bytes() for path in model_formats.FORMATS[name][1]]


def file_spoiled(draw: st.DrawFn, content: bytes) -> bytes:
    """Spoil a file behind its path, by its kind."""
    path, line_end, file = content.partition(b"\n")
    of_kind = {".json": [json_edited], ".safetensors": [header_edited, bytes_edited]}
    edit = draw(st.sampled_from(of_kind.get(Path(path.decode()).suffix, [bytes_edited])))
    return path + line_end + edit(draw, file)
