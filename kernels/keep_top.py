"""Min-p, top-k and top-p: the scores of a law from which unlikely tokens are left out.

    scale           logits / T                                                                 [M, V] -> fp32 [M, V]
    keep_top        the same, minus infinity for what min-p, top-k and top-p leave out         [M, V] -> fp32 [M, V]

Exact: rows are sorted, likeliest first, ties by the lowest id. Min-p keeps tokens at least min_p times as likely as the likeliest.
Of what min-p and top-k left, those tokens stay before which less than top_p of the mass has been counted. Scores are fp32, the
division is IEEE's, the mass is added in fp64 in fixed chunks in their order, so a row's bits never depend on other rows. NaN
counts as minus infinity. Sorting takes four fifths of the time.

Letters: M rows, V vocabulary.
"""

import torch

from .jit import jit, on_triton, tl, triton
from .sample import check_rows

_CHUNK = 1024  # tokens per program and partial sum: fixed, it orders the sums


def scaled_reference(logits, temperature):
    """logits / T in fp32 (T = 0: logits), NaN as minus infinity, minus zero as zero.  [M, V], [M] -> [M, V]"""
    scores = logits.float() / torch.where(temperature > 0, temperature.float(), 1)[:, None]
    return torch.where(scores.isnan(), -torch.inf, scores) + 0.0


def keep_top_reference(logits, temperature, top_k, top_p, min_p):
    """The rule in plain torch. Rows of temperature 0 keep everything."""
    scores = scaled_reference(logits, temperature)
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)
    limit = torch.where(top_k > 0, top_k.long(), scores.shape[1])[:, None]
    floor = min_p.double()[:, None]
    # By way of softmax, which takes row by row: a bare exp rounds by an element's place among all rows.
    likely = ordered.double().softmax(-1)
    keep = (rank < limit) & ((likely >= floor * likely[:, :1]) | (floor <= 0))
    probability = ordered.masked_fill(~keep, -torch.inf).double().softmax(-1)
    # A token stays if those before it do not yet make up top_p: the first one always does.
    share = top_p.double()[:, None]
    keep &= (probability.cumsum(-1) - probability < share) | (share >= 1)
    keep |= (temperature <= 0)[:, None]
    return scores.masked_fill(~torch.zeros_like(keep).scatter(-1, order, keep), -torch.inf)


@jit
def _scale(logits, temperature, scores, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    x = tl.load(logits + row * vocab_size + token, mask=inside).to(tl.float32)
    heat = tl.load(temperature + row).to(tl.float32)
    heat = tl.where(heat > 0, heat, 1.0)
    x = tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * heat)
    x = tl.where(x == x, x, float("-inf"))
    tl.store(scores + row * vocab_size + token, tl.where(x == 0.0, 0.0, x), mask=inside)


@jit
def _weights(ordered, min_p, row, rank, limit, vocab_size):
    """exp(score - highest score) in fp64 of the tokens at `rank`, 0 from `limit` on and where it is below min_p."""
    top = tl.load(ordered + row * vocab_size)
    x = tl.load(ordered + row * vocab_size + rank, mask=rank < limit, other=float("-inf"))
    weight = tl.where(x == top, 1.0, tl.exp(x.to(tl.float64) - top.to(tl.float64)))
    return tl.where(weight >= tl.load(min_p + row).to(tl.float64), weight, 0.0)


@jit
def _limit(top_k, row, vocab_size):
    k = tl.load(top_k + row).to(tl.int64)
    return tl.where(k > 0, tl.minimum(k, vocab_size), vocab_size)


@jit(do_not_specialize=["num_chunks"])
def _share_sums(ordered, top_k, min_p, sums, vocab_size, num_chunks, CHUNK: tl.constexpr):
    pid = tl.program_id(0)
    row, chunk = (pid // num_chunks).to(tl.int64), pid % num_chunks
    rank = chunk * CHUNK + tl.arange(0, CHUNK)
    weight = _weights(ordered, min_p, row, rank, _limit(top_k, row, vocab_size), vocab_size)
    tl.store(sums + pid, tl.sum(weight, 0))


@jit(do_not_specialize=["num_chunks"])
def _keep(
    ordered,
    order,
    sums,
    temperature,
    top_k,
    top_p,
    min_p,
    scores,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    pid = tl.program_id(0)
    row, chunk = (pid // num_chunks).to(tl.int64), pid % num_chunks
    rank = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = rank < vocab_size
    limit = _limit(top_k, row, vocab_size)
    share = tl.load(top_p + row).to(tl.float64)
    c = tl.arange(0, CHUNKS)
    parts = tl.load(sums + row * num_chunks + c, mask=c < num_chunks, other=0.0)
    before = tl.sum(tl.where(c < chunk, parts, 0.0), 0)
    weight = _weights(ordered, min_p, row, rank, limit, vocab_size)
    greedy = tl.load(temperature + row) <= 0
    floor = tl.where(greedy, 0.0, tl.load(min_p + row).to(tl.float64))
    limit = tl.where(greedy, vocab_size, limit)
    bound = tl.where(greedy | (share >= 1), float("inf"), share * tl.sum(parts, 0))
    # A token stays if those before it do not yet make up top_p: the first one always does.
    keep = (rank < limit) & (weight >= floor) & (before + (tl.cumsum(weight, 0) - weight) < bound)
    x = tl.load(ordered + row * vocab_size + rank, mask=inside, other=0.0)
    token = tl.load(order + row * vocab_size + rank, mask=inside, other=0)
    tl.store(scores + row * vocab_size + token, tl.where(keep, x, float("-inf")), mask=inside)


def scale(logits, temperature):
    """Scores logits / T, those of rows of temperature 0 as they are.  [M, V], [M] -> fp32 [M, V]; ValueError for other shapes"""
    check_rows("scale", logits, temperature)
    if not on_triton(logits):
        return scaled_reference(logits, temperature)
    rows, vocab_size = logits.shape
    scores = torch.empty(rows, vocab_size, dtype=torch.float32, device=logits.device)
    if rows:
        _scale[(triton.cdiv(vocab_size, _CHUNK), rows)](
            logits.contiguous(), temperature.contiguous(), scores, vocab_size, _CHUNK, num_warps=4
        )
    return scores


def keep_top(logits, temperature, top_k, top_p, min_p):
    """Scores logits / T in which what min-p, top-k and top-p leave out is minus infinity.  logits [M, V] -> fp32 [M, V]

    temperature [M]: rows of 0 are neither divided nor cut. top_k [M] integers: 0 keeps all. min_p [M] in [0, 1]: tokens less
    likely than that share of the likeliest go. top_p [M] in (0, 1]: of the likeliest tokens that are left, those stay before which
    less than top_p has been counted. Raises ValueError for shapes that do not fit.
    """
    check_rows("keep_top", logits, temperature, top_k, top_p, min_p)
    if not on_triton(logits):
        return keep_top_reference(logits, temperature, top_k, top_p, min_p)
    rows, vocab_size = logits.shape
    scores = scale(logits, temperature)
    if not rows:
        return scores
    temperature, top_k, top_p, min_p = (x.contiguous() for x in (temperature, top_k, top_p, min_p))
    ordered, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    chunks = triton.cdiv(vocab_size, _CHUNK)
    sums = torch.empty(rows, chunks, dtype=torch.float64, device=logits.device)
    _share_sums[(rows * chunks,)](
        ordered, top_k, min_p, sums, vocab_size, chunks, _CHUNK, num_warps=4, enable_fp_fusion=False
    )
    _keep[(rows * chunks,)](
        ordered, order, sums, temperature, top_k, top_p, min_p, scores, vocab_size, chunks, _CHUNK, triton.next_power_of_2(chunks),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return scores
