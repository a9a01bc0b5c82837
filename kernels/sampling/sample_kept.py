"""A draw from the tokens that min-p, top-k and top-p keep: sample.sample_tokens on kept_scores, equal bit by bit.

Noise is made for the kept tokens only.

Letters: M rows, V vocabulary.
"""

import torch

from ..jit import jit, on_triton, tl, triton
from .best_token import key_of
from .keep_top import LOWEST_KEY, kept_scores
from .lowest_key import scores_at
from .philox import TARGET_NOISE, chunk_words, gumbel_of_word, token_words
from .sample import _merge_best, check_rows, sample_tokens

_PARTS = 16  # programs per row; more than one helps where many tokens are kept
_BLOCK = 1024  # tokens that a program loads at once


@jit
def _best(score, token):
    """The highest key; a `score` is minus infinity where there is no token."""
    highest = tl.max(score, 0)
    return key_of(highest, tl.min(tl.where(score == highest, token, 0x7FFFFFFF), 0))


@jit(do_not_specialize_on_alignment=["temperature", "seed", "sample", "position"])
def _draw(
    logits, temperature, tokens, count, seed, sample, position, keys, vocab_size,
    PURPOSE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """The best of one part of a row's tokens.  -> keys [M, PARTS]"""
    row, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    heat = tl.load(temperature + row).to(tl.float32)
    seed_, sample_ = tl.load(seed + row).to(tl.int64), tl.load(sample + row).to(tl.int64)
    position_ = tl.load(position + row).to(tl.int64)
    left = tl.load(count + row)
    divisor = tl.where(heat > 0, heat, 1.0)
    best = row * 0 + LOWEST
    for start in range(part * BLOCK, left, PARTS * BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < left
        if left == vocab_size:
            token, words = i, chunk_words(start, seed_, sample_, position_, PURPOSE, BLOCK)
        else:
            token = tl.load(tokens + row * vocab_size + i, mask=inside, other=0)
            words = token_words(token, seed_, sample_, position_, PURPOSE)
        score = scores_at(logits + row * vocab_size, token, inside, divisor)
        if heat > 0:
            score += gumbel_of_word(words)
        best = tl.maximum(best, _best(score, tl.where(inside, token, 0x7FFFFFFF)))
    tl.store(keys + row * PARTS + part, best)


def sample_kept(kept, seed, sample, position):
    """A token of every row of a keep_top.Kept, drawn with the noise of seed, sample and position [M].  -> int64 [M]

    Raises ValueError for shapes that do not fit.
    """
    logits, temperature = kept.logits, kept.temperature
    check_rows("sample_kept", logits, temperature, seed, sample, position)
    if not on_triton(logits):
        # The scores are divided by the temperature already; here 1 asks for noise and 0 for none.
        return sample_tokens(kept_scores(kept), (temperature > 0).float(), seed, sample, position)
    rows, vocab_size = logits.shape
    keys = torch.empty(rows, _PARTS, dtype=torch.int64, device=logits.device)
    found = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        keyed = (x.contiguous() for x in (seed, sample, position))
        _draw[(rows * _PARTS,)](
            logits, temperature, kept.tokens, kept.count, *keyed, keys, vocab_size, TARGET_NOISE, _PARTS, _BLOCK,
            LOWEST_KEY, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        _merge_best[(rows,)](keys, found, None, _PARTS, 1, False, triton.next_power_of_2(_PARTS), num_warps=1)
    return found
