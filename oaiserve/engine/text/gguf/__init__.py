"""Tokenizers of GGUF files, which have a vocabulary and some settings in their metadata, but no tokenizer.json."""
