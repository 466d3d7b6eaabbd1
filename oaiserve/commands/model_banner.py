"""The banner of a server with one model: its model, device and sampling, and a request to try."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

from oaiserve import __version__
from oaiserve.checkpoints import demo
from oaiserve.commands.banner import Banner, address, places
from oaiserve.commands.models import model_at
from oaiserve.commands.table import size
from oaiserve.config import Config
from oaiserve.engine.types.pooling import Task
from oaiserve.routes.intake.sampling_defaults import sampling_defaults
from oaiserve.system_cpus import default_threads

if TYPE_CHECKING:
    from oaiserve.engine.boundary import AnyEngine

_LONG_NAME = 40  # characters; the example request leaves out longer model names
_PAGES = {"generate": "Chat", "complete": "Page"}  # label of the first page; other uses get the API page
Use: TypeAlias = Task | Literal["complete"]  # complete: a generative model without a chat template
# An example request for each use: its path, and its body without the model.
_EXAMPLES: dict[Use, tuple[str, str]] = {
    "generate": ("/v1/chat/completions", '"messages": [{"role": "user", "content": "Hello!"}]'),
    "complete": ("/v1/completions", '"prompt": "Once upon a time", "max_tokens": 50'),
    "embed": ("/v1/embeddings", '"input": ["A cat sleeps.", "A dog barks."]'),
    "transcribe": ("/v1/audio/transcriptions", "-F file=@speech.wav"),
    "score": ("/v1/rerank", '"query": "What sleeps?", "documents": ["A dog barks.", "A cat sleeps."]'),
}


def of_server(config: Config, port: int, use: Use, facts: Mapping[str, str], *, has_pages: bool = True) -> Banner:
    url = address(config.server, port)
    if config.needs_key:
        key = " -H 'authorization: Bearer '$OPENAI_API_KEY"
    else:
        key = ""
    path, body = _EXAMPLES[use]
    if len(config.model_name) > _LONG_NAME:
        model = ""
    else:
        model = f'"model": "{config.model_name}", '
    if use == "transcribe":
        example = f"curl {url}{path}{key} {body} -F model={config.model_name}"
    else:
        example = f"curl {url}{path}{key} -H 'content-type: application/json' \\\n  -d '{{{model}{body}}}'"
    shown = places(config, url, _PAGES.get(use, "API page"), has_pages=has_pages)
    closing = "Ctrl-C stops the server."
    if use == "generate":
        closing = f"To use it from a coding tool, see 'oaiserve launch'. {closing}"
    return Banner(
        f"oaiserve {__version__} serves {config.model_name} at {url}/v1", {**facts, **shown}, example, closing
    )


def engine_facts(config: Config, engine: AnyEngine) -> dict[str, str]:
    facts = {"Model": _model(config, engine), "Runs on": _executor(config, engine)}
    if engine.pooling is None:
        facts["Sampling"] = (
            f"{sampling_defaults(config, engine.default_params, engine.recommendation)}, unless a request sets others"
        )
        if engine.tokenizer.chat_template is None:
            facts["No chat"] = engine.tokenizer.why_no_chat
    if engine.replicas:
        facts["Replicas"] = f"{len(engine.replicas)}, each with an engine process of its own"
    if config.model == "demo":
        facts["This demo"] = f"is very small. {demo.advice()}"
    if engine.adapters.served:
        facts["Adapters"] = ", ".join(adapter.name for adapter in engine.adapters.served)
    return facts


def _model(config: Config, engine: AnyEngine) -> str:
    if engine.path is None:
        return config.model_name
    model = model_at(config.model, engine.path)
    form, family = model.described()
    name = engine.path.name if config.model == "demo" else config.model
    limits = f"up to {engine.max_model_len:,} tokens a request"
    return f"{name} ({family}), {form.strip()}, {size(model.num_bytes)}, {limits}"


def _executor(config: Config, engine: AnyEngine) -> str:
    info = engine.model_info
    features = engine.features
    parts = [info["device"]]
    if info["device"] == "cpu":
        num_threads = config.engine.cpu_threads or default_threads()
        parts = [f"CPU, {num_threads} thread{'s' if num_threads > 1 else ''}"]
        if engine.replicas:
            parts.append("divided among the replicas")
        is_native = features.get("native_step") == "" or engine.pooling is not None
        parts.append("native code" if is_native else "PyTorch, which is slower than native code")
    parts.append(info["dtype"])
    if engine.pooling is None:
        num_tokens = engine.capacity["kv_blocks"] * engine.capacity["block_size"]
        parts.append(f"KV cache of {num_tokens:,} tokens ({engine.kv_bytes / 2**30:.2f} GiB)")
    elif engine.pooling.task == "embed":
        parts.append(f"vectors of {engine.pooling.size:,} numbers")
    return ", ".join(parts)
