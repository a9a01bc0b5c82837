"""What the target learns and is asked: Python functions with docstrings, and mathematics; what is held out of both.

Held out are whole modules, and conversations of mathematics by a hash of their question, so all seeds are measured on the same
prompts. Nothing held out, prompt or answer, enters the tokenizer, the training or the answers.
"""

import hashlib
import os
import platform
import random
from dataclasses import replace

import torch

from ...train.data.conversations import load_conversations, write_conversations
from ...train.data.packed.packing import pack
from ...train.data.stdlib_pairs import Pair, Source, package_pairs, split_pairs, stdlib_source_pairs

CODE, MATHEMATICS = SUBJECTS = ("code", "mathematics")
LEAST_PAIRS = 100  # of code to train on
MOST_WORKERS = 16  # that parse source; each imports torch first
MOST_PROMPT_BYTES = 600  # of a measured prompt: about 200 tokens


def build_corpus(settings, work, make):
    """The corpus as assets/make trains on it. Writes the prompts to answer, the held-out conversations and the packed rows.

    make: the modules of assets/make (see target.py). ValueError if there is too little to train on or to hold out.
    """
    code, heldout_code, sources = read_code(settings, make.corpus.is_plain)
    mathematics, heldout_mathematics = read_mathematics(settings, make.corpus.is_plain)
    groups = {CODE: heldout_code, MATHEMATICS: heldout_mathematics}
    dice = random.Random(settings.seed)
    train = code + mathematics * settings.math_repeats
    dice.shuffle(train)
    tokenizer = make.corpus.train_tokenizer(train, settings.vocab_size)
    rows = pack(make.corpus.encode(tokenizer, train), settings.row_length)
    measured, kept = {}, []
    for subject, pairs in groups.items():
        measured[subject] = measure_size(pairs, tokenizer, settings, make)
        asked = [pair for pair in pairs if len(pair.prompt.encode()) <= MOST_PROMPT_BYTES]
        needed = settings.rate_prompts + settings.prompts
        if len(asked) < needed:
            raise ValueError(
                f"{needed} prompts of {subject} are to be measured and {len(asked)} are held out: lower --rate-prompts, --prompts"
                + (", or raise --math-test" if subject == MATHEMATICS else ", or install packages with more functions")
            )
        write_conversations(work.heldout(subject), [pair.conversation() for pair in asked[:needed]])
        kept += asked[:needed]
    asked = [pair for pair in code if pair.documented] + mathematics * settings.math_repeats
    dice.shuffle(asked)
    write_conversations(work.prompts, [pair.conversation()[:1] for pair in asked[: settings.num_answers]])
    stored = {
        "input_ids": rows.input_ids.short(),
        "document_ids": rows.document_ids.int(),
        "supervised": rows.supervised,
    }
    torch.save(stored, work.rows)
    return make.corpus.Corpus(tokenizer, rows, rows, len(train), measured, kept, sources)


def read_code(settings, is_plain):
    """(pairs to train on, held-out pairs in the order of a hash, packages) of the Python source here."""
    pairs = stdlib_source_pairs(further=True)
    sources = [Source("Python standard library", platform.python_version(), "PSF-2.0")]
    if settings.packages:
        found, packages = package_pairs(further=True, workers=min(os.cpu_count() or 1, MOST_WORKERS))
        pairs, sources = pairs + found, sources + packages
    train, heldout = split_pairs(pairs)
    # Functions of other bodies may have the same docstring, and so the same prompt.
    heldout = {pair.prompt: pair for pair in heldout if pair.documented and is_plain(pair)}
    train = [pair for pair in train if is_plain(pair) and pair.prompt not in heldout]
    if settings.max_pairs:  # the documented ones first: only they are asked for
        train = sorted(train, key=lambda pair: (not pair.documented, order(pair)))[: settings.max_pairs]
    if len(train) < LEAST_PAIRS:
        raise ValueError(
            f"only {len(train)} functions to train on were found, at least {LEAST_PAIRS} are needed: use a Python with its source"
        )
    return train, sorted(heldout.values(), key=order), sources


def read_mathematics(settings, is_plain):
    """(pairs to train on, held-out pairs in the order of a hash) of the file of `--math`."""
    pairs = {}
    for messages in load_conversations(settings.math, with_fields=False):
        (_, question), (_, answer) = ((one["role"], one["content"]) for one in messages[-2:])
        pair = Pair(MATHEMATICS, "", question, answer, True)
        if is_plain(pair):
            pairs.setdefault(question, pair)
    found = sorted(pairs.values(), key=order)
    if len(found) < 2 * settings.math_test:
        raise ValueError(
            f"{settings.math} holds {len(found)} conversations, and --math-test {settings.math_test} are held out: at least "
            "twice as many are needed"
        )
    if settings.max_pairs:
        found = found[: settings.math_test + settings.max_pairs]
    return found[settings.math_test :], found[: settings.math_test]


def order(pair):
    """The place of a pair in an order that has nothing to do with what it says, the same for all seeds and machines."""
    return hashlib.sha256(pair.prompt.encode()).digest()


def measure_size(pairs, tokenizer, settings, make):
    """The first held-out pairs, packed to be measured, with their bytes."""
    # Bytes are comparable between runs only for texts that fit whole into a row.
    fitting = [pair for pair in pairs if len(pair.prompt) + len(pair.answer) <= 2 * settings.row_length]
    fitting = fitting[: settings.heldout_pairs]
    texts = make.corpus.encode(tokenizer, fitting)
    kept = [i for i, (ids, _) in enumerate(texts) if len(ids) <= settings.row_length]
    answer_bytes = sum(len(fitting[i].answer.encode()) for i in kept)
    whole_bytes = answer_bytes + sum(len(fitting[i].prompt.encode()) for i in kept)
    rows = pack([texts[i] for i in kept], settings.row_length)
    # In the dtype of the rows that are trained on: with another one the loss is compiled again, while the clock of training runs.
    rows = replace(rows, document_ids=rows.document_ids.int())
    return make.corpus.HeldOut(rows, len(kept), answer_bytes, whole_bytes)
