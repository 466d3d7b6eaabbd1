"""Names and expressions in the files of models and adapters are read in time linear in them, or refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, Regex
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from oaiserve.checkpoints.adapters import BadAdapter, read_adapter
from oaiserve.checkpoints.bad_file import BadFile
from oaiserve.checkpoints.quantization import read_quantization, refuse_costly_patterns
from oaiserve.engine.text.stored_tokenizer import StoredTokenizer
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import StartupError
from tools.attack.functions.linear import FACTOR, Case, repeated

OF_ADAPTERS = (
    *("rank_pattern", "alpha_pattern", "target_modules", "exclude_modules", "layers_pattern", "modules_to_save"),
    *("target_parameters", "init_lora_weights", "peft_type", "bias"),
)
OF_QUANTIZATIONS = ("modules_to_not_convert", "ignore", "ignored_layers", "dynamic", "config_groups")
UNITS = (".*a", "(a|.*)?", "(a+)+", r"[^b]*\w*", "a", ".", "(", r"\d{1,90}", "|a")


def cases() -> Iterator[Case]:
    """Yield each case twice, so that three sizes are compared."""
    for name, run, size in _runs():
        for each in (size, FACTOR * size):
            yield Case(f"{name}, {each}", run, each)


def _runs() -> Iterator[tuple[str, Callable[[int], object], int]]:
    for setting in OF_ADAPTERS:
        for unit in UNITS:
            text = repeated("", unit)
            yield f"adapter, long {setting}, {unit!r}", reading_adapter(setting, text, lambda size: ["a." * 60]), 50
        yield f"adapter, many {setting}", reading_adapter(setting, many(".*{}a"), lambda size: ["a.a.a.m0"]), 50
        yield (
            f"adapter, {setting} and many modules",
            reading_adapter(setting, lambda size: ".*a.*a.*a", many("a.m{}")),
            50,
        )
        long_name = reading_adapter(setting, lambda size: ".*a.*a.*a", lambda size: ["a." * size + "m0"])
        yield f"adapter, {setting} and a long module", long_name, 20
    for setting in OF_QUANTIZATIONS:
        for unit in UNITS:
            yield f"quantization, long {setting}, {unit!r}", reading_quantization(setting, repeated("re:", unit)), 500
        yield f"quantization, many {setting}", reading_quantization(setting, many("re:.*{}(a+)+")), 500
    for unit in UNITS:
        if unit not in ("(a|.*)?", "(a+)+", "("):  # the tokenizers library takes more time itself, or refuses it
            yield f"tokenizer, long pattern, {unit!r}", making_tokenizer(pattern=repeated("", unit)), 200
    yield "tokenizer, long token", making_tokenizer(tokens=lambda size: [f"<|{'a' * size}|>"]), 50
    yield "tokenizer, many tokens", making_tokenizer(tokens=many("<|a{}|>")), 50
    yield "tokenizer, tokens in tokens", making_tokenizer(tokens=lambda size: ["<" * n for n in range(2, size)]), 10


def many(form: str) -> Callable[[int], list[str]]:
    return lambda size: [form.format(number) for number in range(size)]


def reading_adapter(
    setting: str, value: Callable[[int], str | list[str]], modules: Callable[[int], list[str]]
) -> Callable[[int], object]:
    """Return a function that writes an adapter with this setting for these modules, and reads it."""

    def read(size: int) -> None:
        texts = value(size)
        patterns = dict.fromkeys([texts] if isinstance(texts, str) else texts, 1)
        config = {"peft_type": "LORA", "r": 1, setting: patterns if setting.endswith("_pattern") else texts}
        header: dict[str, Any] = {}
        for module in modules(size):
            for half, shape in (("A", [1, 2]), ("B", [2, 1])):
                begin = 8 * len(header)
                tensor = {"dtype": "F32", "shape": shape, "data_offsets": [begin, begin + 8]}
                header[f"base_model.model.{module}.lora_{half}.weight"] = tensor
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        with TemporaryDirectory() as folder, suppress(BadAdapter):
            Path(folder, "adapter_config.json").write_text(json.dumps(config))
            data = struct.pack("<Q", len(head)) + head + bytes(8 * len(header))
            Path(folder, "adapter_model.safetensors").write_bytes(data)
            read_adapter(Path(folder))

    return read


def reading_quantization(setting: str, value: Callable[[int], str | list[str]]) -> Callable[[int], object]:
    """Return a function that reads the config.json of a quantized model with this setting."""

    def read(size: int) -> None:
        texts = value(size)
        listed = [texts] if isinstance(texts, str) else texts
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 128}
        groups = {"g": {"targets": listed, "weights": weights}}
        settings = {"bits": 4, "format": "pack-quantized", "config_groups": groups}
        if setting == "dynamic":
            settings[setting] = {text: {} for text in listed}
        elif setting != "config_groups":
            settings[setting] = listed
        for method in ("compressed-tensors", "gptq", "awq", "fp8", "mxfp4"):
            config = {"quantization_config": settings | {"quant_method": method}}
            with suppress(BadFile):
                read_quantization(config)
            with suppress(BadFile):
                refuse_costly_patterns(config)

    return read


def making_tokenizer(
    *, pattern: Callable[[int], str] | None = None, tokens: Callable[[int], list[str]] | None = None
) -> Callable[[int], object]:
    """Return a function that loads a tokenizer with this pattern and these control tokens, and encodes a message."""

    def make(size: int) -> None:
        backend = RustTokenizer(BPE({character: number for number, character in enumerate("ab<|>")}, []))
        if pattern is not None:
            split = Split(Regex(pattern(size)), "isolated")
            backend.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
        if tokens is not None:
            backend.add_special_tokens([AddedToken(token, normalized=False) for token in tokens(size)])
        parts = StoredTokenizer(
            backend_tokenizer=backend,
            length=backend.get_vocab_size(),
            split_special_tokens=False,
            eos_token_ids=[],
            special_tokens_map={},
            chat_template=None,
            response_template=None,
        )
        with suppress(StartupError):
            Tokenizer(parts)

    return make
