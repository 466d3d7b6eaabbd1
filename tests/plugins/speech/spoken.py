"""Sounds, results of windows, and a small random Whisper with a vocabulary of bytes, that tests of speech share."""

import io
import math
import wave
from pathlib import Path

import numpy as np

from oaiserve.plugins.speech.tokens import RATE, SpokenToken, WindowText

SPECIAL = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|ja|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)
IDS = {name: 256 + index for index, name in enumerate(SPECIAL)}
FIRST_TIME = 256 + len(SPECIAL)
VOCAB_SIZE = FIRST_TIME + 1501


def wav(seconds: float, rate: int = RATE, channels: int = 1, hertz: float = 440.0) -> bytes:
    """Return a sound as a file."""
    times = np.arange(round(seconds * rate)) / rate
    samples = np.repeat((np.sin(2 * math.pi * hertz * times) * 8000).astype("<i2")[:, None], channels, axis=1)
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(channels)
        written.setsampwidth(2)
        written.setframerate(rate)
        written.writeframes(samples.tobytes())
    return file.getvalue()


def timed(text: str, start: float, end: float) -> list[SpokenToken]:
    """Return the tokens of a segment, whose characters are spoken one after the other."""
    step = (end - start) / len(text)
    spoken = [
        SpokenToken(ord(each), start + step * index, start + step * (index + 1), each.encode())
        for index, each in enumerate(text)
    ]
    return [at(start), *spoken, at(end)]


def at(seconds: float) -> SpokenToken:
    return SpokenToken(FIRST_TIME + round(seconds * 50))


def window(*tokens: SpokenToken, language: str = "<|en|>") -> list[float]:
    return list(WindowText(IDS[language], 0.0, -0.25, 0.125, tokens).as_floats())


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer in which each byte is a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(f"<|{index / 50:.2f}|>") for index in range(1501)])
    tokenizer.save(str(folder / "tokenizer.json"))


def write_whisper(folder: Path, *, has_languages: bool = True) -> Path:
    """Write a Whisper with random weights, which says something with certainty."""
    import torch
    from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    torch.manual_seed(5)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), IDS["<|endoftext|>"])
    config = WhisperConfig(
        vocab_size=VOCAB_SIZE,
        d_model=16,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_mel_bins=8,
        max_target_positions=48,
        decoder_start_token_id=IDS["<|startoftranscript|>"],
        architectures=["WhisperForConditionalGeneration"],
        **ends,
    )
    model = WhisperForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20.0)
        for layer in model.model.decoder.layers:  # Attention to the sound is spread over it, as in trained models.
            layer.encoder_attn.q_proj.weight.mul_(0.02)
    languages = {name: IDS[name] for name in ("<|en|>", "<|de|>", "<|ja|>")}
    model.generation_config = GenerationConfig(
        no_timestamps_token_id=IDS["<|notimestamps|>"],
        alignment_heads=[[0, 1], [1, 0]],
        suppress_tokens=[7, IDS["<|startoftranscript|>"]],
        begin_suppress_tokens=[32, IDS["<|endoftext|>"]],
        max_initial_timestamp_index=50,
        is_multilingual=has_languages,
        decoder_start_token_id=config.decoder_start_token_id,
        lang_to_id=languages if has_languages else None,
        task_to_id={"transcribe": IDS["<|transcribe|>"], "translate": IDS["<|translate|>"]},
        max_length=48,
        **ends,
    )
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=8).save_pretrained(folder)
    write_tokenizer(folder)
    return folder
