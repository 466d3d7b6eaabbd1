from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.config import Bytes, Config, EngineOptions, OptionError, ServerOptions, TelemetryOptions
from oaiserve.plugins.shared.store_options import StoreOptions


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("8MiB", 8 * 2**20), ("4gib", 4 * 2**30), ("1.5 KiB", 1536), (" 3KiB ", 3072), (7, 7)],
)
def test_a_size_is_read_with_and_without_a_unit(text: str | int, size: int) -> None:
    assert Bytes(text) == size


@pytest.mark.parametrize("text", ["", "x", "8MB", "-1", "1e3", "MiB", "1,5GiB"])
def test_an_invalid_size_is_refused_with_the_allowed_units(text: str) -> None:
    with pytest.raises(OptionError, match="KiB, MiB or GiB"):
        Bytes(text)


@given(st.integers(min_value=0, max_value=2**50))
def test_a_size_can_be_parsed_from_its_text(size: int) -> None:
    assert Bytes(str(Bytes(size))) == size


def test_a_config_needs_only_a_model() -> None:
    config = Config("demo")
    assert (config.server.port, config.engine.block_size, config.telemetry.recent_requests) == (8000, 16, 256)


def test_options_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        ServerOptions().port = 1  # type: ignore[misc]


def test_api_keys_stay_out_of_the_repr() -> None:
    assert "secret" not in repr(Config("demo", ServerOptions(api_key=("secret",))))


def test_a_model_has_the_name_of_its_file_or_folder_or_its_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "hub/models--org--chat/snapshots/abc"
    for folder in (tmp_path / "Chat-0.5B", cached):
        folder.mkdir(parents=True)
    for file in ("small-Q4_K_M.gguf", "large-00001-of-00002.gguf"):
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    for model, name in {
        "small-Q4_K_M.gguf": "small-Q4_K_M",
        f"{tmp_path}/large-00001-of-00002.gguf": "large",
        "Chat-0.5B/": "Chat-0.5B",
        "./Chat-0.5B": "Chat-0.5B",
        str(cached): "org/chat",
        "org/chat": "org/chat",
        "org/chat-GGUF:Q4_K_M": "org/chat-GGUF:Q4_K_M",
        "demo": "demo",
    }.items():
        config = Config(model)
        assert (config.model_name, set(config.accepted_names)) == (name, {name, model})


def test_a_given_name_replaces_the_path(tmp_path: Path) -> None:
    config = Config(str(tmp_path), ServerOptions(served_model_name=("a", "b", "a")))
    assert config.model_names == config.accepted_names == ("a", "b")
    with pytest.raises(OptionError, match="which is the name of the model itself"):
        Config(str(tmp_path), engine=EngineOptions(lora=(f"{tmp_path.name}={tmp_path}",)))


WRONG_OF_SERVER: list[tuple[dict[str, Any], str]] = [
    ({"host": ""}, "--host is empty, but must be an address or a name."),
    ({"port": 65536}, "--port is 65536, but must be between 0 and 65535."),
    ({"port": -1}, "--port is -1"),
    ({"tls_key": Path("key.pem")}, "--tls-certificate is missing."),
    ({"tls_certificate": Path("cert.pem")}, "--tls-key is missing."),
    ({"api_key": ("",)}, "--api-key is not usable"),
    ({"api_key": ("two words",)}, "--api-key is not usable"),
    ({"cors_origin": ("app.example.com",)}, "--cors-origin is 'app.example.com'"),
    ({"cors_origin": ("https://app.example.com/",)}, "without a path"),
    ({"allowed_host": ("",)}, "--allowed-host is ''"),
    (
        {"allowed_host": ("llm.example.com:8000",)},
        "--allowed-host is 'llm.example.com:8000', but must be a host name",
    ),
    ({"allowed_host": ("a", "http://llm.example.com")}, "--allowed-host is 'http://llm.example.com'"),
    ({"allowed_host": ("*",)}, "--allowed-host is '*'"),
    ({"trusted_proxy": ("10.0.0.0/8", "*")}, "--trusted-proxy is '*', but must be an IP address"),
    ({"body_limit": Bytes(0)}, "--body-limit is 0"),
    ({"allow_media_from": ("https://a.test",)}, "--allow-media-from is 'https://a.test', but must be HOST, *.HOST or"),
    ({"allow_media_from": ("*",)}, "--allow-media-from is '*'"),
    ({"max_images": -1}, "--max-images is -1, but must be at least 0."),
    ({"served_model_name": ("a", "")}, "--served-model-name is empty"),
    ({"drain_timeout_seconds": -1}, "--drain-timeout-seconds is -1, but must be at least 0."),
    ({"write_timeout_seconds": -1.0}, "--write-timeout-seconds is -1.0, but must be at least 0"),
    ({"write_timeout_seconds": float("nan")}, "--write-timeout-seconds is nan"),
    ({"header_timeout_seconds": 0}, "--header-timeout-seconds is 0, but must be above 0"),
    ({"idle_timeout_seconds": float("inf")}, "--idle-timeout-seconds is inf, but must be above 0, and finite."),
    ({"max_connections": 0}, "--max-connections is 0, but must be at least 1."),
    ({"max_connections_per_address": -1}, "--max-connections-per-address is -1, but must be at least 0."),
    ({"stream_interval": 0}, "--stream-interval is 0, but must be at least 1."),
    ({"log_level": "loud"}, "--log-level is 'loud', but must be one of debug, info, warning, error."),
    ({"log_format": "xml"}, "--log-format is 'xml'"),
]
WRONG_OF_STORE: list[tuple[dict[str, Any], str]] = [
    ({"response_store_number": -1}, "--response-store-number is -1"),
    ({"response_store_bytes": Bytes(0)}, "--response-store-bytes is 0"),
    ({"response_store_seconds": 0}, "--response-store-seconds is 0"),
]
WRONG_OF_ENGINE: list[tuple[dict[str, Any], str]] = [
    ({"device": "tpu"}, "--device is 'tpu', but must be one of auto, cpu, cuda."),
    ({"dtype": "int8"}, "--dtype is 'int8'"),
    ({"lora": ("sql",)}, "--lora is 'sql', but must be NAME=FOLDER."),
    ({"lora": ("=here",)}, "--lora is '=here', but must be NAME=FOLDER."),
    ({"lora": ("a=x", "a=y")}, "--lora has the same name twice."),
    ({"kv_cache_dtype": "fp4"}, "--kv-cache-dtype is 'fp4', but must be one of auto, int8, fp8."),
    (
        {"kv_cache_dtype": "int8", "device": "cuda"},
        "--kv-cache-dtype int8 and --device cuda do not go together: only the native step of a CPU has such a",
    ),
    ({"kv_cache_dtype": "int8", "compile": False}, "--kv-cache-dtype int8 and --no-compile do not go together"),
    (
        {"quantize": "int4", "device": "cuda"},
        "--quantize int4 and --device cuda do not go together: it is for a CPU",
    ),
    ({"quantize": "fp8", "device": "cpu"}, "--quantize fp8 and --device cpu do not go together: it is for a GPU"),
    ({"quantize": "fp8", "compile": False}, "--quantize fp8 needs --compile: only kernels can do it"),
    ({"quantize": "int4", "dtype": "float16"}, "--quantize int4 and --dtype float16 do not go together"),
    ({"quantize": "int4", "compile": False}, "--quantize int4 needs --compile"),
    ({"max_model_len": 0}, "--max-model-len is 0, but must be at least 1."),
    ({"max_image_pixels": 0}, "--max-image-pixels is 0, but must be at least 1 and at most 178956970."),
    ({"block_size": 0}, "--block-size is 0"),
    ({"kv_blocks": 0}, "--kv-blocks is 0"),
    ({"gpu_memory_utilization": 0}, "--gpu-memory-utilization is 0, but must be above 0 and at most 1."),
    ({"gpu_memory_utilization": 1.1}, "--gpu-memory-utilization is 1.1"),
    ({"gpu_memory_utilization": float("nan")}, "--gpu-memory-utilization is nan"),
    ({"kv_cache_memory": Bytes(0)}, "--kv-cache-memory is 0"),
    ({"kv_blocks": 8, "kv_cache_memory": Bytes("1GiB")}, "Set only one."),
    ({"max_running": 0}, "--max-running is 0"),
    ({"max_step_tokens": 0}, "--max-step-tokens is 0"),
    ({"max_waiting": -1}, "--max-waiting is -1, but must be at least 0."),
    ({"tokenize_workers": -1}, "--tokenize-workers is -1"),
    ({"queue_timeout_seconds": -1.0}, "--queue-timeout-seconds is -1.0, but must be at least 0."),
    (
        {"request_timeout_seconds": float("inf")},
        "--request-timeout-seconds is inf, but must be at least 0, and finite.",
    ),
    ({"request_timeout_seconds": float("nan")}, "--request-timeout-seconds is nan, but must be at least 0."),
]
WRONG_OF_TELEMETRY: list[tuple[dict[str, Any], str]] = [
    ({"recent_requests": -1}, "--recent-requests is -1, but must be at least 0."),
    ({"slo": "itl:30ms"}, "--slo is 'itl:30ms', but must be times for ttft or tpot, as in ttft:2s,tpot:100ms."),
    ({"slo": "ttft:0s"}, "--slo is 'ttft:0s'"),
]


@pytest.mark.parametrize(
    ("options", "wrong", "message"),
    [
        *((ServerOptions, *row) for row in WRONG_OF_SERVER),
        *((StoreOptions, *row) for row in WRONG_OF_STORE),
        *((EngineOptions, *row) for row in WRONG_OF_ENGINE),
        *((TelemetryOptions, *row) for row in WRONG_OF_TELEMETRY),
    ],
)
def test_a_wrong_option_is_named_with_its_value(options: type, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as error:
        options(**wrong)
    assert message in str(error.value)


def test_guarding_all_needs_keys() -> None:
    with pytest.raises(OptionError, match="--guard-all needs API keys"):
        Config("demo", ServerOptions(guard_all=True))


@pytest.mark.parametrize("origin", ["*", "https://app.example.com", "http://localhost:3000", "app://obsidian.md"])
def test_an_origin_is_a_star_or_scheme_and_host(origin: str) -> None:
    assert ServerOptions(cors_origin=(origin,)).cors_origin == (origin,)
