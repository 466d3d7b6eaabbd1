"""lm-eval: a task of several choices, of which it asks the log-probabilities. They are compared with those that it gets
from transformers itself."""

import json
from pathlib import Path

from features import HUB_ID, run, run_program

LINE = """\
lm-eval run --model local-completions --tasks capitals --include_path . \\
  --model_args model=demo,base_url=http://127.0.0.1:8000/v1/completions,\\
tokenizer_backend=huggingface,tokenizer=HuggingFaceTB/SmolLM2-135M-Instruct
"""
TRANSFORMERS = (
    f"lm-eval run --model hf --tasks capitals --include_path . --model_args pretrained={HUB_ID},dtype=float32"
)
TASK = """\
task: capitals
dataset_path: json
dataset_kwargs: {data_files: capitals.jsonl}
test_split: train
output_type: multiple_choice
doc_to_text: "The capital of {{country}} is"
doc_to_choice: ["Paris", "Rome", "the city that has always been at the mouth of the river"]
doc_to_target: 0
"""
MOST_DIFFERENCE = 1e-3


def loglikelihood() -> None:
    Path("capitals.yaml").write_text(TASK)
    lines = [json.dumps({"country": country}) for country in ("France", "Italy", "Spain", "a large country")]
    Path("capitals.jsonl").write_text("\n".join(lines))
    expected = values(TRANSFORMERS, "transformers")
    found = values(LINE, "oaiserve")
    differences = [abs(x - y) for x, y in zip(found, expected, strict=True)]
    assert len(found) == 12, found
    assert max(differences) < MOST_DIFFERENCE, f"they differ by up to {max(differences):.5f}"


def values(line: str, folder: str) -> list[float]:
    run_program(line, "--log_samples", "--output_path", folder)
    (path,) = Path(folder).rglob("samples_capitals_*.jsonl")
    samples = sorted((json.loads(sample) for sample in path.read_text().splitlines()), key=lambda each: each["doc_id"])
    return [float(answer[0][0]) for sample in samples for answer in sample["resps"]]


run(loglikelihood)
