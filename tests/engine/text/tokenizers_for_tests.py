"""Small tokenizers of the kinds that models come with, built in memory: one function per kind."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def _special(*contents: str) -> list[AddedToken]:
    return [AddedToken(content, special=True, normalized=False) for content in contents]


def byte_level() -> Tokenizer:
    """Like GPT-2's: ids 0 to 255 are single bytes, then merges, three special tokens and two ordinary added ones."""
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ã", "©"), ("â", "Ĥ"), ("o", "r")]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(_special(*SPECIALS))
    tokenizer.add_tokens(["two words", "naïve € token"])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Like Llama 2's: a space before the text, byte fallback, `<s>` in front; an added token of its own."""
    letters = ["▁", *"helowrd", "é"]
    merges = [("▁", "h"), ("l", "l"), ("▁", "▁")]
    pieces = [*letters, *(left + right for left, right in merges)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_tokens(_special("<unk>", "<s>", "</s>"))
    tokenizer.add_tokens(["[tool ▁call]"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace() -> Tokenizer:
    """Sentencepiece's older form: the decoder drops all the spaces of the first token."""
    tokens = ["<unk>", "</s>", "▁", "▁he", "llo", "▁▁wor", "ld", "é"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_tokens(_special("</s>"))
    return tokenizer


def wordpiece() -> Tokenizer:
    """Like BERT's: its decoder joins words with spaces and has no bytes."""
    tokens = ["[UNK]", "[CLS]", "[SEP]", "hello", "wor", "##ld", "##s", ".", ",", "é", "don", "'", "t", "n't"]
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_tokens(_special("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer
