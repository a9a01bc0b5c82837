"""Tokenizers made by tests, one for each way of putting characters together from tokens."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def llama2_tokenizer():
    """Pieces of text, and bytes for other scripts and line ends: a run of them that is no UTF-8 is spoiled as a whole."""
    pieces = [f"<0x{i:02X}>" for i in range(256)] + ["x", "▁", "▁he", "é", "▁" * 8]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    strip = decoders.Strip(content=" ", left=1)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def byte_level_tokenizer():
    """A token per byte, as GPT-2's alphabet writes them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def cleaning_tokenizer():
    """Words and marks of T5's kind; transformers takes spaces before marks out of the decoded text."""
    pieces = ["<unk>", "▁", "▁x", "x", ".", "▁.", "?", ",", "'", "▁'", "n", "▁n", "t", "s", "v", "e", "r", "m", "'s"]
    backend = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", clean_up_tokenization_spaces=True)


def wordpiece_tokenizer():
    """Words, and ends of words without a space before them."""
    pieces = ["[UNK]", "x", "##x", "he", "##é", ".", "'", "##.", "do", "n't", "##n", "t"]
    backend = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", clean_up_tokenization_spaces=True)
