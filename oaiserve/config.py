"""Every setting is defined once here. Flags, config file keys, environment variables and --help are generated from it.

This module needs only the standard library and `hosts`. A constructor checks the values, opens no file, and raises
OptionError for a wrong value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from oaiserve.hosts import host_name, is_loopback, is_network, parse_authority

TaskOption = Literal["auto", "generate", "embed", "score"]
Device = Literal["auto", "cpu", "cuda"]
CpuFeatures = Literal["native", "avx2"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Quantize = Literal["none", "int8", "int4"]
ContinueStreams = Literal["any", "alike", "never"]
KVCacheDtype = Literal["auto", "int8", "fp8"]
Attention = Literal["auto", "triton", "reference"]
DraftSource = Literal["auto", "lookup", "off"]
SchedulingPolicy = Literal["fair", "fcfs", "priority", "shortest", "deadline"]
# fmt: off
ToolCallParser = Literal[
    "auto", "none", "hermes", "llama3_json", "llama4_pythonic", "mistral", "qwen3_coder", "openai", "deepseek_v3",
    "deepseek_v31", "deepseek_v32", "deepseek_v4", "functiongemma", "gemma4", "glm45", "granite", "kimi_k2", "lfm2",
    "minimax_m2", "phi4_mini_json", "seed_oss", "apertus", "apriel", "cohere", "command_r", "firefunction",
    "functionary_v31", "functionary_v32", "gigachat3", "hunyuan", "kimi_k3", "minicpm5", "minimax", "minimax_m3",
    "muse", "nemotron_json", "solar_open",
]
# fmt: on
ReasoningParser = Literal["auto", "none", "deepseek_r1", "qwen3"]
HostedTools = Literal["ignore", "refuse"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "short", "console", "json"]

MOST_FRONT_ENDS = 64
FREQUENT = {"frequent": True}  # on the fields whose flags most people use: --help has these, --help-all has all

_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(|kib|mib|gib)", re.IGNORECASE)
_SLO = re.compile(r"(ttft|tpot):(?=.*[1-9])\d+(\.\d+)?(s|ms|us)")
_URL = re.compile(r"https?://(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~/-]*)?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")  # apps have schemes of their own


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


def _check(holds: bool, flag: str, value: object, allowed: str) -> None:
    if not holds:
        raise OptionError(f"{flag} is {value}, but must be {allowed}.")


def is_header_value(text: str) -> bool:
    """Return whether a header can carry the text as one word, as it must carry a key."""
    return text.isascii() and text.isprintable() and text == "".join(text.split()) != ""


def _refuse(given: str, *contradictions: tuple[str, bool, str]) -> None:
    """Refuse a setting beside the other ones that hold, each with the reason."""
    for other, holds, why in contradictions:
        if holds:
            raise OptionError(f"{given} and {other} do not go together: {why}.")


@cache
def _choices(kind: type) -> dict[str, tuple[str, ...]]:
    hints = get_type_hints(kind)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def _check_choices(options: Any) -> None:
    """Check the settings that are one of several words."""
    for name, allowed in _choices(options.__class__).items():
        value = getattr(options, name)
        _check(value in allowed, flag_of(name), f"'{value}'", f"one of {', '.join(allowed)}")


def _check_least(options: Any, **least: float) -> None:
    """Check the settings that must be at least this much, if they are set."""
    for name, bound in least.items():
        value = getattr(options, name)
        _check(value is None or value >= bound, flag_of(name), value, f"at least {bound}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerOptions:
    """Settings of what listens: its address, TLS, whom it answers, its end, and its log."""

    host: str = field(default="127.0.0.1", metadata=FREQUENT)
    """Address to listen on. 0.0.0.0 means all IPv4 addresses of this machine, :: all addresses."""

    port: int = field(default=8000, metadata=FREQUENT)
    """TCP port, 0 to 65535. 0 takes any free port."""

    tls_certificate: Path | None = None
    """PEM file with the certificate chain. Serves HTTPS; needs --tls-key."""

    tls_key: Path | None = None
    """PEM file with the certificate's private key, without a passphrase."""

    allowed_host: tuple[str, ...] = ()
    """Name by which clients may call this server, such as llm.example.com. May be repeated. Without it, a server on a
    loopback --host answers to loopback names only, and any other to all names; with it, the latter answers to these, to
    loopback names and to IP addresses."""

    trusted_proxy: tuple[str, ...] = ()
    """Address, or network (10.0.0.0/8), of a proxy or gateway in front, whose x-forwarded-for names the client. May be
    repeated. From all other addresses that header is ignored."""

    open_dashboard: bool = False
    """Show all pages and /debug to everyone who can reach this address without an API key: they may ask the model, and
    see who sent how much and when, but no text."""

    body_limit: Bytes | None = None
    """Largest request body that is accepted, in bytes or with a unit (KiB, MiB, GiB). Default: 8MiB, or 32MiB for a
    model that reads images or sounds, and of a gateway."""

    drain_timeout_seconds: int = 30
    """Seconds that running requests have to finish after SIGTERM or Ctrl-C. A second signal skips the wait."""

    log_level: LogLevel = "info"
    """Lowest severity of messages to log."""

    log_format: LogFormat = "auto"
    """Form of log lines. short: for people at a terminal. console: complete lines of text. json: one object a line.
    auto: short at a terminal, otherwise json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(ListenerOptions):
    """Settings of the HTTP server: address, access, timeouts and log."""

    front_ends: int = 0
    """Processes that serve HTTP and tokenize, beside the one that runs the engine; each needs a core of its own. 0:
    that one does it itself, and streams at most some 40,000 tokens a second."""

    # A log line or traceback must not show it.
    api_key: tuple[str, ...] = field(default=(), repr=False, metadata=FREQUENT)
    """Key that clients must send as "Authorization: Bearer KEY". May be repeated; without one, all clients are
    accepted. Set it in the environment or in a file, because other users of the machine can see flags."""

    api_key_file: tuple[Path, ...] = ()
    """File with keys, one on each line: NAME KEY, or only KEY. Logs and traces have the names. The server reads the
    file again when it changes. May be repeated."""

    share_prefix_cache: bool = False
    """Let the prompts of several keys share the prefix cache. By default, each key finds what it has sent itself."""

    stored_keys: bool = False
    """Require the keys that `oaiserve keys` makes in the file of --response-store, with their roles and limits. Those
    of --api-key and --api-key-file are valid, too."""

    guard_all: bool = False
    """Require a key on /health, /ready, /version, /metrics and /openapi.json, too."""

    cors_origin: tuple[str, ...] = ()
    """Origin whose web pages may call this server, such as https://app.example.com, or * for any. May be repeated.
    Pages of other origins get a 403."""

    served_model_name: tuple[str, ...] = field(default=(), metadata=FREQUENT)
    """Name of the model in the API. Default: MODEL as given on the command line. After MODEL, the flag takes several
    names (--served-model-name a b): requests may use any of them, and answers and metrics show the first."""

    write_timeout_seconds: float = 60
    """Seconds after which the server cuts a connection whose client reads nothing of the waiting data. 0: never."""

    header_timeout_seconds: float = 20
    """Seconds in which the headers of a request must arrive, from the connection or from their first byte. A handshake
    of TLS has as long before."""

    idle_timeout_seconds: float = 75
    """Seconds after an answer for which the connection stays open for a further request."""

    max_connections: int | None = None
    """Most open connections. Further ones are answered with 503 and closed. Default: 8192, or as many as the limit of
    open files permits, which the server raises if it may."""

    max_connections_per_address: int | None = None
    """Most open connections from one address, or from one IPv6 network of 64 bits. 0: no limit. Default: half of
    --max-connections. Behind a proxy, all connections have its address."""

    stream_interval: int = 1
    """Tokens of a choice in one event of a stream, unless the request sets it. More tokens mean less work. The first
    token is always sent at once."""

    default_params: str | None = None
    """Sampling parameters of requests that set none, such as temperature=0.7,top_p=0.8, or the same as JSON. They beat
    the model's own (docs/models.md)."""

    progress_after_seconds: float = 1.0
    """Seconds of a prompt's computation after which a stream begins without a token, and tells how far the prompt is.
    0: streams begin with their first token."""

    tool_call_parser: ToolCallParser = "auto"
    """Form in which the model writes calls of tools. auto: the one that its tokenizer or its chat template shows, or
    hermes. none: calls stay in the text. openai: the channels of gpt-oss."""

    reasoning_parser: ReasoningParser = "auto"
    """How the model's reasoning is told from its answer: `<think> ... </think>`. deepseek_r1: each answer begins with
    it, without the first mark. qwen3: the same, unless a request turns it off. auto: as the chat template shows. none:
    it stays in the text."""

    strict_max_tokens: bool = False
    """Refuse a request whose max_tokens is more than its prompt leaves of the context, which is cut to that otherwise,
    as it always is of /v1/messages."""

    hosted_tools: HostedTools = "ignore"
    """Tools of /v1/responses that run on OpenAI's servers, such as web_search. ignore: the model is not told of them,
    and the response names them in ignored_tools. refuse: the request gets a 400."""

    allow_media_from: tuple[str, ...] = ()
    """Host from which images and sounds are fetched that requests name by URL: images.example.com, *.example.com for
    all names below, or localhost:9000 for another port than those of HTTP and HTTPS. May be repeated. A private address
    is reached only if it is named itself, and a loopback address if localhost is. Default: none."""

    max_images: int = 16
    """Most images of a request, those of earlier turns of its conversation included, and most sounds."""

    response_store: Path | None = None
    """File that keeps the answers of /v1/responses with their input over a restart. Several servers on one machine may
    share it. Default: they are kept in memory."""

    response_store_number: int = 10_000
    """Most responses that are kept. Further ones push out the oldest of the API key that has most. 0: none is kept."""

    response_store_bytes: Bytes = Bytes("256MiB")  # noqa: RUF009 - immutable
    """Most bytes of the responses that are kept, with their input, of all API keys."""

    response_store_seconds: float = 30 * 24 * 3600
    """Seconds for which a response is kept after its conversation last went on. Default: 30 days."""

    def __post_init__(self) -> None:
        _check(bool(self.host), "--host", "empty", "an address or a name")
        _check(0 <= self.port <= 65535, "--port", self.port, "between 0 and 65535")
        _check(0 <= self.front_ends <= MOST_FRONT_ENDS, "--front-ends", self.front_ends, f"0 to {MOST_FRONT_ENDS}")
        if (self.tls_certificate is None) != (self.tls_key is None):
            missing = "--tls-certificate" if self.tls_certificate is None else "--tls-key"
            raise OptionError(f"{missing} is missing. TLS needs both --tls-certificate and --tls-key.")
        for key in self.api_key:  # the message must not contain the value
            _check(is_header_value(key), "--api-key", "not usable", "printable ASCII without spaces")
        if self.guard_all and not self.needs_key:
            raise OptionError("--guard-all needs an --api-key, an --api-key-file or --stored-keys.")
        if self.stored_keys and self.response_store is None:
            raise OptionError("--stored-keys needs --response-store, whose file has the keys.")
        for name in self.allowed_host:
            is_host = host_name(name) is not None
            _check(is_host, "--allowed-host", f"'{name}'", "a host name or an address, without scheme and port")
        for name in self.trusted_proxy:
            _check(is_network(name), "--trusted-proxy", f"'{name}'", "an IP address, or a network such as 10.0.0.0/8")
        for name in self.allow_media_from:
            is_host = parse_authority(name.removeprefix("*.")) is not None
            _check(is_host, "--allow-media-from", f"'{name}'", "HOST, *.HOST or HOST:PORT, without scheme and path")
        for origin in self.cors_origin:
            is_origin = origin == "*" or _ORIGIN.fullmatch(origin) is not None
            _check(is_origin, "--cors-origin", f"'{origin}'", "* or scheme://host[:port], without a path")
        _check("" not in self.served_model_name, "--served-model-name", "empty", "a name")
        is_seconds = 0 <= self.write_timeout_seconds < float("inf")
        _check(is_seconds, "--write-timeout-seconds", self.write_timeout_seconds, "at least 0, and finite")
        is_seconds = 0 <= self.progress_after_seconds < float("inf")
        _check(is_seconds, "--progress-after-seconds", self.progress_after_seconds, "at least 0, and finite")
        for name in ("header_timeout_seconds", "idle_timeout_seconds", "response_store_seconds"):
            seconds = getattr(self, name)
            _check(0 < seconds < float("inf"), flag_of(name), seconds, "above 0, and finite")
        _check_least(
            self,
            body_limit=1,
            drain_timeout_seconds=0,
            max_connections=1,
            max_connections_per_address=0,
            stream_interval=1,
            max_images=0,
            response_store_number=0,
            response_store_bytes=1,
        )
        _check_choices(self)

    @property
    def needs_key(self) -> bool:
        return bool(self.api_key or self.api_key_file or self.stored_keys)

    @property
    def stores_responses(self) -> bool:
        return self.response_store_number > 0

    @property
    def shares_prefix_cache(self) -> bool:
        """Return whether all prompts share the prefix cache: if asked to, or with one key. A file may get a second."""
        return self.share_prefix_cache or not (self.api_key_file or self.stored_keys or len(self.api_key) > 1)

    @property
    def is_private(self) -> bool:
        """Return whether only users of this machine, or those with a key, can ask this server."""
        return self.needs_key or is_loopback(self.host.lower())

    @property
    def shows_dashboard(self) -> bool:
        """Return whether the live page and /debug are there, which show requests of all users."""
        return self.open_dashboard or self.is_private


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsOptions:
    """Settings of a server with several models, each of which runs in a process of its own."""

    load_on_demand: bool = False
    """Load a model when it is first asked for. Without it, all are loaded at the start, as far as --memory-budget has
    room for them."""

    idle_unload_seconds: float = 0
    """Seconds without a request after which a model is unloaded: its process ends. The next request for it loads it
    again, and waits for that. 0: never."""

    memory_budget: Bytes | None = None
    """Most memory of the models that are loaded at the same time, with their KV caches. To make room for another, the
    least recently used one is unloaded as soon as its requests have ended. Default: no limit."""

    def __post_init__(self) -> None:
        seconds = self.idle_unload_seconds
        _check(0 <= seconds < float("inf"), "--idle-unload-seconds", seconds, "at least 0, and finite")
        _check_least(self, memory_budget=1)

    @property
    def are_set(self) -> bool:
        return self != ModelsOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOptions(ListenerOptions):
    """Settings of `oaiserve route`, which passes requests on to servers."""

    replica: tuple[str, ...] = ()
    """URL of a server, such as http://10.0.0.5:8000. May be repeated. A name with several addresses stands for as many
    servers. A URL with a path is that of a list of servers as for Prometheus' http_sd, such as
    http://ray-head:8000/cluster/targets. Both are looked up again every five seconds."""

    replica_key: str | None = field(default=None, repr=False)
    """API key by which the servers are asked for their reports, where they need one. Requests have the keys of their
    clients. Set it in the environment, because other users of the machine can see flags."""

    continue_streams: ContinueStreams = "any"
    """What becomes of a stream whose server ends or hangs. any: another server goes on with it. alike: only one of the
    same kind (model, settings, CPU, versions), which writes the same bytes. never: it ends with an error."""

    def __post_init__(self) -> None:
        for url in self.replica:
            is_url = _URL.fullmatch(url) is not None
            _check(is_url, "--replica", f"'{url}'", "a URL, as in http://10.0.0.5:8000")
        key = self.replica_key  # the message must not contain it
        _check(key is None or is_header_value(key), "--replica-key", "not usable", "printable ASCII without spaces")
        _check_choices(self)
        _ = self.server  # which checks the rest

    @property
    def server(self) -> ServerOptions:
        """Return the settings of the HTTP server in front."""
        return ServerOptions(**{field.name: getattr(self, field.name) for field in fields(ListenerOptions)})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Settings of the engine: how the model is loaded, the size of the KV cache, and the limits of batches."""

    task: TaskOption = "auto"
    """What the model is for. generate: text, by /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages.
    embed: vectors of texts, by /v1/embeddings. score: how well two texts go together, by /v1/score and /v1/rerank.
    auto: what the model's files say; docs/embeddings.md has the rules."""

    device: Device = field(default="auto", metadata=FREQUENT)
    """Device that runs the model. auto: the GPU if there is one, else the CPU."""

    dtype: Dtype = "auto"
    """Number format of the weights and the KV cache. auto: the format in which the model was saved, if the device is
    fast with it."""

    compile: bool = True
    """On a CPU, run the model's step in native code: the wheel's, or else what the system's C++ compiler makes at the
    first start. On a GPU, run its layers fused. Otherwise the slower code of transformers runs."""

    cpu_features: CpuFeatures = "native"
    """Instructions of the CPU that may be used. native: all. avx2: neither AVX-512 nor AMX, so answers are those of a
    machine that has none of these."""

    recheck: bool = False
    """On a CPU, compare the native step with transformers' code again, which more than doubles the time of a start. On
    a GPU, try again what has ended an earlier start."""

    overlap: bool = True
    """On a GPU, launch each step before the results of the previous step are on the host. A step with penalties, or
    with bad_words of several tokens, is always waited for."""

    cuda_graph: bool = True
    """On a GPU, capture decodes, for several batch sizes up to --max-running, and prompts of up to 2,048 tokens as CUDA
    graphs, which takes some seconds of the start and some memory."""

    exact: bool = False
    """Serve only if the same request gets the same bytes, whatever else runs. On a CPU, the native step gives them. On
    a GPU, products and attention of their own keep one order of sums, which takes time: for weights that are not
    quantized, without adapters. Streams then go on at other servers, and drafts change no answer."""

    attention: Attention = "auto"
    """Attention backend on a GPU. triton: oaiserve's own kernels. reference: plain torch, slow. auto: triton if
    it is installed, else reference."""

    quantize: Quantize = field(default="none", metadata=FREQUENT)
    """On a CPU with the native step, keep the weights of a checkpoint that is not quantized yet in 8 bits: half the
    memory, and faster. int4 keeps most of them in 4 bits: a third of the memory. Answers change slightly with int8, and
    much more with int4 if the model is small (docs/benchmarks.md)."""

    quantized_cache: Bytes = Bytes("32GiB")  # noqa: RUF009 - immutable
    """Most disk space for weights that --quantize has made, so that later starts need not make them again. They are in
    the folder quantized of the cache ($OAISERVE_CACHE, or else ~/.cache/oaiserve). 0 keeps none."""

    lora: tuple[str, ...] = field(default=(), metadata=FREQUENT)
    """LoRA adapter that requests can name as their model: NAME=FOLDER, in PEFT's format. May be repeated.
    docs/adapters.md has what is supported."""

    lora_dir: Path | None = None
    """Folder whose adapters can be loaded and unloaded while the server runs, by POST /v1/load_lora_adapter and
    /v1/unload_lora_adapter, which need an API key, or a server for this machine alone."""

    lora_memory: Bytes = Bytes("4GiB")  # noqa: RUF009 - immutable
    """Most memory for adapters from --lora-dir, with those that are unloaded but still have open requests."""

    drafts: DraftSource = "auto"
    """Whether steps verify guesses at the next tokens of a sequence. lookup: what followed the last tokens when they
    came before. auto: lookup with the native step of a CPU, where no answer changes; else off. On a GPU, drafts turn
    --overlap off."""

    cpu_threads: int | None = field(default=None, metadata=FREQUENT)
    """Threads that run the model on a CPU. Default: one for each core that this process may use; with 4 cores or more,
    one core is left to connections and tokenizing."""

    max_model_len: int | None = field(default=None, metadata=FREQUENT)
    """Most tokens of prompt and answer together. Default: the context length of the model."""

    default_max_tokens: int | None = None
    """Most tokens of an answer whose request sets no limit. Default: what the model's generation_config.json says
    (max_new_tokens or max_length), or else what the context leaves; for /v1/completions OpenAI's 16."""

    max_media_bytes: Bytes = Bytes("20MiB")  # noqa: RUF009 - immutable
    """Largest file of an image or a sound."""

    max_image_pixels: int = 16_000_000
    """Most pixels of an image, which takes up to 24 bytes for each while it is decoded; at most 178,956,970. A JPEG of
    up to 4 times as many is decoded at a half or a quarter of its size. All images of a prompt may have 16 times as
    many."""

    max_audio_seconds: float = 600
    """Longest sound."""

    chat_template: Path | None = None
    """Jinja file to use instead of the model's own chat template."""

    generation_config: bool = True
    """Take the defaults of temperature, top_p and other parameters from the model's generation_config.json or GGUF
    metadata, and the limit of answers whose requests set none. Without it, they are OpenAI's: temperature 1, and no
    token is excluded."""

    block_size: int = 16
    """Tokens in one block of the KV cache."""

    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that may be in use, by this server and other processes, above 0 and up to 1. The KV cache
    gets what the weights and the largest step leave of it, as measured at the start."""

    kv_cache_dtype: KVCacheDtype = "auto"
    """Number format of the KV cache. auto: the model's. int8: on a CPU with the native step, without latent attention:
    nearly twice as many tokens fit, and long contexts are read faster (docs/performance.md). fp8: on a GPU, floats of 8
    bits (E4M3): twice as many tokens fit (docs/models.md). Answers change slightly."""

    kv_blocks: int | None = None
    """Blocks in the KV cache. Default: as many as fit into --kv-cache-memory. Set only one of the two."""

    kv_cache_memory: Bytes | None = field(default=None, metadata=FREQUENT)
    """Memory for the KV cache, in bytes or with a unit, as in 4GiB. Default: on a GPU what --gpu-memory-utilization
    leaves; on a CPU enough for 65536 tokens or 8 requests of full length, but at most a quarter of the free memory."""

    max_running: int = field(default=256, metadata=FREQUENT)
    """Most sequences in one batch."""

    max_step_tokens: int | None = None
    """Most tokens in one step of the model, over all sequences; at least --max-running. Fewer tokens mean steadier
    streams, more tokens faster prefills. Default: 512 on a CPU, 2048 on a GPU, or --max-running if that is more."""

    policy: SchedulingPolicy = "fair"
    """Order in which waiting requests are scheduled. fair: clients (API keys, or else addresses) take turns, the one
    that got the fewest tokens first, and so do the requests of a client, where short prompts pass long ones. fcfs:
    first come, first served. priority: the lowest number in the request field "priority" first. shortest: the shortest
    prompt first, with ageing. deadline: first what has to begin first to keep its deadline, or else within 30 s."""

    prefill_max_requests: int | None = None
    """Most sequences that prefill in one step. Default: no separate limit."""

    prefill_max_tokens: int | None = None
    """Most prompt tokens in one step. Fewer tokens mean steadier streams. Default: what --max-step-tokens leaves."""

    step_target_seconds: float | None = None
    """Target for the time of a step, by which prompts are cut; needs --explain. Shorter steps let a short request begin
    sooner. Default: the time of 128 tokens, or three times that of one, and at least 0.05."""

    itl_target_seconds: float | None = None
    """Target for the time between two tokens of a stream (ITL): beside decodes, a step gets only as many prompt tokens
    as fit into it; needs --explain. Default: no target."""

    hang_seconds: float = 60
    """Seconds that one part of the engine's work may take, or 20 times the learnt cost of its step if that is more.
    Then /health and /ready are 503 until it goes on, and the log has the stacks of all threads."""

    exit_on_hang: bool = False
    """End the process, with exit code 70, when the engine hangs by --hang-seconds, for a supervisor to start it
    again."""

    cost_per_hour: float | None = None
    """Price of an hour of this machine, in any currency: each request is shown its part of it (docs/costs.md)."""

    lookahead: int = 8
    """Number of waiting sequences to try after one that does not fit into the KV cache yet. 0: none may overtake it."""

    prefix_cache: bool = True
    """Keep computed KV blocks for later requests that begin with the same tokens."""

    prefix_cache_dir: Path | None = None
    """Folder for the blocks of the prefix cache, on a CPU with the native step, for later starts with the same model,
    settings and versions, and as a second cache beneath that in memory. It has to be this user's alone."""

    prefix_cache_disk: Bytes = Bytes("8GiB")  # noqa: RUF009 - immutable
    """Most disk space for --prefix-cache-dir. What has not been used for longest is removed."""

    media: bool = True
    """Read images, where the model does. Without it, the model's tower takes no memory, and images get a 400."""

    mmproj: Path | None = None
    """File that reads images for a GGUF file, llama.cpp's mmproj. Default: one beside it whose name has mmproj."""

    media_cache: Bytes = Bytes("512MiB")  # noqa: RUF009 - immutable
    """Most memory for the vectors of images that have been encoded, for later requests with the same images."""

    max_waiting: int = 1024
    """Most waiting sequences: a request has n for each of its prompts. Further requests get a 429 with Retry-After. If
    one client has filled the queue, the others still get their share."""

    max_waiting_tokens: int | None = None
    """Most prompt tokens of all waiting requests together. Further requests get a 429. Default: no limit."""

    queue_timeout_seconds: float = 0
    """Seconds that a request may wait to be scheduled; then it gets a 503. 0: no limit."""

    request_timeout_seconds: float = 0
    """Seconds that a request may take in total; then it gets a 408, or an error in its stream. 0: no limit."""

    tokenize_workers: int = 2
    """Threads that tokenize prompts, besides half as many that prepare images and sounds where the model reads these.
    0: the thread that submits a request tokenizes it."""

    explain: bool = True
    """Learn what steps cost while serving, and divide the phases prefill and decode of each request into their
    causes."""

    forecast: bool = True
    """Forecast when each request will have its first token and its end (docs/forecasts.md). Needs --explain."""

    def __post_init__(self) -> None:
        _check_choices(self)
        if self.quantize != "none" and not self.compile:
            raise OptionError(f"--quantize {self.quantize} needs --compile: transformers' code cannot do it.")
        for given in self.lora:
            name, sign, folder = given.partition("=")
            _check(bool(name.strip() and sign and folder), "--lora", f"'{given}'", "NAME=FOLDER")
        if len(self.adapters) < len(self.lora):
            raise OptionError("--lora has the same name twice. Each adapter needs a name of its own.")
        self._check_contradictions()
        _check_least(
            self,
            cpu_threads=1,
            max_model_len=1,
            default_max_tokens=1,
            block_size=1,
            kv_blocks=1,
            kv_cache_memory=1,
            max_running=1,
            max_step_tokens=1,
            prefill_max_requests=1,
            itl_target_seconds=0.001,
            hang_seconds=1,
            cost_per_hour=0,
            step_target_seconds=0.001,
            prefill_max_tokens=1,
            quantized_cache=0,
            lookahead=0,
            max_waiting=0,
            max_waiting_tokens=1,
            queue_timeout_seconds=0,
            request_timeout_seconds=0,
            tokenize_workers=0,
            max_media_bytes=1,
        )
        most = 178_956_970  # beyond which Pillow reads nothing
        pixels, seconds = self.max_image_pixels, self.max_audio_seconds
        _check(0 < pixels <= most, "--max-image-pixels", pixels, f"at least 1 and at most {most}")
        _check(0 < seconds <= 3600, "--max-audio-seconds", seconds, "above 0 and at most 3600")
        if self.max_step_tokens is not None and self.max_step_tokens < self.max_running:
            # Every decoding sequence takes one token of every step.
            _check(False, "--max-step-tokens", self.max_step_tokens, f"at least --max-running ({self.max_running})")
        share = self.gpu_memory_utilization
        _check(0 < share <= 1, "--gpu-memory-utilization", share, "above 0 and at most 1")
        if self.kv_blocks is not None and self.kv_cache_memory is not None:
            raise OptionError("--kv-blocks and --kv-cache-memory both set the size of the KV cache. Set only one.")

    @property
    def adapters(self) -> dict[str, Path]:
        """Return the folders of the adapters, by name."""
        parts = (given.partition("=") for given in self.lora)
        return {name: Path(folder) for name, _, folder in parts}

    @property
    def has_adapters(self) -> bool:
        """Return whether adapters may be loaded, now or later."""
        return bool(self.lora) or self.lora_dir is not None

    def _check_contradictions(self) -> None:
        on_gpu, in_eager = self.device == "cuda", not self.compile
        if self.kv_cache_dtype != "auto":
            is_int8 = self.kv_cache_dtype == "int8"
            which = "the native step of a CPU has" if is_int8 else "Triton's attention on one GPU reads"
            _refuse(
                f"--kv-cache-dtype {self.kv_cache_dtype}",
                ("--device cuda", is_int8 and on_gpu, why := f"only {which} such a cache"),
                ("--device cpu", not is_int8 and self.device == "cpu", why),
                ("--no-compile", is_int8 and in_eager, why),
            )
        if self.quantize != "none":
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
            )

    def step_tokens(self, default: int) -> int:
        """Return the most tokens in one step, given the default for the device."""
        return self.max_step_tokens or max(default, self.max_running)


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryOptions:
    """Settings of telemetry. OpenTelemetry's own OTEL_* variables set where traces and metrics are exported to."""

    recent_requests: int = 256
    """Number of ended requests that /debug/requests shows (with an API key, or on a loopback --host)."""

    record_requests: Path | None = None
    """File for a recording of the load: when requests arrived, how long they were and what they had in common, as
    hashes, without any text. `oaiserve plan` and the load test read it. It is begun anew at 64 MiB, and the file before
    is kept beside it with .1 at the end of its name."""

    slo: str | None = None
    """Targets for the time to first token and the time per output token, as in ttft:2s,tpot:100ms. The metric
    oaiserve_slo_requests_total counts the requests that meet or miss them, and the alert rules use it. Without one, the
    target is six times what the request would have taken alone on this machine, but at least 1 s or 200 ms."""

    vllm_metrics: bool = True
    """Show the metrics on /metrics under vLLM's names, too, for dashboards, autoscalers and routers made for vLLM."""

    def __post_init__(self) -> None:
        _check_least(self, recent_requests=0)
        is_slo = self.slo is None or all(map(_SLO.fullmatch, self.slo.split(",")))
        _check(is_slo, "--slo", f"'{self.slo}'", "times for ttft or tpot, as in ttft:2s,tpot:100ms")


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of a server."""

    model: str  # as the user gave it: "demo", a folder, a hub id, or a .gguf file
    server: ServerOptions = field(default_factory=ServerOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    telemetry: TelemetryOptions = field(default_factory=TelemetryOptions)
    file: Path | None = None  # where some of these settings came from

    def __post_init__(self) -> None:
        for name in self.model_names:
            if name in self.engine.adapters:
                raise OptionError(f"--lora names an adapter '{name}', which is the name of the model itself.")

    @property
    def model_name(self) -> str:
        """Return the name of the model in answers and in telemetry."""
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """Return the names that requests may give to the model."""
        return tuple(dict.fromkeys(self.server.served_model_name)) or (self.model,)
