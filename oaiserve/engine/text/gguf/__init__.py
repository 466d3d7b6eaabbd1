"""Tokenizers of GGUF files, whose metadata contain a vocabulary and some settings, but no tokenizer.json."""
