"""Pads the size of a model's head, so that each row of logits on a GPU begins at an aligned address.

With an odd vocabulary size, such as GPT-2's 50,257, matrix products would write unaligned rows number by number. A
model's logits are a view without the padding.
"""

ALIGNMENT = 64  # rows: 128 bytes of logits in bfloat16


def aligned(vocab_size: int) -> int:
    return -(-vocab_size // ALIGNMENT) * ALIGNMENT
