"""Measures how far each way to run the model is from transformers in float32: python -m tools.bench.numerics

Each variant computes the logits of the same chunks of real text. The table has the share of positions with the
reference's most likely token, the KL divergence from the reference, and the perplexity on the text. Of a GGUF file
(--gguf), llama.cpp is a variant, too, and the second half of each chunk counts, of which its program tells the logits.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from oaiserve.config import EngineOptions, KVCacheDtype, Quantize
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.start.load import load_model
from oaiserve.engine.start.native import native_decoder
from oaiserve.engine.start.ways.quantized import load_kept
from oaiserve.engine.step import Chunk, Step
from oaiserve.files import demo
from oaiserve.files.source import find_model
from tools.bench import gguf_files
from tools.bench.llama_logits import llama_logits
from tools.markdown import as_markdown, publish

ROOT = Path(__file__).parents[2]
CHUNK_TOKENS = 512
BLOCK_SIZE = 16

Logits = Callable[[list[int]], Tensor]  # token ids to float32 [tokens, vocab]


def transformers_logits(path: Path, dtype: str) -> Logits:
    is_gguf = path.suffix == ".gguf"
    files = {"gguf_file": path.name} if is_gguf else {}
    model = AutoModelForCausalLM.from_pretrained(
        path.parent if is_gguf else path, dtype=getattr(torch, dtype), **files
    ).eval()

    def logits(ids: list[int]) -> Tensor:
        out: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        return out

    return logits


def native_logits(
    folder: Path,
    dtype: str,
    *,
    tokens_per_step: int = CHUNK_TOKENS,
    quantize: Quantize = "none",
    kv_cache_dtype: KVCacheDtype = "auto",
) -> Logits:
    """Make a variant of the native step. Steps of one token use the kernels of decoding, others those of prompts."""
    loaded = load_model(folder, dtype=dtype).with_cache(kv_cache_dtype)
    num_blocks = CHUNK_TOKENS // BLOCK_SIZE
    native = native_decoder(
        loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE, num_threads=default_threads(), quantize=quantize
    )
    return _logits_of(native, tokens_per_step)


def kept_logits(path: Path, tokens_per_step: int = CHUNK_TOKENS, quantize: Quantize = "none") -> Logits:
    """Make the native step of weights in blocks: of a GGUF file as they are, or of a folder's, quantized."""
    options = EngineOptions(block_size=BLOCK_SIZE, kv_blocks=CHUNK_TOKENS // BLOCK_SIZE, quantize=quantize)
    return _logits_of(load_kept(find_model(path), options).native, tokens_per_step)


def _logits_of(native: NativeDecoder, tokens_per_step: int) -> Logits:
    num_blocks = CHUNK_TOKENS // BLOCK_SIZE

    def logits(ids: list[int]) -> Tensor:
        sequence = Sequence("text", 0, ids, SamplingParams(), max_len=len(ids) + 1)
        sequence.blocks = list(range(num_blocks))
        parts = []
        for start in range(0, len(ids), tokens_per_step):
            chunk = Chunk(sequence, start, min(tokens_per_step, len(ids) - start))
            batch = build_batch(Step([chunk]), BLOCK_SIZE, torch.device("cpu"))
            batch.logits_rows = torch.arange(chunk.num_tokens)
            parts.append(native.forward(batch).clone())
        return torch.cat(parts)

    return logits


REFERENCE = "transformers, float32"
VARIANTS: dict[str, Callable[[Path], Logits]] = {
    "transformers, bfloat16": lambda folder: transformers_logits(folder, "bfloat16"),
    "native, bfloat16": lambda folder: native_logits(folder, "bfloat16"),
    "native, bfloat16, a token at a time": lambda folder: native_logits(folder, "bfloat16", tokens_per_step=1),
    "native, int8 weights": lambda folder: native_logits(folder, "bfloat16", quantize="int8"),
    "native, int8 KV cache": lambda folder: native_logits(folder, "bfloat16", kv_cache_dtype="int8"),
    "native, int4 weights": lambda folder: kept_logits(folder, quantize="int4"),
    "native, llama.cpp's Q4_K_M": lambda _: kept_logits(gguf_files.demo_model("Q4_K_M")),
    "native, float32": lambda folder: native_logits(folder, "float32"),
}
# Of a GGUF file. The reference has the weights of the file, expanded, in float32.
GGUF_VARIANTS: dict[str, Callable[[Path], Logits]] = {
    "native, expanded to bfloat16": lambda path: native_logits(path, "bfloat16"),
    "native, weights as in the file": kept_logits,
    "native, weights as in the file, a token at a time": lambda path: kept_logits(path, 1),
}


@dataclass(slots=True)
class Distance:
    """The measure of how the next-token distributions of a variant differ from the reference's on one chunk."""

    agreement: float  # share of the positions with the same most likely token
    divergence: float  # mean of KL(reference || variant), in nats
    loss: float  # mean negative log-likelihood of the text's own next token, in nats


def distance(reference: Tensor, logits: Tensor, ids: list[int]) -> Distance:
    expected, got = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
    nexts = torch.tensor(ids[1:])[:, None]
    return Distance(
        agreement=float((expected.argmax(-1) == got.argmax(-1)).double().mean()),
        divergence=float((expected.exp() * (expected - got)).sum(-1).mean()),
        loss=-float(got[:-1].gather(1, nexts).mean()),
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("files", nargs="*", type=Path, help="texts (default: this project's documentation)")
    add("--chunks", type=int, default=32, help=f"of {CHUNK_TOKENS} tokens, evenly over the texts (default 32)")
    add("--only", nargs="+", choices=[*VARIANTS, *GGUF_VARIANTS], help="variants (default: all)")
    add("--gguf", type=Path, help="a file of the demo model's, in place of its own weights")
    add("--json", type=Path, help="write the results there")
    add("--markdown", type=Path, help="write the table there, between the markers of numerics")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    folder = demo.resolve()
    chunks = read_chunks(folder, arguments.files or sorted((ROOT / "docs").glob("*.md")), arguments.chunks)
    of_model, path = (GGUF_VARIANTS, arguments.gguf) if arguments.gguf else (VARIANTS, folder)
    reference, counted = transformers_logits(path, "float32"), slice(None)
    variants = {REFERENCE: reference} | {name: of_model[name](path) for name in arguments.only or of_model}
    if arguments.gguf:
        text = AutoTokenizer.from_pretrained(folder).decode([token_id for ids in chunks for token_id in ids])
        theirs = llama_logits(path, text, CHUNK_TOKENS, len(chunks))
        variants["llama.cpp"] = lambda ids: theirs[tuple(ids)]
        chunks, counted = [list(ids) for ids in theirs], slice(CHUNK_TOKENS // 2, -1)
    found: dict[str, list[Distance]] = {name: [] for name in variants}
    for number, ids in enumerate(chunks, start=1):
        expected = reference(ids)
        for name, logits in variants.items():
            got = expected if name == REFERENCE else logits(ids)
            found[name].append(distance(expected[counted], got[counted], ids[counted]))
        print(f"{number} of {len(chunks)}", file=sys.stderr, flush=True)
    results = {name: summary(distances) for name, distances in found.items()}
    publish(arguments, "numerics", results, report(results, len(chunks)))


def read_chunks(folder: Path, files: list[Path], most: int) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    chunks = [ids[i : i + CHUNK_TOKENS] for i in range(0, len(ids) - CHUNK_TOKENS + 1, CHUNK_TOKENS)]
    if not chunks:
        sys.exit(f"The texts have {len(ids)} tokens, fewer than one chunk of {CHUNK_TOKENS}.")
    return [chunks[i * len(chunks) // most] for i in range(most)] if len(chunks) > most else chunks


def summary(distances: list[Distance]) -> dict[str, float]:
    rows = [asdict(row) for row in distances]
    means = {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
    return means | {"perplexity": float(torch.tensor(means["loss"]).exp())}


def report(results: dict[str, dict[str, float]], num_chunks: int) -> str:
    rows = [["", "same most likely token", "KL divergence, nats", "perplexity"]]
    for name, row in results.items():
        same = "" if name == REFERENCE else f"{row['agreement']:.2%}"
        divergence = "" if name == REFERENCE else f"{row['divergence']:.2e}"
        rows.append([name, same, divergence, f"{row['perplexity']:.3f}"])
    head = f"{num_chunks} chunks of {CHUNK_TOKENS} tokens:"
    return "\n".join([head, "", *as_markdown(rows)])


if __name__ == "__main__":
    main()
