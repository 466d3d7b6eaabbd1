"""Finds out which of transformers' model types can be served: python -m tools.model_types [TYPE ...]

For each type, greedy answers of a small model with random weights are compared with those of transformers' `generate`.
The engine computes them batched, in chunks, and with so few blocks that sequences are preempted; first by transformers'
code, then by the native step or, where that does not know the type, by native attention. Prints one line per type, with
the reason where it is refused, and exits with 1 if an answer differs. Takes a minute or two.
"""

from __future__ import annotations

import logging
import sys
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import transformers
from transformers import AutoConfig, PreTrainedConfig

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.model.checkpoints.wrapper import WRAPPERS
from oaiserve.engine.model.cpu.description import NotKnown
from oaiserve.engine.model.cpu.start import native_attention, native_decoder, with_native_cache
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.load import load_model
from oaiserve.engine.model.model_config import refuse_unless_decoder_only
from oaiserve.engine.model.prepare import prepare
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.model.states import States
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import StartupError
from tools.random_models import SMALL, STATE_FAMILIES, byte_tokenizer, generate, random_model
from tools.random_wrappers import SHARED_KEYS, save_wrapper

TYPES = """\
afmoe apertus arcee axk1 bailing_hybrid bamba bart bert biogpt bitnet bloom codegen cohere cohere2 cohere2_moe cpmant
ctrl cwm dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1 ernie4_5 ernie4_5_moe exaone4
exaone_moe falcon falcon_h1 falcon_mamba flex_olmo gemma gemma2 gemma3_text gemma3n_text gemma4_text
gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese
gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text
hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jamba jetmoe kimi_linear laguna lfm2
lfm2_moe lfm3 llama llama4_text longcat_flash mamba mamba2 mellum mimo_v2_flash minicpm3 minimax minimax_m2 ministral
ministral3 mistral mixtral mllama modernbert-decoder mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid
olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
qwen4_exp_text recurrent_gemma rwkv seed_oss smollm3 solar_open stablelm starcoder2 t5 vaultgemma whisper xglm xlstm
zamba zamba2 zaya
""".split()  # noqa: SIM905 - one name per line would be a page

_SIZES = {**SMALL, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # sizes that the native step takes
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
_DEEPSEEK = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_GROUPED = {key: value for key, value in _DEEPSEEK.items() if "rank" not in key and "head_dim" not in key} | {
    "num_experts": 4,
    "num_shared_experts": 1,
}
_HEADS_FOR_EACH = {"num_key_value_heads": 4}  # these have no grouped attention
_ROTARY_NAMES = {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8}
# What the code of a type needs beside the common sizes to run; None removes a size that it cannot have.
EXTRA = {
    "codegen": _ROTARY_NAMES,
    "falcon": {"head_dim": None},
    "gpt_neo": {
        "num_layers": 3,
        "num_heads": 4,
        "window_size": 6,
        "attention_types": [[["global", "local", "local"], 1]],
    },
    "mpt": {"d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 128},
    "deepseek_v2": {**_DEEPSEEK, **_HEADS_FOR_EACH},
    "deepseek_v3": {**_DEEPSEEK, **_HEADS_FOR_EACH},
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3n_text": {**SHARED_KEYS, "laurel_rank": 16, "altup_num_inputs": 2},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 6,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 97,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "gemma4_unified_text": {**SHARED_KEYS, "global_head_dim": 32},
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "gpt_neox": _HEADS_FOR_EACH,
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 96, "no_rope_layer_interval": 2},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "jamba": {"num_hidden_layers": 4},
    "kimi_linear": {
        **_DEEPSEEK,
        **_HEADS_FOR_EACH,
        "q_lora_rank": None,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention"], "sliding_window": 6},
    "mamba2": {"head_dim": 32},
    "nemotron_h": {"num_hidden_layers": 5},
    "gptj": _ROTARY_NAMES,
    "persimmon": _HEADS_FOR_EACH,
    "phi": _HEADS_FOR_EACH,
    "stablelm": _HEADS_FOR_EACH,
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "granitemoeshared": {**_MOE, "shared_intermediate_size": 48},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "jetmoe": {**_MOE, "kv_channels": 16, "num_attention_heads": 4},
    **{name: {**_GROUPED, **_HEADS_FOR_EACH} for name in ("dots1", "exaone_moe", "glm4_moe")},
    **{name: {**_DEEPSEEK, **_HEADS_FOR_EACH} for name in ("axk1", "glm4_moe_lite", "longcat_flash", "minicpm3")},
    **dict.fromkeys(("afmoe", "flex_olmo", "gpt_oss", "granitemoe", "minimax_m2", "mixtral", "olmoe", "phimoe"), _MOE),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _MOE),
    "zamba2": {**_HEADS_FOR_EACH, "head_dim": None, "num_hidden_layers": 4},
}
_DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}  # heads that the native step takes
EXTRA |= dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), _DELTA)
EXTRA |= {name: {"mamba_d_state": 16} for name in ("bamba", "falcon_h1", "granitemoehybrid")}
EXTRA["mamba2"] |= {"state_size": 16}
EXTRA |= {name: {"state_size": 16, "time_step_rank": 16} for name in ("mamba", "falcon_mamba")}
EXTRA["jamba"] |= {"mamba_d_state": 16, "mamba_dt_rank": 16}
EXTRA["nemotron_h"] |= {"ssm_state_size": 16}
# Types with the sizes of another one.
LIKE = {"lfm3": "lfm2", "qwen3_5_moe_text": "qwen3_next"}
PROMPTS = [[5, 9, 3, 17], list(range(20, 51)), [90], [7] * 12, [11, 40, 11, 40, 11]]
NUM_TOKENS = 12
BLOCK_SIZE = 16


def main(types: list[str]) -> int:
    transformers.utils.logging.set_verbosity_error()
    logging.disable(logging.WARNING)  # the KV cache is meant to be full
    results = {}
    for name in types or [*TYPES, *sorted(WRAPPERS)]:
        results[name] = check(name)
        print(f"{name:18} {results[name]}", flush=True)
    served = sum(result.startswith("equal") for result in results.values())
    print(f"{served} of {len(results)} types are served")
    return int(any("DIFFERENT" in result for result in results.values()))


def check(name: str) -> str:
    """Return "equal" or "DIFFERENT", and whether the native step or native attention ran; or why it is refused."""
    if name in WRAPPERS:
        return check_wrapper(name)
    config = config_of(name)
    try:
        refuse_unless_decoder_only(config, name)
        loaded = prepare(random_model(deepcopy(config)), name)  # a model writes its attention into its config
    except StartupError as error:
        return str(error)
    return compare(loaded, generate(random_model(config), PROMPTS, NUM_TOKENS))


def config_of(name: str) -> PreTrainedConfig:
    """Return the configuration of a small model of a type."""
    values = {**STATE_FAMILIES.get(LIKE.get(name, name), {}), **_SIZES, **EXTRA.get(name, {}), "model_type": None}
    found: PreTrainedConfig = AutoConfig.for_model(
        name, **{key: value for key, value in values.items() if value is not None}
    )
    return found


def check_wrapper(name: str) -> str:
    """Do the same for the text model of a multimodal checkpoint, which is loaded from its files."""
    with TemporaryDirectory() as folder:
        wrapper = save_wrapper(name, Path(folder))
        loaded = load_model(folder, device="cpu")
    text = f" (text: {loaded.model.config.model_type})"
    return compare(loaded, generate(wrapper, PROMPTS, NUM_TOKENS)) + text


def compare(loaded: LoadedModel, expected: list[list[int]]) -> str:
    step, differs = "native", False
    for num_blocks in (64, 4):
        executor: Executor = EagerExecutor.with_cache(loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        differs |= answers(loaded, executor, num_blocks) != expected
        try:
            cached = with_native_cache(loaded, EngineOptions())
            executor = native_decoder(cached, num_blocks=num_blocks, block_size=BLOCK_SIZE, num_threads=1)
        except NotKnown as error:
            step = f"native attention: {error}"
            attention = native_attention(loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE, num_threads=1)
            executor = EagerExecutor(loaded, attention.caches, attention.prepare)
        differs |= answers(loaded, executor, num_blocks) != expected
    return f"{'DIFFERENT' if differs else 'equal'}, {step}"


def answers(loaded: LoadedModel, executor: Executor, num_blocks: int) -> list[list[int]]:
    options = EngineOptions(block_size=BLOCK_SIZE, max_running=8, max_step_tokens=9)
    num_states = options.max_running if loaded.state_shapes else 0
    states = States(loaded.state_shapes, num_states, loaded.device) if num_states else None
    engine = Engine(
        tokenizer=Tokenizer(byte_tokenizer()),
        runner=ModelRunner(executor, loaded.device, BLOCK_SIZE, states=states),
        num_blocks=num_blocks,
        max_model_len=48,
        vocab_size=loaded.vocab_size,
        num_states=num_states,
        options=options,
    )
    with engine:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        return [completion.token_ids for completion in engine.generate(PROMPTS, params)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
