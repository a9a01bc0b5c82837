"""The corpus of the embedded target: read source, split, tokenise and pack it (for assets/make/make_stdlib_coder.py).

The tokenizer, a byte-level BPE with three special tokens, is trained only on the training side.
"""

import platform
import random
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headstart.train.data.packed.packing import PackedRows, pack
from headstart.train.data.stdlib_pairs import Pair, Source, package_pairs, split_pairs, stdlib_source_pairs

SPECIAL_TOKENS = ("<|user|>", "<|assistant|>", "<|end|>")  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MAX_PROMPT_TOKENS = 200  # of the held-out prompts that ship


@dataclass(frozen=True)
class HeldOut:
    """Functions of held-out modules, packed, and their size in bytes of UTF-8."""

    rows: PackedRows
    num_pairs: int
    answer_bytes: int
    whole_bytes: int


@dataclass(frozen=True)
class Corpus:
    tokenizer: Tokenizer
    first: PackedRows  # rows of the first phase of training
    final: PackedRows  # rows of the final phase: documented pairs only
    num_pairs: int
    heldout: dict[str, HeldOut]
    heldout_pairs: list[Pair]  # documented ones of the standard library, with short enough prompts
    sources: list[Source]


def build_corpus(recipe) -> Corpus:
    """Read, split, train the tokenizer, encode and pack. Raises ValueError if there is too little source."""
    pairs = {"the standard library": stdlib_source_pairs(further=True)}
    sources = [Source("Python standard library", platform.python_version(), "PSF-2.0")]
    if recipe.packages:
        pairs["packages"], found = package_pairs(further=True, workers=recipe.workers or None)
        sources += found
    # Split all at once: a function held out of one source must not come back through a copy in another.
    train, heldout = split_pairs(pair for group in pairs.values() for pair in group)
    heldout = [pair for pair in heldout if pair.documented and is_plain(pair)]
    train = [pair for pair in train if (pair.documented or recipe.further) and is_plain(pair)]
    random.Random(recipe.seed).shuffle(train)
    train = train[: recipe.max_pairs or None]
    documented = [pair for pair in train if pair.documented]
    if len(documented) < 500 or len(heldout) < 20:
        raise ValueError(
            f"only {len(documented)} documented functions to train on and {len(heldout)} to test on were found (at least "
            "500 and 20 are needed): use a Python with its source files and some packages installed"
        )
    tokenizer = train_tokenizer(train, recipe.vocab_size)
    encoded = encode(tokenizer, train)
    if recipe.documents:
        first = pack(encoded, recipe.row_length)
        final = pack([e for e, pair in zip(encoded, train) if pair.documented], recipe.row_length)
    else:
        first = final = concatenate(encoded, recipe.row_length)
    in_stdlib = {pair.module for pair in pairs["the standard library"]}
    held = {}
    for name in pairs:
        group = [pair for pair in heldout if (pair.module in in_stdlib) == (name == "the standard library")]
        # Bytes are comparable between runs only for functions that fit whole into a row, whatever the tokenizer.
        group = [pair for pair in group if len(pair.prompt) + len(pair.answer) <= 2 * recipe.row_length]
        texts = encode(tokenizer, group)
        kept = [i for i, (ids, _) in enumerate(texts) if len(ids) <= recipe.row_length]
        if kept:
            answer_bytes = sum(len(group[i].answer.encode()) for i in kept)
            whole_bytes = answer_bytes + sum(len(group[i].prompt.encode()) for i in kept)
            held[name] = HeldOut(
                pack([texts[i] for i in kept], recipe.row_length), len(kept), answer_bytes, whole_bytes
            )
        if name == "the standard library":
            prompt_tokens = [int(marks.argmax()) for _, marks in texts]
            shipped = [group[i] for i in kept if prompt_tokens[i] <= MAX_PROMPT_TOKENS]
    return Corpus(tokenizer, first, final, len(train), held, shipped, sources)


def is_plain(pair: Pair) -> bool:
    """Whether the pair has no text that the tokenizer would read as a special token."""
    return not any(token in pair.prompt or token in pair.answer for token in SPECIAL_TOKENS)


def train_tokenizer(pairs: list[Pair], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # 100 000 pairs are enough for 6144 tokens.
    tokenizer.train_from_iterator((text for p in pairs[:100_000] for text in (p.prompt, p.answer)), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, pairs: list[Pair]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids, supervised) of each pair, as CHAT_TEMPLATE renders it."""
    encoded = []
    for start in range(0, len(pairs), 8192):
        batch = pairs[start : start + 8192]
        prompts = tokenizer.encode_batch_fast([pair.prompt for pair in batch])
        answers = tokenizer.encode_batch_fast([pair.answer for pair in batch])
        for prompt, answer in zip(prompts, answers):
            ids = np.array([0, *prompt.ids, 1, *answer.ids, 2], dtype=np.int16)
            encoded.append((ids, np.arange(len(ids)) >= len(prompt.ids) + 2))
    return encoded


def concatenate(encoded, length: int) -> PackedRows:
    """Rows cut from one long text; attention and pairs run across whatever falls into a row."""
    ids = torch.from_numpy(np.concatenate([ids for ids, _ in encoded])).long()
    marks = torch.from_numpy(np.concatenate([marks for _, marks in encoded]))
    end = len(ids) // length * length
    ids, marks = ids[:end].view(-1, length), marks[:end].view(-1, length)
    return PackedRows(ids, torch.arange(length).expand_as(ids), torch.zeros_like(ids), marks)
