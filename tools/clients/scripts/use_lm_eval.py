"""lm-eval: a task of several choices, of which it asks the log-probabilities, and one with written answers. The results
are compared with those that it gets from transformers itself, which knows no penalty of the demo's. It takes the
tokenizer from the server."""

import json
from pathlib import Path
from typing import Any

from features import HUB_ID, run, run_program

LINE = """\
lm-eval run --model local-completions --tasks capitals,sentences --include_path . \\
  --model_args model=demo,base_url=http://127.0.0.1:8000/v1/completions,tokenizer_backend=auto
"""
TRANSFORMERS = (
    f"lm-eval run --model hf --tasks capitals,sentences --include_path . --model_args pretrained={HUB_ID},dtype=float32"
)
DATA = """\
dataset_path: json
dataset_kwargs: {data_files: capitals.jsonl}
test_split: train
"""
CHOICES = f"""{DATA}
task: capitals
output_type: multiple_choice
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_choice: ["Paris", "Rome", "the city that has always been at the mouth of the river"]
doc_to_target: 0
"""
SENTENCES = f"""{DATA}
task: sentences
output_type: generate_until
doc_to_text: "Q: What is the capital of {{{{country}}}}?\\nA:"
doc_to_target: Paris
generation_kwargs: {{until: ["\\n", "."], max_gen_toks: 16, temperature: 0.0, repetition_penalty: 1.0}}
metric_list: [{{metric: exact_match}}]
"""
MOST_DIFFERENCE = 1e-3
FOLDERS = ("oaiserve", "transformers")


def loglikelihood() -> None:
    Path("capitals.yaml").write_text(CHOICES)
    Path("sentences.yaml").write_text(SENTENCES)
    lines = [json.dumps({"country": country}) for country in ("France", "Italy", "Spain", "a large country")]
    Path("capitals.jsonl").write_text("\n".join(lines))
    for line, folder in ((TRANSFORMERS, "transformers"), (LINE, "oaiserve")):
        run_program(line, "--log_samples", "--output_path", folder)
    likelihoods, expected = ([float(answer[0][0]) for answer in answers(of, "capitals")] for of in FOLDERS)
    differences = [abs(x - y) for x, y in zip(likelihoods, expected, strict=True)]
    assert len(likelihoods) == 12, likelihoods
    assert max(differences) < MOST_DIFFERENCE, f"they differ by up to {max(differences):.5f}"
    written, expected_texts = (answers(of, "sentences") for of in FOLDERS)
    assert len(written) == 4, written
    assert written == expected_texts


def answers(folder: str, task: str) -> list[Any]:
    """Return the answers of all samples of a task."""
    (path,) = Path(folder).rglob(f"samples_{task}_*.jsonl")
    samples = sorted((json.loads(sample) for sample in path.read_text().splitlines()), key=lambda each: each["doc_id"])
    return [answer for sample in samples for answer in sample["resps"]]


run(loglikelihood)
