"""Finds out which of transformers' model types can be served: python -m tools.model_types [TYPE ...]

For each type, greedy answers of a small model with random weights are compared with those of transformers' `generate`.
The engine computes them batched, in chunks, and with so few blocks that sequences are preempted; first by transformers'
code, then by the native step or, where that does not know the type, by native attention. The types named embed:TYPE are
encoders, whose vectors are compared with transformers'. Prints one line per type, with the reason where it is refused,
and exits with 1 if an answer differs. Takes a minute or two.
"""

from __future__ import annotations

import argparse
import logging
import sys
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.engine import Engine
from oaiserve.engine.model.checkpoints.wrapper import WRAPPERS
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.model.model_config import refuse_unless_decoder_only
from oaiserve.engine.model.pooling.files import PoolingFiles
from oaiserve.engine.model.pooling.pooler import PackedForward
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.states import States
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.kv_form import with_native_cache
from oaiserve.engine.start.load import load_model
from oaiserve.engine.start.native import native_attention, native_step
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.start.ways.pooling import prepare_pooler
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import StartupError
from tests.models.decoders import byte_tokenizer, generate, random_model
from tests.models.encoders import OWN, PACKED, encoder_config
from tests.models.poolers import random_pooler
from tests.models.small_configs import config_of
from tests.models.wrappers import save_wrapper

TYPES = """\
afmoe apertus arcee axk1 bailing_hybrid bamba bart bert biogpt bitnet codegen cohere cohere2 cohere2_moe cpmant
ctrl cwm dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1 ernie4_5 ernie4_5_moe exaone4
exaone_moe falcon_h1 falcon_mamba flex_olmo gemma gemma2 gemma3_text gemma3n_text gemma4_text
gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese
gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text
hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jamba jetmoe kimi_linear laguna lfm2
lfm2_moe lfm3 llama llama4_text longcat_flash mamba mamba2 mellum mimo_v2_flash minicpm3 minimax minimax_m2 ministral
ministral3 mistral mixtral mllama modernbert-decoder mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid
olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
qwen4_exp_text recurrent_gemma rwkv seed_oss smollm3 solar_open stablelm starcoder2 t5 vaultgemma whisper xglm xlstm
zamba zamba2 zaya
""".split()  # noqa: SIM905 - one name per line would be a page

_EMBED = "embed:"
PROMPTS = [[5, 9, 3, 17], list(range(20, 51)), [90], [7] * 12, [11, 40, 11, 40, 11]]
NUM_TOKENS = 12
BLOCK_SIZE = 16


def main(types: list[str]) -> int:
    transformers.utils.logging.set_verbosity_error()
    logging.disable(logging.WARNING)  # the KV cache is meant to be full
    results = {}
    encoders = [f"{_EMBED}{name}" for name in sorted(PACKED | OWN)]
    for name in types or [*TYPES, *sorted(WRAPPERS), *encoders]:
        results[name] = check(name)
        print(f"{name:18} {results[name]}", flush=True)
    served = sum(result.startswith("equal") for result in results.values())
    print(f"{served} of {len(results)} types are served")
    return int(any("DIFFERENT" in result for result in results.values()))


def check(name: str) -> str:
    """Return "equal" or "DIFFERENT", and whether the native step or native attention ran; or why it is refused."""
    if name in WRAPPERS:
        return check_wrapper(name)
    if name.startswith(_EMBED):
        return check_encoder(name.removeprefix(_EMBED))
    config = config_of(name)
    try:
        refuse_unless_decoder_only(config, name)
        loaded = prepare(random_model(deepcopy(config)), name)  # a model writes its attention into its config
    except StartupError as error:
        return str(error)
    return compare(loaded, generate(random_model(config), PROMPTS, NUM_TOKENS))


def check_wrapper(name: str) -> str:
    """Do the same for the text model of a multimodal checkpoint, which is loaded from its files."""
    with TemporaryDirectory() as folder:
        wrapper = save_wrapper(name, Path(folder))
        loaded = load_model(folder, device="cpu")
    text = f" (text: {loaded.model.config.model_type})"
    return compare(loaded, generate(wrapper, PROMPTS, NUM_TOKENS)) + text


def check_encoder(name: str) -> str:
    """Compare the vectors of an encoder with transformers', and say whether texts are packed."""
    try:
        pooler = prepare_pooler(random_pooler(encoder_config(name)), "embed", PoolingFiles("mean"), name=name)
    except StartupError as error:
        return str(error)
    own = random_pooler(encoder_config(name))
    ids = [token_id for prompt in PROMPTS for token_id in prompt]
    found = pooler.pool(ids, [0] * len(ids), list(map(len, PROMPTS)))
    with torch.inference_mode():
        outputs = [own(input_ids=torch.tensor([prompt])).last_hidden_state[0].mean(0) for prompt in PROMPTS]
    is_equal = torch.cosine_similarity(found, torch.stack(outputs)).min() >= 0.9999
    way = "packed" if isinstance(pooler.forward, PackedForward) else "one text at a time"
    return f"{'equal' if is_equal else 'DIFFERENT'}, {way}"


def compare(loaded: LoadedModel, expected: list[list[int]]) -> str:
    step, differs = "native", False
    for num_blocks in (64, 4):
        executor: Executor = EagerExecutor.with_cache(loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        differs |= answers(loaded, executor, num_blocks) != expected
        try:
            options = EngineOptions(block_size=BLOCK_SIZE)
            cached = with_native_cache(loaded, options)
            executor = native_step(cached, options, num_blocks=num_blocks, num_threads=1)
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
        ServedModel(
            tokenizer=Tokenizer(byte_tokenizer()),
            runner=ModelRunner(executor, loaded.device, BLOCK_SIZE, states=states),
            num_blocks=num_blocks,
            max_model_len=48,
            vocab_size=loaded.vocab_size,
            num_states=num_states,
        ),
        options,
    )
    with engine:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        return [completion.token_ids for completion in engine.generate(PROMPTS, params)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="default: all")
    sys.exit(main(parser.parse_args().types))
