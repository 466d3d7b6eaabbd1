"""Finds out how transformers' model types are served: python -m tools.model_types [TYPE ...]

For each type, a small model with random weights is saved and served from its files on a CPU, with and without native
code, and its greedy answers are compared with those of transformers' `generate`. The engine computes them batched, in
chunks, and with so few blocks that sequences are preempted. The types named embed:TYPE are encoders, whose vectors are
compared with transformers'. Prints one line per type, with what computed its steps or why it is refused, and exits with
1 if an answer differs. Takes some minutes.
"""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from transformers import PreTrainedModel

from oaiserve.checkpoints.source import find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.settings import table
from oaiserve.engine.engine import Engine
from oaiserve.engine.engine_parts import EngineParts
from oaiserve.engine.executors.fallback import FallbackExecutor
from oaiserve.engine.executors.native.native import NativeDecoder
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.model_config import refuse_unless_computable
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.start.described import describe_model
from oaiserve.engine.start.plan import start_model
from oaiserve.engine.start.start_times import StartTimes
from oaiserve.errors import StartupError
from oaiserve.runtime import THREADS
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

EXECUTORS: dict[type, str] = {NativeDecoder: "native", ReferenceExecutor: "reference", FallbackExecutor: "fallback"}
_EMBED = "embed:"
PROMPTS = [[5, 9, 3, 17], list(range(20, 51)), [90], [7] * 12, [11, 40, 11, 40, 11]]
NUM_TOKENS = 12
OPTIONS = EngineOptions(
    device="cpu",
    cpu_threads=1,
    block_size=16,
    max_running=8,
    max_step_tokens=9,
    max_model_len=48,
    media=False,
)


def main(types: list[str]) -> int:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)  # the KV cache is meant to be full
    results = {}
    encoders = [f"{_EMBED}{name}" for name in sorted(PACKED | OWN)]
    for name in types or [*TYPES, *table()["wrappers"], *encoders]:
        results[name] = check(name)
        print(f"{name:18} {results[name]}", flush=True)
    served = sum(result.startswith("equal") for result in results.values())
    print(f"{served} of {len(results)} types are served")
    return int(any("DIFFERENT" in result for result in results.values()))


def check(name: str) -> str:
    """Return "equal" or "DIFFERENT", and what computed the steps; or why the type is refused."""
    if name.startswith(_EMBED):
        return check_encoder(name.removeprefix(_EMBED))
    with TemporaryDirectory() as folder:
        path = Path(folder)
        try:
            if name in table()["wrappers"]:
                model = save_wrapper(name, path)
            else:
                config = config_of(name)
                refuse_unless_computable(config, name)
                model = random_model(config)
                model.save_pretrained(path)
            byte_tokenizer().save_pretrained(path)
            return compare(path, model)
        except StartupError as error:
            return str(error)


def check_encoder(name: str) -> str:
    """Compare the vectors of an encoder with transformers', and say whether texts are packed."""
    from oaiserve.plugins.pooling.model.files import PoolingFiles  # The plug-in may be missing.
    from oaiserve.plugins.pooling.model.load import prepare_pooler
    from oaiserve.plugins.pooling.model.pooler import PackedForward

    try:
        pooler = prepare_pooler(random_pooler(encoder_config(name)), "embed", PoolingFiles("mean"), name=name)
    except StartupError as error:
        return str(error)
    own = random_pooler(encoder_config(name))
    ids = [token_id for prompt in PROMPTS for token_id in prompt]
    vectors = pooler.pool(ids, [0] * len(ids), list(map(len, PROMPTS)))
    with torch.inference_mode():
        outputs = [own(input_ids=torch.tensor([prompt])).last_hidden_state[0].mean(0) for prompt in PROMPTS]
    is_equal = torch.cosine_similarity(vectors, torch.stack(outputs)).min() >= 0.9999
    way = "packed" if isinstance(pooler.forward, PackedForward) else "one text at a time"
    return f"{'equal' if is_equal else 'DIFFERENT'}, {way}"


def compare(path: Path, model: PreTrainedModel) -> str:
    """Compare the answers of a model that is served from its files with transformers'."""
    try:
        expected = generate(model, PROMPTS, NUM_TOKENS)
    except (RuntimeError, ValueError) as error:
        return f"transformers' generate fails: {error}"
    differs = False
    executors = []
    for compiles in (True, False):
        options = replace(OPTIONS, compile=compiles)
        for num_blocks in (64, 4):
            actual, executor = answers(path, replace(options, kv_blocks=num_blocks))
            differs |= actual != expected
        executors.append(executor)
    computed_by = " and ".join(dict.fromkeys(executors))
    return f"{'DIFFERENT' if differs else 'equal'}, {computed_by}{reason_without_description(path)}"


def answers(path: Path, options: EngineOptions) -> tuple[list[list[int]], str]:
    """Return the answers of a model, and the name of the executor that computed them."""
    served = start_model(path, options, StartTimes(), lambda: None, THREADS)
    assert isinstance(served.runner, ModelRunner)
    executor = EXECUTORS[type(served.runner.executor)]
    with Engine(EngineParts.of(served, options)) as engine:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        return [completion.token_ids for completion in engine.generate(PROMPTS, params)], executor


def reason_without_description(path: Path) -> str:
    try:
        describe_model(find_model(path), OPTIONS)
    except NotKnown as reason:
        return f": {reason}"
    return ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="default: all")
    sys.exit(main(parser.parse_args().types))
