"""This package turns text into token ids and back: tokenizers, chat templates, and the stage that encodes prompts."""
