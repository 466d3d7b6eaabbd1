"""Ways to spoil a sound file: a function takes its bytes and random numbers, and returns other bytes."""

from __future__ import annotations

import copy
import json
import random
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Spoil = Callable[[bytes, random.Random], bytes]

EXTREMES: tuple[Any, ...] = (  # some just within what the check of files lets through
    *(0, 1, -1, 2, 255, 2**12, 2**16, 2**20, 2**24, 10**6, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63),
    *(2**64 - 1, 2**64, 10**30, 0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf")),
)
OTHER_KINDS: tuple[Any, ...] = (None, True, "", "x" * 300, "../../../etc/passwd", [], {}, [[]], [None], {"": {}})


# Beyond Python's limits of digits and of nesting, no character, no number of JSON, and beyond all floats.
TOKENS = (b"7" * 5000, b"[" * 20_000 + b"]" * 20_000, b'"\\ud800"', b"NaN", b"1e999")
_TOKEN = re.compile(rb'[:\[,]\s*("(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null)(?!\s*:)')


def header_end(content: bytes) -> int:
    """Return where the data of a safetensors file begins."""
    return 8 + int.from_bytes(content[:8], "little")


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.choice((rng.randrange(64), rng.randrange(len(content)), len(content) - 1))]


def lengthened(content: bytes, rng: random.Random) -> bytes:
    return content + rng.randbytes(rng.choice((1, 8, 4096)))


def changed_bytes(content: bytes, rng: random.Random, end: int | None = None) -> bytes:
    """Change a few bytes, in three of four cases before `end`, which is that of a safetensors file's header."""
    spoiled = bytearray(content)
    end = header_end(content) if end is None else end
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        at = rng.randrange(end if rng.randrange(4) else len(spoiled))
        spoiled[at] = rng.choice((0, 255, spoiled[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
    return bytes(spoiled)


def extreme_number(content: bytes, at: int, rng: random.Random) -> bytes:
    """Write an extreme number at a place, in a random width."""
    form = rng.choice("bBhHiIqQ")
    bits = 8 * struct.calcsize(form)
    number = rng.choice(
        (0, 1, 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1, 2 ** (bits // 2), rng.getrandbits(bits))
    )
    written = number.to_bytes(bits // 8, "little")
    return content[:at] + written + content[at + len(written) :]


def token_replaced(content: bytes, rng: random.Random) -> bytes:
    """Replace a value in a text of JSON by one that readers of JSON have stumbled over."""
    places = [match.span(1) for match in _TOKEN.finditer(content)]
    if not places:
        return content
    begin, end = rng.choice(places)
    return content[:begin] + rng.choice(TOKENS) + content[end:]


def edited(tree: Any, rng: random.Random) -> Any:
    """Return a copy of what JSON holds, with one to three changes somewhere."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        parents = [node for node in _nodes(tree) if isinstance(node, dict | list) and node]
        if not parents:
            return copy.deepcopy(rng.choice(OTHER_KINDS))
        parent = rng.choice(parents)
        places = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
        place = rng.choice(places)
        other = rng.choice(places)
        match rng.randrange(8):
            case 0:
                del parent[place]
            case 1:
                parent[place] = copy.deepcopy(rng.choice(OTHER_KINDS))
            case 2:
                parent[place], parent[other] = parent[other], parent[place]
            case 3:
                parent[place] = copy.deepcopy(parent[other])
            case 4 if isinstance(parent, dict):
                parent[rng.choice(("", "x" * 300, f"{place}x", "model.\0"))] = parent.pop(place)
            case 5 if isinstance(parent[place], int) and not isinstance(parent[place], bool):
                parent[place] += rng.choice((-1, 1, 4, 16, 2**32))
            case _:
                parent[place] = rng.choice(EXTREMES)
    return tree


def _nodes(tree: Any) -> Iterator[Any]:
    yield tree
    if isinstance(tree, dict | list):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from _nodes(child)


def edited_json(content: bytes, rng: random.Random, part: str | None = None) -> bytes:
    tree = json.loads(content)
    return json.dumps(edited(tree, rng) if part is None else tree | {part: edited(tree[part], rng)}).encode()


# Keys that libraries read, in files that need not have them.
MORE_KEYS: dict[str, tuple[str, ...]] = {
    "config.json": (
        *("auto_map", "attention_bias", "audio_config", "dtype", "generation_config", "id2label", "layer_types"),
        *("max_window_layers", "num_experts", "num_labels", "pad_token_id", "quantization_config", "rope_scaling"),
        *("sliding_window", "text_config", "torch_dtype", "transformers_version", "transformers_weights"),
        *("vision_config", "use_cache", "vocab_size", "layer_norm_eps", "rms_norm_eps", "hidden_act"),
    ),
    "generation_config.json": (
        *("eos_token_id", "max_new_tokens", "max_length", "temperature", "top_k", "top_p", "min_p", "do_sample"),
        *("repetition_penalty", "stop_strings", "bos_token_id", "suppress_tokens", "cache_implementation"),
    ),
    "tokenizer_config.json": (
        *("added_tokens_decoder", "additional_special_tokens", "auto_map", "bos_token", "chat_template", "eos_token"),
        *("extra_special_tokens", "model_max_length", "pad_token", "response_template", "split_special_tokens"),
        *("tokenizer_class", "unk_token"),
    ),
    "special_tokens_map.json": ("bos_token", "eos_token", "additional_special_tokens"),
    "adapter_config.json": (
        *("alpha_pattern", "base_model_name_or_path", "bias", "exclude_modules", "layers_pattern", "lora_alpha"),
        *("layers_to_transform", "modules_to_save", "peft_type", "r", "rank_pattern", "target_modules", "use_dora"),
    ),
}
_ABSENT = object()  # the value of a key that is not in a file
NESTED: Any = 7
for _ in range(400):  # about as deep as JSON can be read and written
    NESTED = [NESTED]
KINDS: tuple[Any, ...] = (None, True, 77, -1, 0.5, 10**30, "", "x", "load", [], ["x"], [None], {}, {"x": "x"}, NESTED)


def with_other_kinds(file: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield a configuration with each value in turn replaced by each kind of JSON, with what was replaced."""
    tree = json.loads(content)
    tree = dict.fromkeys(MORE_KEYS.get(Path(file).name, ()), _ABSENT) | tree
    for parent in [node for node in _nodes(tree) if isinstance(node, dict | list)]:
        for place in list(parent) if isinstance(parent, dict) else range(min(1, len(parent))):
            before = parent[place]
            for kind in KINDS:
                if kind != before:
                    parent[place] = kind
                    present = {key: value for key, value in tree.items() if value is not _ABSENT}
                    yield f"{file}: {place} = {json.dumps(kind)[:20]}", json.dumps(present).encode()
            parent[place] = before
    for kind in KINDS:
        yield f"{file} = {json.dumps(kind)[:20]}", json.dumps(kind).encode()


def edited_header(content: bytes, rng: random.Random) -> bytes:
    end = header_end(content)
    header = edited_json(content[8:end], rng)
    return struct.pack("<Q", len(header)) + header + content[end:]


def extreme_in_gguf(content: bytes, rng: random.Random, places: Sequence[int]) -> bytes:
    """Replace a number of a GGUF head, near one of `places`, where its values and tensors begin."""
    at = rng.choice((rng.choice(places) + rng.randrange(64), 4 + rng.randrange(20)))
    return extreme_number(content, min(at, len(content) - 8), rng)


def spoiled(spoil: Spoil, content: bytes, rng: random.Random) -> bytes:
    """Return the content with a change: some ways to spoil it may also find what is there already."""
    while (changed := spoil(content, rng)) == content:
        pass
    return changed
