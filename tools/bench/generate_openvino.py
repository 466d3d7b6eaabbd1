"""Generates with OpenVINO GenAI's continuous batching: a program for the environment that has it, without our code.

Each line of its input is JSON with `prompts`, lists of token ids, and `max_tokens`; it answers with the seconds that
`generate` took and the ids of each answer.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import openvino
import openvino_genai


def main() -> None:
    folder, threads, cache_gib = sys.argv[1:]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = int(cache_gib)
    scheduler.max_num_seqs = 256
    properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": int(threads)}
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
    print("ready", flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        config = openvino_genai.GenerationConfig(
            max_new_tokens=work["max_tokens"], min_new_tokens=work["max_tokens"], ignore_eos=True, do_sample=False
        )
        prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in work["prompts"]]
        began = time.perf_counter()
        answers = pipeline.generate(prompts, [config] * len(prompts))
        seconds = time.perf_counter() - began
        ids = [list(answer.m_generation_ids[0]) for answer in answers]
        print(json.dumps({"seconds": seconds, "token_ids": ids}), flush=True)


if __name__ == "__main__":
    main()
