"""Every setting is defined once here. Flags, config file keys, environment variables and --help are generated from it.

This module needs only the standard library and `hosts`. A constructor checks the values, opens no file, and raises
OptionError for a wrong value.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from oaiserve.hosts import host_name, is_loopback, is_network, parse_authority

TaskOption = Literal["auto", "generate", "embed", "score"]
Device = Literal["auto", "cpu", "cuda"]
CpuFeatures = Literal["native", "avx2"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Quantize = Literal["none", "int8", "int4", "fp8"]
KVCacheDtype = Literal["auto", "int8", "fp8"]
DraftSource = Literal["auto", "lookup", "off"]
SchedulingPolicy = Literal["fair", "fcfs", "priority", "shortest"]
ReasoningParser = Literal["auto", "none", "deepseek_r1", "qwen3"]
EngineProcessOption = Literal["auto", "on", "off"]
Replicas = int | Literal["auto"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "short", "console", "json"]

FREQUENT = {"frequent": True}  # marks the flags that most people use: --help shows only these, --help-all shows all
NO_FLAG = {"has_flag": False}  # marks fields that only tools and tests set, through the constructor

Options = TypeVar("Options")

_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(|kib|mib|gib)", re.IGNORECASE)
_SLO = re.compile(r"(ttft|tpot):(?=.*[1-9])\d+(\.\d+)?(s|ms|us)")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")  # matches the end of a shard's name
_IN_HUB_CACHE = re.compile(r"/models--([^/]+)/snapshots/[^/]+$")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")  # apps have their own schemes


class OptionError(ValueError):
    """A setting has a wrong value. The message names the flag, the value and the allowed ones."""


class Bytes(int):
    """A number of bytes, parsed from and shown as text such as "8MiB". Raises OptionError for any other text."""

    def __new__(cls, size: int | str) -> Bytes:
        if isinstance(size, int):
            return super().__new__(cls, size)
        match = _SIZE.fullmatch(size.strip())
        if match is None:
            raise OptionError(f"'{size}' is not a size. Write bytes, or a number with KiB, MiB or GiB, as in 8MiB.")
        number, unit = match.groups()
        return super().__new__(cls, int(Decimal(number) * _UNITS[unit.lower()]))

    def __str__(self) -> str:
        for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
            if self and self % unit == 0:
                return f"{self // unit}{name}"
        return int.__repr__(self)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def check(holds: bool, flag: str, value: object, allowed: str) -> None:
    if not holds:
        raise OptionError(f"{flag} is {value}, but must be {allowed}.")


def is_header_value(text: str) -> bool:
    """Return whether a header can carry the text as one word. Keys must satisfy this."""
    return text.isascii() and text.isprintable() and text == "".join(text.split()) != ""


def _refuse(flag: str, *contradictions: tuple[str, bool, str]) -> None:
    """Reject a setting if one of these conflicting settings is active. Each comes with the reason."""
    for other, holds, why in contradictions:
        if holds:
            raise OptionError(f"{flag} and {other} do not go together: {why}.")


@cache
def _choices(kind: type) -> dict[str, tuple[str, ...]]:
    hints = get_type_hints(kind)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def check_choices(options: Any) -> None:
    for name, allowed in _choices(options.__class__).items():
        value = getattr(options, name)
        check(value in allowed, flag_of(name), f"'{value}'", f"one of {', '.join(allowed)}")


def check_seconds(name: str, seconds: float) -> None:
    check(0 < seconds < float("inf"), flag_of(name), seconds, "above 0, and finite")


def check_least(options: Any, **least: float) -> None:
    for name, bound in least.items():
        value = getattr(options, name)
        finite = ", and finite" if value == float("inf") else ""
        check(value is None or bound <= value < float("inf"), flag_of(name), value, f"at least {bound}{finite}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerOptions:
    """Settings of everything that listens: its address, TLS, allowed clients, shutdown and log."""

    host: str = field(default="127.0.0.1", metadata=FREQUENT)
    """Address to listen on. 0.0.0.0 means every IPv4 address of this machine, :: every address."""

    port: int = field(default=8000, metadata=FREQUENT)
    """TCP port. 0 picks a free one."""

    tls_certificate: Path | None = None
    """PEM file with the TLS certificate chain. Turns on HTTPS; needs --tls-key."""

    tls_key: Path | None = None
    """PEM file with the certificate's private key, without a passphrase."""

    allowed_host: tuple[str, ...] = ()
    """Host name of this server for clients, such as llm.example.com. Repeatable. Default: loopback names on a loopback
    --host, else any."""

    trusted_proxy: tuple[str, ...] = ()
    """Address or network (10.0.0.0/8) of a proxy whose x-forwarded-for header is trusted. Repeatable."""

    open_dashboard: bool = False
    """Show the pages and /debug even on a public address without API keys. They show who sent how much and when, but no
    text."""

    body_limit: Bytes | None = None
    """Largest request body. Default: 8MiB, or 32MiB for a gateway and for models that read images or sounds."""

    drain_timeout_seconds: int = 30
    """Seconds for running requests to finish after SIGTERM or Ctrl-C."""

    log_level: LogLevel = "info"
    """Lowest severity to log."""

    log_format: LogFormat = "auto"
    """Format of the log. short: for a terminal. console: complete lines. json: one object per line. auto: short in a
    terminal, else json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(ListenerOptions):
    """Settings of the HTTP server: address, access, timeouts and log."""

    # Log lines and tracebacks must not show the key.
    api_key: tuple[str, ...] = field(default=(), repr=False, metadata=FREQUENT)
    """Key that clients must send as "Authorization: Bearer KEY". Repeatable. Other users of the machine see flags, so
    set it in the environment or in a file."""

    api_key_file: tuple[Path, ...] = ()
    """File with one key per line: NAME KEY, or only KEY. Repeatable. Names appear in logs and traces; changes take
    effect without a restart."""

    share_prefix_cache: bool = False
    """Share the prefix cache between API keys. By default, each key reuses only its own prompts."""

    guard_all: bool = False
    """Require a key on /health, /ready, /version, /metrics and /openapi.json, too."""

    cors_origin: tuple[str, ...] = ()
    """Origin whose web pages may call this server, such as https://app.example.com, or * for any. Repeatable."""

    served_model_name: tuple[str, ...] = field(default=(), metadata=FREQUENT)
    """Name of the model in the API. Default: that of its file, without .gguf, or of its folder, or the hub id. After
    MODEL, the flag takes several names; answers show the first."""

    write_timeout_seconds: float = 60
    """Seconds until a client that stops reading is disconnected. 0: never."""

    header_timeout_seconds: float = 20
    """Seconds for the headers of a request to arrive, and for the TLS handshake before."""

    idle_timeout_seconds: float = 75
    """Seconds that a connection stays open after an answer."""

    max_connections: int | None = None
    """Maximum open connections. Default: 8192, or what the limit of open files permits."""

    max_connections_per_address: int | None = None
    """Maximum open connections from one address or IPv6 /64 network. 0: no limit. Default: half of
    --max-connections."""

    stream_interval: int = 1
    """Tokens per event of a stream, unless the request sets it. The first token is always sent at once."""

    default_params: str | None = None
    """Sampling parameters for requests that set none, such as temperature=0.7,top_p=0.8, or JSON, instead of the
    model's own."""

    progress_after_seconds: float = 1.0
    """If prefill takes longer than this many seconds, start the stream early and send progress events. 0: never."""

    tool_call_parser: str = "auto"
    """How the model writes tool calls. auto: detected from the tokenizer or chat template, else hermes. none: calls
    stay in the text. docs/tools-and-reasoning.md lists all."""

    response_template: Path | None = None
    """JSON file with a response template, as transformers defines it, in place of the model's own."""

    reasoning_parser: ReasoningParser = "auto"
    """How to separate the model's reasoning from its answer. auto: detected from the chat template. none: it stays in
    the text. deepseek_r1: every answer begins with reasoning. qwen3: the same, unless a request turns it off."""

    allow_media_from: tuple[str, ...] = ()
    """Host from which the server may fetch images and sounds: images.example.com, *.example.com or localhost:9000.
    Repeatable."""

    max_images: int = 16
    """Maximum images in a request with earlier turns; likewise sounds."""

    engine_process: EngineProcessOption = "auto"
    """Run the engine in a process of its own. If it ends, another one goes on with the open requests. auto: on, if the
    model runs on a GPU. With several models, each has a process anyway."""

    replicas: Replicas = 1
    """Engine processes that share the requests of one model: one for each GPU, or on a CPU any number, among which
    --cpu-threads are divided. auto: one for each GPU, or else for each NUMA node (docs/replicas.md)."""

    front_processes: int = 1
    """Processes that accept connections and write answers, for a model so fast that one process of Python cannot keep
    up. With several, the engine has a process of its own, too (docs/replicas.md#front-processes)."""

    plugin: tuple[str, ...] = ()
    """Plug-in to load: a module, or a file that ends in .py. Repeatable (docs/plugins.md)."""

    def __post_init__(self) -> None:
        check(bool(self.host), "--host", "empty", "an address or a name")
        check(0 <= self.port <= 65535, "--port", self.port, "between 0 and 65535")
        if (self.tls_certificate is None) != (self.tls_key is None):
            if self.tls_certificate is None:
                missing = "--tls-certificate"
            else:
                missing = "--tls-key"
            raise OptionError(f"{missing} is missing. TLS needs both --tls-certificate and --tls-key.")
        for key in self.api_key:  # the message must not contain the value
            check(is_header_value(key), "--api-key", "not usable", "printable ASCII without spaces")
        for name in self.allowed_host:
            is_host = host_name(name) is not None
            check(is_host, "--allowed-host", f"'{name}'", "a host name or an address, without scheme and port")
        for name in self.trusted_proxy:
            check(is_network(name), "--trusted-proxy", f"'{name}'", "an IP address, or a network such as 10.0.0.0/8")
        for name in self.allow_media_from:
            is_host = parse_authority(name.removeprefix("*.")) is not None
            check(is_host, "--allow-media-from", f"'{name}'", "HOST, *.HOST or HOST:PORT, without scheme and path")
        for origin in self.cors_origin:
            is_origin = origin == "*" or _ORIGIN.fullmatch(origin) is not None
            check(is_origin, "--cors-origin", f"'{origin}'", "* or scheme://host[:port], without a path")
        check("" not in self.served_model_name, "--served-model-name", "empty", "a name")
        is_seconds = 0 <= self.write_timeout_seconds < float("inf")
        check(is_seconds, "--write-timeout-seconds", self.write_timeout_seconds, "at least 0, and finite")
        is_seconds = 0 <= self.progress_after_seconds < float("inf")
        check(is_seconds, "--progress-after-seconds", self.progress_after_seconds, "at least 0, and finite")
        for name in ("header_timeout_seconds", "idle_timeout_seconds"):
            check_seconds(name, getattr(self, name))
        if self.replicas != "auto":
            check(self.replicas >= 1, "--replicas", self.replicas, "at least 1, or auto")
        if self.replicas != 1 and self.engine_process == "off":
            raise OptionError("--replicas needs processes for its engines, which --engine-process off forbids.")
        if self.front_processes > 1 and self.engine_process == "off":
            raise OptionError("--front-processes needs a process for the engine, which --engine-process off forbids.")
        check_least(
            self,
            body_limit=1,
            drain_timeout_seconds=0,
            max_connections=1,
            max_connections_per_address=0,
            stream_interval=1,
            max_images=0,
            front_processes=1,
        )
        check_choices(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Settings of the engine: how the model is loaded, the size of the KV cache, and the limits of batches."""

    task: TaskOption = "auto"
    """What the model is for. generate: text. embed: vectors of texts. score: how well two texts match. auto: detected
    from the model's files (docs/embeddings.md)."""

    device: Device = field(default="auto", metadata=FREQUENT)
    """Device that runs the model. auto: the GPU if there is one, else the CPU."""

    dtype: Dtype = "auto"
    """Number format of the weights and the KV cache. auto: the model's, if the device is fast with it."""

    compile: bool = True
    """Run the model in native code on a CPU, and with kernels and CUDA graphs on a GPU, instead of plain PyTorch."""

    cpu_features: CpuFeatures = "native"
    """CPU instructions to use. native: all. avx2: neither AVX-512 nor AMX, with which GGUF's formats with a K are less
    exact (docs/performance.md#gguf-files)."""

    recheck: bool = False
    """Repeat what starts do once: on a CPU, probe native code, quantize weights and convert the tokenizer; on a GPU,
    probe kernels and CUDA graphs."""

    overlap: bool = field(default=True, metadata=NO_FLAG)
    """On a GPU, launch each step before the previous step's results arrive."""

    cuda_graph: bool = True
    """On a GPU, run steps as CUDA graphs, which take some seconds at the start, and memory."""

    exact: bool = False
    """On a CPU, serve only if the same request always gets the same bytes."""

    quantize: Quantize = field(default="none", metadata=FREQUENT)
    """Store unquantized weights in fewer bits, which saves memory and time: in int8 or int4 on a CPU, and in fp8 on a
    GPU. Answers change slightly with 8 bits, and a lot with int4 in small models."""

    quantized_cache: Bytes = Bytes("32GiB")  # noqa: RUF009 - immutable
    """Maximum disk space for weights made by --quantize, which later starts reuse from $OAISERVE_CACHE/quantized. 0
    stores none."""

    lora: tuple[str, ...] = field(default=(), metadata=FREQUENT)
    """LoRA adapter in PEFT's format, as NAME=FOLDER; requests use NAME as their model. Repeatable."""

    lora_dir: Path | None = None
    """Folder whose adapters can be loaded while the server runs (docs/adapters.md). Needs an API key or a loopback
    --host."""

    lora_memory: Bytes = Bytes("4GiB")  # noqa: RUF009 - immutable
    """Maximum memory for adapters from --lora-dir, including unloaded ones that still have requests."""

    drafts: DraftSource = "auto"
    """Draft the next tokens of a sequence from what followed the same tokens before (lookup), and verify them in one
    step. auto: only on a CPU with native code, where no answer changes."""

    cpu_threads: int | None = field(default=None, metadata=FREQUENT)
    """Threads that run the model on a CPU. Default: one per available core, or one less from 4 cores on."""

    max_model_len: int | None = field(default=None, metadata=FREQUENT)
    """Maximum tokens of prompt and answer together. Default: the model's context length."""

    default_max_tokens: int | None = None
    """Maximum tokens of an answer whose request sets no limit. Default: the model's generation_config.json, or else the
    rest of the context; 16 for /v1/completions."""

    max_image_pixels: int = 16_000_000
    """Maximum pixels of an image. JPEGs may have 4 times as many, and all images of a prompt 16 times."""

    chat_template: Path | None = None
    """Chat template to use instead of the model's own: a Jinja file, or one of chatml, deepseek, gemma, granite,
    llama3, mistral, mistral-nemo, mistral-small, phi3, phi4, qwen and qwen3."""

    generation_config: bool = True
    """Take the defaults of sampling and of max_tokens from the model's generation_config.json or GGUF metadata."""

    block_size: int = field(default=16, metadata=NO_FLAG)
    """Tokens per block of the KV cache."""

    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that may be in use, also by other processes. The KV cache gets what weights and the
    largest step leave."""

    kv_cache_dtype: KVCacheDtype = "auto"
    """Number format of the KV cache. auto: the model's. int8: nearly twice as many tokens fit, on a CPU with native
    code. fp8: twice as many fit, on a GPU. Both change answers slightly."""

    kv_blocks: int | None = field(default=None, metadata=NO_FLAG)
    """Blocks in the KV cache, as another way to set --kv-cache-memory."""

    kv_cache_memory: Bytes | None = field(default=None, metadata=FREQUENT)
    """Memory for the KV cache, such as 4GiB. Default: on a GPU, what --gpu-memory-utilization leaves; on a CPU, enough
    for 65536 tokens or 8 full requests, but at most a quarter of the free memory, and half of what weights leave."""

    max_running: int = field(default=256, metadata=FREQUENT)
    """Maximum sequences in one batch."""

    max_step_tokens: int | None = None
    """Maximum tokens in one step, at least --max-running. Fewer: steadier streams. More: faster prefills. Default: 512
    on a CPU, 2048 on a GPU, or --max-running if higher."""

    prefill_max_requests: int | None = field(default=None, metadata=NO_FLAG)
    """Maximum number of sequences that prefill in one step. Default: no limit but that of the tokens."""

    policy: SchedulingPolicy = "fair"
    """Order in which waiting requests are scheduled. fair: clients take turns, and short prompts pass long ones. fcfs:
    first come, first served. priority: the lowest "priority" in the request first. shortest: the shortest prompt first,
    with ageing."""

    itl_target_seconds: float | None = None
    """Target time between two tokens of a stream, for which steps take fewer prompt tokens. Needs --explain."""

    inherited: frozenset[str] = field(default=frozenset(), metadata=NO_FLAG)
    """For one of several models, the names of settings that it has from the general ones: it may have no use for
    them."""

    watchdog_seconds: float = field(default=60, metadata=NO_FLAG)
    """Seconds without progress (or 20 times the expected time, if that is more) after which the watchdog reports a
    hang."""

    load_timeout_seconds: float = 1800
    """Most seconds for an engine process to load its model, downloads included. Then it is killed, and tried again
    later. Only with engine processes."""

    exit_on_hang: bool = False
    """Exit with code 70 when the engine makes no progress for a minute (or 20 times the expected time), so that a
    supervisor restarts it. Without the flag, /health and /ready return 503 then."""

    cost_per_hour: float | None = None
    """Price of an hour of this machine, in any currency. Each request then shows its share (docs/costs.md)."""

    prefix_cache: bool = True
    """Reuse computed KV blocks for requests that begin with the same tokens."""

    prefix_cache_dir: Path | None = None
    """Private folder that keeps the prefix cache across restarts, on a CPU with native code."""

    prefix_cache_disk: Bytes = Bytes("8GiB")  # noqa: RUF009 - immutable
    """Maximum disk space for --prefix-cache-dir. The least recently used blocks are removed. Replicas divide it."""

    kv_offload: Bytes | None = None
    """Host memory for KV blocks that a GPU's prefix cache evicts. Later prompts get them back."""

    media: bool = True
    """Read images, if the model can. --no-media saves the memory of its vision tower."""

    mmproj: Path | None = None
    """llama.cpp's mmproj file, which reads images for a GGUF file. Default: one in the same folder."""

    max_waiting: int = 1024
    """Maximum waiting sequences (n for each prompt). Further requests get a 429."""

    queue_timeout_seconds: float = 0
    """Seconds that a request may wait in the queue; then it gets a 503. 0: no limit."""

    request_timeout_seconds: float = 0
    """Seconds that a request may take in total; then it gets a 408, or an error in its stream. 0: no limit."""

    tokenize_workers: int = 2
    """Threads that tokenize prompts, plus half as many that prepare images and sounds. 0: no separate threads."""

    explain: bool = True
    """Learn what steps cost, and divide each request's prefill and decode into causes."""

    num_sharing: int = field(default=1, metadata=NO_FLAG)
    """Engine processes that share the memory of this machine."""

    nvtx: bool = False
    """Mark steps and phases of requests as ranges for a profiler: NVTX on a GPU, ITT on a CPU (docs/telemetry.md)."""

    def __post_init__(self) -> None:
        check_choices(self)
        if self.quantize != "none" and not self.compile:
            what = "kernels" if self.quantize == "fp8" else "native code"
            raise OptionError(f"--quantize {self.quantize} needs --compile: only {what} can do it.")
        for adapter in self.lora:
            name, sign, folder = adapter.partition("=")
            check(bool(name.strip() and sign and folder), "--lora", f"'{adapter}'", "NAME=FOLDER")
        if len(self.adapters) < len(self.lora):
            raise OptionError("--lora has the same name twice. Each adapter needs a name of its own.")
        self._check_contradictions()
        check_least(
            self,
            cpu_threads=1,
            max_model_len=1,
            default_max_tokens=1,
            block_size=1,
            kv_blocks=1,
            kv_cache_memory=1,
            kv_offload=1,
            max_running=1,
            max_step_tokens=1,
            prefill_max_requests=1,
            itl_target_seconds=0.001,
            watchdog_seconds=1,
            load_timeout_seconds=1,
            cost_per_hour=0,
            quantized_cache=0,
            max_waiting=0,
            queue_timeout_seconds=0,
            request_timeout_seconds=0,
            tokenize_workers=0,
        )
        most = 178_956_970  # Pillow refuses larger images
        pixels = self.max_image_pixels
        check(0 < pixels <= most, "--max-image-pixels", pixels, f"at least 1 and at most {most}")
        if self.max_step_tokens is not None and self.max_step_tokens < self.max_running:
            # Every decoding sequence takes one token of every step.
            check(False, "--max-step-tokens", self.max_step_tokens, f"at least --max-running ({self.max_running})")
        share = self.gpu_memory_utilization
        check(0 < share <= 1, "--gpu-memory-utilization", share, "above 0 and at most 1")
        if self.kv_blocks is not None and self.kv_cache_memory is not None:
            raise OptionError("kv_blocks and --kv-cache-memory both set the size of the KV cache. Set only one.")

    @property
    def adapters(self) -> dict[str, Path]:
        parts = (adapter.partition("=") for adapter in self.lora)
        return {name: Path(folder) for name, _, folder in parts}

    @property
    def has_adapters(self) -> bool:
        """Return whether adapters may be loaded, at the start or later."""
        return bool(self.lora) or self.lora_dir is not None

    @property
    def adapters_flag(self) -> str:
        return "--lora" if self.lora else "--lora-dir"

    def _check_contradictions(self) -> None:
        on_gpu = self.device == "cuda"
        in_eager = not self.compile
        if self.kv_cache_dtype != "auto":
            is_int8 = self.kv_cache_dtype == "int8"
            if is_int8:
                which = "the native step of a CPU has"
            else:
                which = "Triton's attention on one GPU reads"
            _refuse(
                f"--kv-cache-dtype {self.kv_cache_dtype}",
                ("--device cuda", is_int8 and on_gpu, why := f"only {which} such a cache"),
                ("--device cpu", not is_int8 and self.device == "cpu", why),
                ("--no-compile", is_int8 and in_eager, why),
            )
        if self.quantize == "fp8":
            _refuse("--quantize fp8", ("--device cpu", self.device == "cpu", "it is for a GPU"))
        elif self.quantize != "none":
            _refuse(
                f"--quantize {self.quantize}",
                ("--device cuda", on_gpu, "it is for a CPU"),
                ("--dtype float16", self.dtype == "float16", "the native step computes in bfloat16 or float32"),
            )
        if self.prefix_cache_dir is not None:
            _refuse(
                "--prefix-cache-dir",
                ("--no-prefix-cache", not self.prefix_cache, "it is for the blocks of that cache"),
                ("--no-compile", in_eager, "it needs the native step"),
                ("--kv-offload", self.kv_offload is not None, "there is one tier below the prefix cache"),
            )
        if self.kv_offload is not None:
            without = not self.prefix_cache
            _refuse("--kv-offload", ("--no-prefix-cache", without, "it is for the blocks of that cache"))

    def step_tokens(self, default: int) -> int:
        return self.max_step_tokens or max(default, self.max_running)


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryOptions:
    """Settings of telemetry. OpenTelemetry's own OTEL_* variables set where traces and metrics are exported to."""

    recent_requests: int = 256
    """Number of ended requests that /debug/requests shows."""

    record_requests: Path | None = None
    """File that records the load, without any text, for the load test. At 64 MiB it is renamed to end in .1, and a new
    one begins."""

    slo: str | None = None
    """Targets for the time to first token and per output token, as in ttft:2s,tpot:100ms, for metrics and alerts.
    Default: six times what the request takes alone, at least 1 s and 200 ms."""

    def __post_init__(self) -> None:
        check_least(self, recent_requests=0)
        is_slo = self.slo is None or all(map(_SLO.fullmatch, self.slo.split(",")))
        check(is_slo, "--slo", f"'{self.slo}'", "times for ttft or tpot, as in ttft:2s,tpot:100ms")


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of a server."""

    model: str  # as the user typed it: "demo", a folder, a hub id, or a .gguf file
    server: ServerOptions = field(default_factory=ServerOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    telemetry: TelemetryOptions = field(default_factory=TelemetryOptions)
    file: Path | None = None  # the config file that some of these settings came from
    of_plugins: tuple[object, ...] = ()  # settings of plug-ins that differ from the defaults

    def __post_init__(self) -> None:
        if self.server.guard_all and not self.needs_key:
            raise OptionError("--guard-all needs API keys, such as those of --api-key or --api-key-file.")
        for name in self.accepted_names:
            if name in self.engine.adapters:
                raise OptionError(f"--lora names an adapter '{name}', which is the name of the model itself.")

    def of(self, kind: type[Options]) -> Options:
        """Return the settings of a plug-in, which are in `Plugin.options`."""
        return next((each for each in self.of_plugins if isinstance(each, kind)), None) or kind()

    def having(self, options: object) -> Config:
        """Return a copy with other settings for one plug-in."""
        others = (each for each in self.of_plugins if type(each) is not type(options))
        return replace(self, of_plugins=(*others, options))

    @property
    def _needs_key_of_plugin(self) -> bool:
        return any(getattr(each, "needs_key", False) for each in self.of_plugins)

    @property
    def needs_key(self) -> bool:
        return bool(self.server.api_key or self.server.api_key_file or self._needs_key_of_plugin)

    @property
    def shares_prefix_cache(self) -> bool:
        """Return whether all prompts share the prefix cache: if that was requested, or if there is only one key and no
        source of further keys."""
        server = self.server
        has_several = server.api_key_file or len(server.api_key) > 1 or self._needs_key_of_plugin
        return server.share_prefix_cache or not has_several

    @property
    def is_private(self) -> bool:
        """Return whether only users of this machine or clients with a key can reach this server."""
        return self.needs_key or is_loopback(self.server.host.lower())

    @property
    def shows_dashboard(self) -> bool:
        return self.server.open_dashboard or self.is_private

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.server.served_model_name)) or (name_of(self.model),)

    @property
    def accepted_names(self) -> tuple[str, ...]:
        """Return the names that requests may use: the names in the API, and MODEL as typed if the API's name was
        derived from it."""
        if self.server.served_model_name:
            return self.model_names
        return tuple(dict.fromkeys((*self.model_names, self.model)))


@cache
def name_of(model: str) -> str:
    """Return the name of a model for which the user set none: its file's or folder's name, or else its hub id."""
    path = Path(model)
    if path.suffix == ".gguf" and path.is_file():
        return _SHARD.sub("", path.stem)
    if not (model and path.is_dir()):
        return model
    folder = os.path.abspath(model)
    cached = _IN_HUB_CACHE.search(folder)
    return cached[1].replace("--", "/", 1) if cached else os.path.basename(folder)


WITHOUT_FLAG = {each.name for each in fields(EngineOptions) if not each.metadata.get("has_flag", True)}
# For cyclopts, which reads only parameters of these names from the command line, the environment and files.
HAS_FLAG = re.compile(rf"\A(?!(?:{'|'.join(sorted(WITHOUT_FLAG))})\Z)")
