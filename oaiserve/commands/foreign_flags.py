"""The flags of vLLM, SGLang, llama.cpp's server and uvicorn, Ollama's commands, and removed ones, with what takes their
place here."""

from __future__ import annotations

_MODEL = "MODEL, which comes first and has no flag, as in: oaiserve serve demo"
_SAMPLING = "--default-params"
_REPLICAS = "oaiserve route, in front of several servers: one server is one process"
_PARALLEL = "oaiserve route or Ray, which serve several copies: a model is on one device"

# Flags of other servers, with ours. Flags with the same name here are left out, and so are those that can't be misread.
OUR_FLAGS = {
    "--alias": "--served-model-name",
    "--allowed-origins": "--cors-origin",
    "--api-server-count": _REPLICAS,
    "--block-size": "not needed: a block has 16 tokens",
    "--cache-type-k": "--kv-cache-dtype",
    "--chat-template-file": "--chat-template",
    "--chunked-prefill-size": "--max-step-tokens",
    "--context-length": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--embeddings": "--task embed",
    "--enable-auto-tool-choice": "not needed; --tool-call-parser none turns it off",
    "--enable-lora": "--lora or --lora-dir",
    "--enable-prefix-caching": "--prefix-cache, which is on",
    "--enforce-eager": "--no-compile",
    "--hf-repo": _MODEL,
    "--jinja": "not needed: chat templates are in Jinja",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
    "--kv-blocks": "--kv-cache-memory",
    "--limit-concurrency": "--max-connections",
    "--lora-modules": "--lora",
    "--lora-paths": "--lora",
    "--flash-attn": "not needed",
    "--forwarded-allow-ips": "--trusted-proxy",
    "--front-ends": _REPLICAS,
    "--max-num-batched-tokens": "--max-step-tokens",
    "--max-num-seqs": "--max-running",
    "--max-running-requests": "--max-running",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--model": _MODEL,
    "--model-path": _MODEL,
    "--frequency-penalty": f"{_SAMPLING} frequency_penalty=0.5",
    "--max-waiting-tokens": "--max-waiting",
    "--min-p": f"{_SAMPLING} min_p=0.05",
    "--n-gpu-layers": "not needed: a GPU has the whole model. --device cpu uses none",
    "--n-predict": "--default-max-tokens",
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--num-gpu-blocks-override": "--kv-cache-memory",
    "--override-generation-config": _SAMPLING,
    "--parallel": "--max-running",
    "--prefill-max-requests": "--max-running",
    "--prefill-max-tokens": "--max-step-tokens or --itl-target-seconds",
    "--preferred-sampling-params": _SAMPLING,
    "--presence-penalty": f"{_SAMPLING} presence_penalty=0.5",
    "--quantization": "--quantize; weights that are quantized already need no flag",
    "--repeat-penalty": f"{_SAMPLING} repetition_penalty=1.1",
    "--sampling-defaults": "--no-generation-config for OpenAI's defaults",
    "--schedule-policy": "--policy",
    "--scheduling-policy": "--policy",
    "--ssl-certfile": "--tls-certificate",
    "--ssl-keyfile": "--tls-key",
    "--temp": f"{_SAMPLING} temperature=0.7",
    "--tensor-parallel-size": _PARALLEL,
    "--threads": "--cpu-threads",
    "--timeout-graceful-shutdown": "--drain-timeout-seconds",
    "--timeout-keep-alive": "--idle-timeout-seconds",
    "--top-k": f"{_SAMPLING} top_k=40",
    "--top-p": f"{_SAMPLING} top_p=0.95",
    "--tp": _PARALLEL,
    "--tp-size": _PARALLEL,
    "--uvicorn-log-level": "--log-level",
    "--workers": _REPLICAS,
}

# Short flags of llama.cpp's server
SHORT = {
    "-a": "--alias",
    "-c": "--ctx-size",
    "-fa": "--flash-attn",
    "-hf": "--hf-repo",
    "-m": "--model",
    "-n": "--n-predict",
    "-ngl": "--n-gpu-layers",
    "-np": "--parallel",
    "-t": "--threads",
}

OUR_COMMANDS = {
    "create": "oaiserve serve with --default-params and --chat-template",
    "diff": "oaiserve bench diff, which compares two recordings",
    "run": "oaiserve chat, or oaiserve serve with its chat page",
    "show": "oaiserve list, or oaiserve doctor MODEL",
}
