"""The load generator guidellm."""

import json
from pathlib import Path

from features import run, run_program

LINE = """\
guidellm run --backend kind=openai_http,target=http://127.0.0.1:8000 --profile kind=concurrent,streams=2 \\
  --constraint kind=max_requests,count=6 --data kind=synthetic_text,prompt_tokens=32,output_tokens=8 \\
  --tokenizer kind=huggingface_auto,model=HuggingFaceTB/SmolLM2-135M-Instruct --output kind=json,path=result.json
"""


def load() -> None:
    run_program(LINE, "--disable-console-interactive")
    (benchmark,) = json.loads(Path("result.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0), totals
    assert all(request["output_tokens"] == 8 for request in benchmark["requests"]["successful"])


run(load)
