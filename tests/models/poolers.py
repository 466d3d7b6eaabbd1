"""Makes small models of every family, with random weights, that embed or score texts.

They are saved with a tokenizer and with the files of sentence-transformers, as published models are. What transformers
computes with them of texts, one by one, is the reference that vectors and scores are compared with.
"""

import copy
import json
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    RobertaConfig,
    XLMRobertaConfig,
)

from tests.models.decoders import SMALL, vocabulary

SMALL_VOCAB = 300
_DECODER = SMALL | {"vocab_size": SMALL_VOCAB, "max_position_embeddings": 256}
_OF_DECODERS = {"num_key_value_heads", "head_dim", "bos_token_id", "eos_token_id", "pad_token_id"}
_ENCODER = {key: value for key, value in _DECODER.items() if key not in _OF_DECODERS} | {"max_position_embeddings": 258}
_IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
_ROBERTA_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}

FAMILIES: dict[str, PreTrainedConfig] = {
    "bert": BertConfig(**_ENCODER, pad_token_id=0),
    "roberta": RobertaConfig(**_ENCODER, **_ROBERTA_IDS, type_vocab_size=1),
    "xlm-roberta": XLMRobertaConfig(**_ENCODER, **_ROBERTA_IDS, type_vocab_size=1),
    "modernbert": ModernBertConfig(
        **_ENCODER, **_IDS, local_attention=16, global_attn_every_n_layers=2, initializer_cutoff_factor=9.0
    ),
    "qwen3": Qwen3Config(**_DECODER),
    "mistral": MistralConfig(**_DECODER, sliding_window=6),
    "llama": LlamaConfig(**_DECODER),
}
ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert")


def random_pooler(config: PreTrainedConfig, task: str = "embed", *, num_labels: int = 1) -> PreTrainedModel:
    """Make a model with random weights in float32, for `embed` or `score`, with transformers' own attention."""
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    if task == "score":
        config.num_labels = num_labels
    kind: Any = AutoModel if task == "embed" else AutoModelForSequenceClassification
    model: PreTrainedModel = kind.from_config(config, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def word_tokenizer(family: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer with the special tokens of a family, for texts of letters. Most of its tokens are words."""
    is_roberta = "roberta" in family
    special = ["<s>", "<pad>", "</s>", "<unk>"] if is_roberta else ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    letters = [*ascii_lowercase, *(f"##{letter}" for letter in ascii_lowercase), " ", ".", ",", "?"]
    vocab = vocabulary([*special, *letters], vocab_size)
    unknown = "<unk>" if is_roberta else "[UNK]"
    tokenizer = RustTokenizer(models.WordPiece(vocab, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    if is_roberta:
        begin = "<s>"
        end = "</s>"
        single = "<s> $A </s>"
        pair = "<s> $A </s> </s> $B </s>"
    elif family in ("bert", "modernbert"):
        begin = "[CLS]"
        end = "[SEP]"
        single = "[CLS] $A [SEP]"
        pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    else:  # decoder-only: the end token is what is pooled
        begin = "[CLS]"
        end = "[SEP]"
        single = "$A [SEP]"
        pair = "$A $B [SEP]"
    ends = [(token, vocab[token]) for token in (begin, end)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)
    names = {"pad_token": special[1 if is_roberta else 0], "unk_token": unknown, "cls_token": begin, "sep_token": end}
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if family == "bert" else [])]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **names)


def save(
    folder: Path, family: str, model: PreTrainedModel, *, pooling: str | None = None, max_tokens: int | None = None
) -> Path:
    """Save a model and its tokenizer, with sentence-transformers' files if a mode of pooling is given."""
    model.save_pretrained(folder)
    word_tokenizer(family, model.config.vocab_size).save_pretrained(folder)
    if pooling is not None:
        size = model.config.hidden_size
        kinds = ("Transformer", "Pooling", "Normalize")
        folders = ("", "1_Pooling", "2_Normalize")
        modules = [
            {"idx": place, "name": str(place), "path": folders[place], "type": f"sentence_transformers.models.{kind}"}
            for place, kind in enumerate(kinds)
        ]
        modes = {"cls": "cls_token", **{mode: f"{mode}_tokens" for mode in ("mean", "max", "weightedmean")}}
        modes |= {mode: mode for mode in ("lasttoken", "mean_sqrt_len_tokens")}
        switches: dict[str, Any] = {f"pooling_mode_{name}": mode == pooling for mode, name in modes.items()}
        length = max_tokens or model.config.max_position_embeddings - (2 if "roberta" in family else 0)
        switches["word_embedding_dimension"] = size
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "2_Normalize").mkdir(exist_ok=True)
        files: dict[str, Any] = {
            "modules": modules,
            "1_Pooling/config": switches,
            "sentence_bert_config": {"max_seq_length": length, "do_lower_case": False},
            "config_sentence_transformers": {"prompts": {}, "default_prompt_name": None},
        }
        for name, value in files.items():
            (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@torch.inference_mode()
def vectors(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: list[str], mode: str) -> np.ndarray:
    """Return the vectors of the texts, of length 1."""
    results = []
    for text in texts:
        hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        vector = {
            "cls": hidden[0],
            "lasttoken": hidden[-1],
            "mean": hidden.mean(0),
            "max": hidden.amax(0),
            "weightedmean": sum(place * state for place, state in enumerate(hidden, 1)),
            "mean_sqrt_len_tokens": hidden.mean(0),
        }[mode]
        results.append(torch.nn.functional.normalize(vector, dim=0).numpy())
    return np.stack(results)


@torch.inference_mode()
def logits(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]) -> list[float]:
    """Return the logit of each pair."""
    return [float(model(**tokenizer(*pair, return_tensors="pt")).logits[0, 0]) for pair in pairs]
