"""What transformers itself computes of texts, one by one: the reference that vectors and scores are compared with."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast


@torch.inference_mode()
def vectors(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: list[str], mode: str) -> np.ndarray:
    """Return the vectors of the texts, of length 1."""
    found = []
    for text in texts:
        hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        vector = {"cls": hidden[0], "lasttoken": hidden[-1], "mean": hidden.mean(0), "max": hidden.amax(0)}[mode]
        found.append(torch.nn.functional.normalize(vector, dim=0).numpy())
    return np.stack(found)


@torch.inference_mode()
def logits(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]) -> list[float]:
    """Return the logit of each pair."""
    return [float(model(**tokenizer(*pair, return_tensors="pt")).logits[0, 0]) for pair in pairs]
