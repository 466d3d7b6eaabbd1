"""Trains an EAGLE-3 draft head for a Llama-like model on texts that the model itself writes, on a CPU.

    python -m tools.train_head texts TEXTS.jsonl [--seconds 600]
    python -m tools.train_head train TEXTS.jsonl FOLDER [--seconds 1200]

The head learns the model's own distribution of the token after the next one (soft targets), from the hidden states
before three layers, and then from its own output in place of these, as it drafts. A FOLDER's head is trained further.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import rotate_half

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.request import SamplingParams
from oaiserve.files import demo

FORMS = {
    "chat": ["What is {}? Explain it simply.", "Give me five tips about {}.", "How do I begin with {}?"],
    "story": ["Write a short story about {}.", "Write a letter to a friend about {}."],
    "code": ["Write a Python function about {}, with a docstring.", "Write a Python class that models {}."],
    "facts": ["List ten facts about {}.", "Summarize the history of {} in three paragraphs."],
    "data": ["Return a JSON object with five fields that describes {}.", "Make a table in Markdown about {}."],
}
TOPICS = [
    *("gardening", "the moon", "chess", "bread", "volcanoes", "a library", "bicycles", "the ocean", "bank accounts"),
    *("sorting", "photography", "rivers", "the Roman Empire", "electric cars", "sleep", "music theory", "coffee"),
    *("bridges", "dinosaurs", "a weather station", "prime numbers", "running", "paintings", "mountains", "a school"),
]
HELD_OUT = TOPICS[::8]  # for measuring the head
STEPS, STEP_WEIGHT = 2, 0.8  # of the training-time test
DRAFT_VOCAB, RATE = 4096, 1e-3
BATCH = 4  # sequences
MOST_TEXTS = 400  # whose hidden states are computed once, and kept in memory


def write_texts(file: Path, seconds: float) -> None:
    """Write the prompt and the answer of each request, as ids, half of them greedy."""
    rng, began = random.Random(1), time.monotonic()
    topics = [topic for topic in TOPICS if topic not in HELD_OUT]
    forms = [form for of_kind in FORMS.values() for form in of_kind]
    chats = [[{"role": "user", "content": form.format(topic)}] for form in forms for topic in topics]
    rng.shuffle(chats)
    folder = demo.resolve()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = EngineOptions(device="cpu", drafts="off", max_running=64)
    with Engine.from_pretrained(folder, options) as engine, file.open("w") as out:
        while chats and time.monotonic() - began < seconds:
            asked, chats = chats[:64], chats[64:]
            ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in asked]
            params = SamplingParams(max_tokens=256, temperature=0.7 * (len(chats) // 64 % 2), seed=len(chats))
            for prompt, answer in zip(ids, engine.generate(ids, params), strict=True):
                out.write(json.dumps([prompt, answer.token_ids]) + "\n")


class Head(torch.nn.Module):
    """The head with the names of public checkpoints. It begins as the model's last layer, behind the last features."""

    def __init__(self, model: Any, ids: Tensor, stored: dict[str, Tensor]) -> None:
        super().__init__()
        config, last = model.config, model.model.layers[-1]
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.epsilon, self.width = config.rms_norm_eps, config.hidden_size
        start = {f"midlayer.{name}": weight for name, weight in last.state_dict().items()}
        for name in ("q_proj", "k_proj", "v_proj"):
            of_hidden = start[f"midlayer.self_attn.{name}.weight"]
            start[f"midlayer.self_attn.{name}.weight"] = torch.cat([torch.zeros_like(of_hidden), of_hidden], dim=1)
        start["midlayer.hidden_norm.weight"] = start["midlayer.input_layernorm.weight"]
        start["fc.weight"] = torch.cat([torch.zeros(self.width, 2 * self.width), torch.eye(self.width)], dim=1)
        start["norm.weight"] = model.model.norm.weight
        start["lm_head.weight"] = model.lm_head.weight[ids]
        for name, weight in start.items():
            own = torch.nn.Parameter(stored.get(name, weight).detach().float().clone())
            self.register_parameter(name.replace(".", "/"), own)

    def weight(self, name: str) -> Tensor:
        return getattr(self, f"{name}.weight".replace(".", "/"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (self.width,), self.weight(name), self.epsilon)

    def layer(
        self, embedded: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], before: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return the output [B, T, width] of pass number len(before), whose keys and values are added to `before`.

        A token attends to the first pass up to where its chain of guesses began, and to the chain.
        """
        x = torch.cat([self.norm("midlayer.input_layernorm", embedded), self.norm("midlayer.hidden_norm", hidden)], -1)
        queries, keys, values = (
            F.linear(x, self.weight(f"midlayer.self_attn.{name}_proj")).unflatten(-1, (count, -1)).transpose(1, 2)
            for name, count in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        queries, keys = (one * rotary[0] + rotate_half(one) * rotary[1] for one in (queries, keys))
        groups = self.heads // self.kv_heads
        before.append((keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)))
        number, length = len(before) - 1, x.shape[1]
        scale = queries.shape[-1] ** -0.5
        seen = torch.ones(length, length, dtype=torch.bool).tril(-number)
        scores = [(queries @ before[0][0].mT * scale).float().masked_fill(~seen, -1e9)]
        of_chain = [tuple(one.roll(number - step, 2) for one in before[step]) for step in range(1, number + 1)]
        scores += [((queries * key).sum(-1, keepdim=True) * scale).float() for key, _ in of_chain]
        shares = torch.cat(scores, -1).softmax(-1).to(queries.dtype)
        mixed = shares[..., :length] @ before[0][1]
        for step, (_, value) in enumerate(of_chain):
            mixed = mixed + shares[..., length + step, None] * value
        out = hidden + F.linear(mixed.transpose(1, 2).flatten(2), self.weight("midlayer.self_attn.o_proj"))
        y = self.norm("midlayer.post_attention_layernorm", out)
        gate, up = (F.linear(y, self.weight(f"midlayer.mlp.{name}_proj")) for name in ("gate", "up"))
        return out + F.linear(F.silu(gate) * up, self.weight("midlayer.mlp.down_proj"))


def train(file: Path, folder: Path, seconds: float) -> None:
    began, rng = time.monotonic(), random.Random(2)
    model = AutoModelForCausalLM.from_pretrained(demo.resolve(), dtype=torch.bfloat16)
    texts = [json.loads(line) for line in file.read_text().splitlines()][:MOST_TEXTS]
    counts = Counter(token_id for _, answer in texts for token_id in answer)
    ids = torch.tensor(sorted([token_id for token_id, _ in counts.most_common(DRAFT_VOCAB)]))
    stored = load_file(folder / "model.safetensors") if (folder / "model.safetensors").exists() else {}
    ids = stored["d2t"] + torch.arange(len(stored["d2t"])) if stored else ids
    head = Head(model, ids, stored)
    layers = (2, model.config.num_hidden_layers // 2, model.config.num_hidden_layers - 1)
    known: dict[int, tuple[Tensor, Tensor]] = {}  # features and last hidden states of a text
    optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    number, order = 0, []
    while (share := (time.monotonic() - began) / seconds) < 1:
        optimizer.param_groups[0]["lr"] = RATE * min(1, (number + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * share))
        if len(order) < BATCH:
            order = rng.sample(range(len(texts)), len(texts))
        batch, order = order[:BATCH], order[BATCH:]
        with torch.no_grad():
            for index in batch:
                if index not in known:
                    prompt, answer = texts[index]
                    states = model(torch.tensor([prompt + answer]), output_hidden_states=True).hidden_states
                    known[index] = (torch.cat([states[layer] for layer in layers], -1)[0], states[-1][0])
        tokens, features, last = (
            torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
            for rows in zip(*((torch.tensor(texts[i][0] + texts[i][1]), *known[i]) for i in batch), strict=True)
        )
        counted = torch.zeros_like(tokens[:, 1:], dtype=torch.bool)  # behind which the next token is one of an answer
        for row, index in enumerate(batch):
            prompt, answer = texts[index]
            counted[row, len(prompt) - 2 : len(prompt) + len(answer) - 2] = True
        with torch.autocast("cpu", torch.bfloat16):
            positions = torch.arange(tokens.shape[1] - 1)[None]
            rotary = tuple(one[:, None] for one in model.model.rotary_emb(features.float(), positions))
            embedded = model.model.embed_tokens(tokens[:, 1:]).detach()
            hidden = F.linear(features[:, :-1], head.weight("fc"))
            wanted = (last[:, 1:][counted] @ model.lm_head.weight[ids].detach().T).float().softmax(-1)
            loss, before, right = torch.zeros(()), [], []
            for step in range(STEPS):
                hidden = head.layer(embedded, hidden, rotary, before)
                logits = F.linear(head.norm("norm", hidden[counted]), head.weight("lm_head")).float()
                loss = loss - STEP_WEIGHT**step * (wanted * logits.log_softmax(-1)).sum(-1).mean()
                right.append((logits.argmax(-1) == wanted.argmax(-1)).float().mean().item())
                hidden = F.pad(hidden[:, :-1], (0, 0, 1, 0))  # the next pass reads that of the token before
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        number += 1
        if number % 25 == 0:
            print(f"{number} steps, {share:.0%} of the time: loss {loss:.3f}, right {right}", flush=True)
            save(head, model.config, ids, layers, folder)
    save(head, model.config, ids, layers, folder)


def save(head: Head, config: Any, ids: Tensor, layers: tuple[int, ...], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name.replace("/", "."): one.detach().bfloat16() for name, one in head.named_parameters()}
    of_model = torch.zeros(config.vocab_size, dtype=torch.bool)
    of_model[ids] = True
    save_file(tensors | {"d2t": ids - torch.arange(len(ids)), "t2d": of_model}, folder / "model.safetensors")
    own = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": len(ids)}
    own |= {"eagle_aux_hidden_state_layer_ids": layers}
    (folder / "config.json").write_text(json.dumps(json.loads(config.to_json_string()) | own, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=["texts", "train"])
    parser.add_argument("texts", type=Path)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("head"))
    parser.add_argument("--seconds", type=float, default=1200)
    args = parser.parse_args()
    write_texts(args.texts, args.seconds) if args.do == "texts" else train(args.texts, args.folder, args.seconds)
