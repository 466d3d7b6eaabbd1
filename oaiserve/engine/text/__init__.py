"""Text into token ids and back: tokenizers and chat templates."""
