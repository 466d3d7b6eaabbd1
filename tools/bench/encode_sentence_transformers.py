"""Encodes texts with sentence-transformers: a program for the environment that has it, without anything of ours.

Each line of its input is JSON with the files of `texts` and `vectors`; it answers with the seconds that `encode` took.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
from sentence_transformers import SentenceTransformer


def main() -> None:
    folder, threads, dtype = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": dtype}, local_files_only=True)
    print("ready", flush=True)
    for line in sys.stdin:
        files = json.loads(line)
        with open(files["texts"]) as file:
            texts = json.load(file)
        began = time.perf_counter()
        vectors = model.encode(texts, show_progress_bar=False)
        seconds = time.perf_counter() - began
        np.save(files["vectors"], np.asarray(vectors, dtype=np.float32))
        print(seconds, flush=True)


if __name__ == "__main__":
    main()
