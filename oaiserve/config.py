"""Every setting of the server, once: flags, config file, environment and --help are generated from these classes.

Stdlib only, and pure: making one checks the values and opens nothing. A wrong value is an OptionError.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Literal, get_args

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Quantize = Literal["none", "int8"]
Attention = Literal["auto", "triton", "varlen", "reference"]
SchedulingPolicy = Literal["fcfs", "priority", "shortest"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["console", "json"]

_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(|kib|mib|gib)", re.IGNORECASE)
_ORIGIN = re.compile(r"https?://[^/\s]+")


class OptionError(ValueError):
    """A setting has a wrong value. The message names the flag, the value and what is allowed."""


class Bytes(int):
    """A number of bytes that can be made of "8MiB" and is shown that way. OptionError where it is no size."""

    def __new__(cls, size: int | str) -> Bytes:
        if isinstance(size, int):
            return super().__new__(cls, size)
        match = _SIZE.fullmatch(size.strip())
        if match is None:
            raise OptionError(f"'{size}' is no size. Write bytes, or a number with KiB, MiB or GiB, as in 8MiB.")
        number, unit = match.groups()
        return super().__new__(cls, int(Decimal(number) * _UNITS[unit.lower()]))

    def __str__(self) -> str:
        for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
            if self and self % unit == 0:
                return f"{self // unit}{name}"
        return int.__repr__(self)


def _check(holds: bool, flag: str, value: object, allowed: str) -> None:
    if not holds:
        raise OptionError(f"{flag} is {value}, but must be {allowed}.")


def _check_choice(flag: str, value: str, choices: object) -> None:
    allowed = get_args(choices)
    _check(value in allowed, flag, f"'{value}'", f"one of {', '.join(allowed)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where to listen, who may ask, and what the log looks like."""

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 is every IPv4 address of this machine, :: every one."""

    port: int = 8000
    """TCP port, 0 to 65535. 0 takes any free one."""

    tls_certificate: Path | None = None
    """PEM file with the certificate chain. Serves HTTPS; needs --tls-key."""

    tls_key: Path | None = None
    """PEM file with the certificate's private key, without a passphrase."""

    api_key: tuple[str, ...] = field(default=(), repr=False)  # a log line or traceback must not show it
    """Key that clients must send as "Authorization: Bearer KEY". Repeat it to accept several; without one, anybody
    may ask. Better set in the environment, since other users of the machine can see flags."""

    guard_all: bool = False
    """Ask for the key on /health, /ready, /version and /metrics too."""

    cors_origin: tuple[str, ...] = ()
    """Origin whose web pages may call this server, as in https://app.example.com, or * for any. May be repeated."""

    body_limit: Bytes = Bytes("8MiB")  # noqa: RUF009 - immutable
    """Largest request body that is read, in bytes or with a unit (KiB, MiB, GiB)."""

    served_model_name: str | None = None
    """Name of the model in the API. Default: MODEL, as given."""

    drain_timeout_seconds: int = 30
    """Seconds that running requests may take to finish after SIGTERM or Ctrl-C. A second one skips the wait."""

    write_timeout_seconds: float = 60
    """Seconds that a connection may take nothing of what waits for it before it is cut. 0: any time."""

    stream_interval: int = 1
    """Tokens of a choice in one event of a stream, where the request does not say; the first one comes at once all the
    same. More: fewer events, less work."""

    log_level: LogLevel = "info"
    """Least severe message to log."""

    log_format: LogFormat = "console"
    """Log lines for people (console) or for machines (json)."""

    def __post_init__(self) -> None:
        _check(bool(self.host), "--host", "empty", "an address or a name")
        _check(0 <= self.port <= 65535, "--port", self.port, "between 0 and 65535")
        if (self.tls_certificate is None) != (self.tls_key is None):
            missing = "--tls-certificate" if self.tls_certificate is None else "--tls-key"
            raise OptionError(f"{missing} is missing. TLS needs both --tls-certificate and --tls-key.")
        for key in self.api_key:  # the value stays out of the message
            is_header_value = key.isascii() and key.isprintable() and key == "".join(key.split()) != ""
            _check(is_header_value, "--api-key", "not usable", "printable ASCII without spaces")
        if self.guard_all and not self.api_key:
            raise OptionError("--guard-all needs an --api-key to ask for.")
        for origin in self.cors_origin:
            is_origin = origin == "*" or _ORIGIN.fullmatch(origin) is not None
            _check(is_origin, "--cors-origin", f"'{origin}'", "* or scheme://host[:port], without a path")
        _check(self.body_limit >= 1, "--body-limit", self.body_limit, "at least 1 byte")
        _check(self.served_model_name != "", "--served-model-name", "empty", "a name")
        _check(self.drain_timeout_seconds >= 0, "--drain-timeout-seconds", self.drain_timeout_seconds, "at least 0")
        is_seconds = 0 <= self.write_timeout_seconds < float("inf")
        _check(is_seconds, "--write-timeout-seconds", self.write_timeout_seconds, "at least 0, and finite")
        _check(self.stream_interval >= 1, "--stream-interval", self.stream_interval, "at least 1")
        _check_choice("--log-level", self.log_level, LogLevel)
        _check_choice("--log-format", self.log_format, LogFormat)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How the model is loaded, how much memory its cache takes, and how much runs at once."""

    device: Device = "auto"
    """Where the model runs. auto: the GPU where there is one, else the CPU."""

    dtype: Dtype = "auto"
    """Number format of the weights and the cache. auto: as the model was saved, where the device is fast at it."""

    compile: bool = True
    """On a CPU, compile the model's step for this machine: in the background of the first start, with the system's C++
    compiler. On a GPU, compile its layers with torch's Inductor: during the start, which takes longer, above all
    the first time. Otherwise, and for models that it does not cover, transformers' code runs, which is slower."""

    overlap: bool = True
    """On a GPU, launch each step before the tokens of the one before are back, so that the GPU does not wait while they
    are handed over. An answer that ends before its max_tokens takes part in one step too many, for nothing. Steps with
    penalties, or with bad_words of several tokens, are waited for all the same."""

    cuda_graph: bool = True
    """On a GPU, capture the steps in which all sequences decode as CUDA graphs, for some numbers of sequences up to
    --max-running. That takes some seconds of the start, and some memory; then the GPU does not wait for the launch of
    such a step."""

    attention: Attention = "auto"
    """What computes attention on a GPU. triton: kernels of our own. varlen: the same, but prompts by the FlashAttention
    that torch has. reference: plain torch, slow. auto: triton where it is installed, else reference."""

    nvtx: bool = False
    """On a GPU, mark what the engine thread does, step by step, for NVIDIA's profilers (NVTX ranges)."""

    tensor_parallel: int = 1
    """Processes that hold the model together, each with a part of every large weight and of the KV cache, and a GPU of
    its own. Must divide the model's heads. Sizes of memory are then those of one of them."""

    quantize: Quantize = "none"
    """On a CPU, keep the weights in 8 bits: half the memory, and faster where few sequences run. Answers change a
    little; docs/benchmarks.md says how much. Needs --compile, and a model that it covers."""

    cpu_threads: int | None = None
    """Threads that compute, on a CPU. Default: one for each core this process may use; with 4 or more, one is left to
    connections and tokenizing."""

    max_model_len: int | None = None
    """Longest prompt and answer together, in tokens. Default: what the model was made for."""

    chat_template: Path | None = None
    """Jinja file to use instead of the model's own chat template."""

    generation_config: bool = True
    """Take the defaults for temperature, top_p and so on from the model's generation_config.json."""

    block_size: int = 16
    """Tokens in one block of the KV cache."""

    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that may be in use, by this server and others, above 0 and up to 1. What the weights and
    the largest step leave of it, as measured at the start, is for the KV cache."""

    kv_blocks: int | None = None
    """Blocks in the KV cache. Default: as many as fit into --kv-cache-memory. Give only one of the two."""

    kv_cache_memory: Bytes | None = None
    """Memory for the KV cache, in bytes or with a unit, as in 4GiB. Default: on a GPU what --gpu-memory-utilization
    leaves; on a CPU room for 65536 tokens or 8 requests of full length, but at most a quarter of what is free."""

    max_running: int = 256
    """Most sequences that are computed together."""

    max_step_tokens: int | None = None
    """Most tokens in one step of the model, over all sequences; at least --max-running. Less: steadier streams. More:
    faster prompts. Default: 512 on a CPU, 2048 on a GPU, or --max-running where that is more."""

    policy: SchedulingPolicy = "fcfs"
    """Who is computed first. fcfs: who came first. priority: the lowest number in the request field "priority".
    shortest: the shortest prompt, but nobody waits for ever."""

    prefill_max_requests: int | None = None
    """Most sequences that compute their prompts in one step. Default: no limit of its own."""

    prefill_max_tokens: int | None = None
    """Most prompt tokens in one step. Less: steadier streams. Default: what --max-step-tokens leaves."""

    itl_target_seconds: float | None = None
    """Time from one token of a stream to the next to aim for: while others decode, a step takes on only as many prompt
    tokens as fit into it, by the measured time of steps. Default: none, as many as --max-step-tokens leaves."""

    lookahead: int = 8
    """Waiting sequences to try behind one that does not fit into the KV cache yet. 0: nobody overtakes."""

    prefix_cache: bool = True
    """Keep computed blocks for other requests that begin with the same tokens."""

    max_waiting: int = 1024
    """Most requests that wait for a place. One more is answered with 429 and Retry-After."""

    max_waiting_tokens: int | None = None
    """Most prompt tokens of waiting requests together. More are answered with 429 and Retry-After. Default: any."""

    queue_timeout_seconds: float = 0
    """Seconds that a request may wait to be begun; then it gets a 503. 0: as long as it takes."""

    request_timeout_seconds: float = 0
    """Seconds that a request may take in all; then it gets a 408, or an error in its stream. 0: any time."""

    tokenize_workers: int = 2
    """Threads that turn prompts into tokens. 0: the caller's own thread does it."""

    def __post_init__(self) -> None:
        _check_choice("--device", self.device, Device)
        _check_choice("--dtype", self.dtype, Dtype)
        _check_choice("--policy", self.policy, SchedulingPolicy)
        _check_choice("--quantize", self.quantize, Quantize)
        _check_choice("--attention", self.attention, Attention)
        if self.quantize != "none" and not self.compile:
            raise OptionError(f"--quantize {self.quantize} needs --compile: transformers' code does not have it.")
        if self.quantize != "none" and self.tensor_parallel > 1:
            both = f"--quantize {self.quantize} and --tensor-parallel {self.tensor_parallel}"
            raise OptionError(f"{both} do not go together: weights in 8 bits are not split.")
        for name, least in (
            ("cpu_threads", 1),
            ("tensor_parallel", 1),
            ("max_model_len", 1),
            ("block_size", 1),
            ("kv_blocks", 1),
            ("kv_cache_memory", 1),
            ("max_running", 1),
            ("max_step_tokens", 1),
            ("prefill_max_requests", 1),
            ("itl_target_seconds", 0.001),
            ("prefill_max_tokens", 1),
            ("lookahead", 0),
            ("max_waiting", 0),
            ("max_waiting_tokens", 1),
            ("queue_timeout_seconds", 0),
            ("request_timeout_seconds", 0),
            ("tokenize_workers", 0),
        ):
            value = getattr(self, name)
            if value is not None:
                _check(value >= least, "--" + name.replace("_", "-"), value, f"at least {least}")
        if self.max_step_tokens is not None and self.max_step_tokens < self.max_running:
            # Every sequence that decodes takes one token of every step.
            _check(False, "--max-step-tokens", self.max_step_tokens, f"at least --max-running ({self.max_running})")
        share = self.gpu_memory_utilization
        _check(0 < share <= 1, "--gpu-memory-utilization", share, "above 0 and at most 1")
        if self.kv_blocks is not None and self.kv_cache_memory is not None:
            raise OptionError("--kv-blocks and --kv-cache-memory both set the size of the KV cache. Give only one.")

    def step_tokens(self, default: int) -> int:
        """Most tokens in one step, where `default` suits the device."""
        return self.max_step_tokens or max(default, self.max_running)


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryOptions:
    """What the server tells about itself. Where traces and metrics are sent to is set by OpenTelemetry's own OTEL_*
    variables."""

    recent_requests: int = 256
    """Ended requests whose accounts /debug/requests shows (with an --api-key, or on a loopback --host)."""

    trace_prompt_characters: int = 0
    """Most characters of a prompt that its trace carries, for those who may read them. 0: none."""

    trace_step_share: float = 0
    """Share of the engine's steps that are traced, each as a span that the traces of its requests link to, 0 to 1. A
    sampler of OTEL_TRACES_SAMPLER chooses among these."""

    profile_dir: Path | None = None
    """Folder for the traces of POST /debug/profile, which records the next steps with torch's profiler and slows them
    down. Made where it is missing. Without one, there is no such route."""

    vllm_metrics: bool = True
    """Show the metrics on /metrics under vLLM's names, too, for dashboards, autoscalers and routers that know these."""

    def __post_init__(self) -> None:
        _check(self.recent_requests >= 0, "--recent-requests", self.recent_requests, "at least 0")
        characters = self.trace_prompt_characters
        _check(characters >= 0, "--trace-prompt-characters", characters, "at least 0")
        _check(0 <= self.trace_step_share <= 1, "--trace-step-share", self.trace_step_share, "between 0 and 1")


@dataclass(frozen=True, slots=True)
class Config:
    """What one server was started with."""

    model: str  # as the user gave it: "demo", a folder, a hub id, or a .gguf file
    server: ServerOptions = field(default_factory=ServerOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    telemetry: TelemetryOptions = field(default_factory=TelemetryOptions)
