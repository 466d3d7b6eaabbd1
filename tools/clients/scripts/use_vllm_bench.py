"""vLLM's load generator, `vllm bench serve`."""

import json
from pathlib import Path

from features import run, run_program

CHAT = """\
vllm bench serve --backend openai-chat --base-url http://127.0.0.1:8000 --endpoint /v1/chat/completions \\
  --model demo --tokenizer HuggingFaceTB/SmolLM2-135M-Instruct \\
  --dataset-name random --random-input-len 32 --random-output-len 8 --num-prompts 6 --ignore-eos
"""
COMPLETIONS = CHAT.replace("openai-chat", "openai").replace("chat/completions", "completions")


def load() -> None:
    for line in (CHAT, COMPLETIONS):
        run_program(line, "--save-result", "--result-filename", "result.json")
        result = json.loads(Path("result.json").read_text())
        counts = {name: result[name] for name in ("completed", "failed", "total_output_tokens")}
        assert counts == {"completed": 6, "failed": 0, "total_output_tokens": 48}, counts


run(load)
