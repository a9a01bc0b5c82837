"""Rank of a token among all tokens of its row, likeliest first.

    rank[m] = 1 + |{v: x[m, v] > x[m, t]}| + |{v < t: x[m, v] = x[m, t]}|,   t = tokens[m]       [M, V], [M] -> [M]

The order is that of top_tokens (sample.py): ties go to the lowest id, NaN counts as minus infinity, minus zero equals zero. So
token top_tokens(x, W)[m, i] has rank i + 1. Where nothing ties, the rank is the number of tokens at least as likely as t.
Counts are integers, so neither the order of counting nor other rows can change a result.

Letters: M rows, V vocabulary, C chunks.
"""

import torch

from ..jit import jit, on_triton, tl, triton
from .sample import check_rows

_CHUNK = 4096  # tokens per program


def rank_tokens_reference(logits, tokens):
    """The formula.  [M, V], [M] -> int64 [M]"""
    tokens = tokens.long()[:, None]
    scores = logits.masked_fill(logits.isnan(), -torch.inf)
    value = scores.gather(1, tokens)
    lower = torch.arange(scores.shape[1], device=scores.device) < tokens
    return 1 + ((scores > value) | ((scores == value) & lower)).sum(1)


@jit(do_not_specialize=["num_chunks"])
def _count_before(logits, tokens, counts, vocab_size, num_chunks, CHUNK: tl.constexpr):
    """Count the tokens of one chunk of one row that rank before the row's token.  -> counts [M, C]"""
    pid = tl.program_id(0)
    row, chunk = (pid // num_chunks).to(tl.int64), pid % num_chunks
    ranked = tl.load(tokens + row).to(tl.int64)
    value = tl.load(logits + row * vocab_size + ranked).to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocab_size
    x = tl.load(logits + row * vocab_size + token, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    before = (x > value) | ((x == value) & (token < ranked))
    tl.store(counts + pid, tl.sum((before & inside).to(tl.int32), 0))


def rank_tokens(logits, tokens):
    """Rank of tokens[m] in row m, from 1.  logits [M, V], tokens [M] integers from 0 to V - 1 (not checked) -> int64 [M]

    Raises ValueError for shapes that do not fit.
    """
    check_rows("rank_tokens", logits, tokens)
    if not on_triton(logits):
        return rank_tokens_reference(logits, tokens)
    rows, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, _CHUNK)
    counts = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    if rows:
        _count_before[(rows * chunks,)](
            logits.contiguous(), tokens.contiguous(), counts, vocab_size, chunks, _CHUNK, num_warps=4
        )
    return 1 + counts.sum(1)
