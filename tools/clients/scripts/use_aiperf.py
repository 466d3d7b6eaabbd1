"""NVIDIA's load generator aiperf."""

import json
import os
from pathlib import Path

from features import run, run_program

LINE = """\
aiperf profile --model demo --url http://127.0.0.1:8000 --endpoint-type chat --streaming --concurrency 2 \\
  --request-count 6 --synthetic-input-tokens-mean 32 --output-tokens-mean 8 \\
  --extra-inputs ignore_eos:true --tokenizer HuggingFaceTB/SmolLM2-135M-Instruct
"""


def load() -> None:
    os.environ.pop("HF_HUB_OFFLINE", None)  # with it, aiperf takes a folder for the name of a repository
    run_program(LINE, "--artifact-dir", "artifacts", "--ui", "none")
    (path,) = Path("artifacts").rglob("profile_export_aiperf.json")
    result = json.loads(path.read_text())
    assert result["request_count"]["avg"] == 6, result["request_count"]
    assert not result.get("error_request_count"), result["error_request_count"]
    # AIPerf tokenizes the answers again, which may join two of their tokens.
    assert 6 < result["output_sequence_length"]["avg"] <= 8, result["output_sequence_length"]


run(load)
