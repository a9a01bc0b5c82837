"""The numbers that turn a row's scores into probabilities: the highest score, its token, and the normalising sum.

    p(v) = exp((s(v) - top) / T) / total,  total = sum over v of exp((s(v) - top) / T)        T = 0: p = 1 at `best`, total = 1

No probability is written to memory: a kernel that walks over a row (verify_ratio.py) computes them as it goes. Subtracting the
highest score before dividing keeps the likely tokens exact; a log-normaliser of 400 (T = 0.1) would cost them five digits. NaN
counts as minus infinity, ties go to the lowest token. Chunks and the order of sums are fixed: a row's bits never depend on other
rows. A row of nothing but minus infinities has no distribution.

Letters: M rows, V vocabulary.
"""

from typing import NamedTuple

import torch

from ..jit import jit, on_triton, tl, triton

SUM_CHUNK = 4096  # tokens per partial sum: fixed, it orders the sums


class RowDistributions(NamedTuple):
    """[M] each."""

    top: torch.Tensor  # fp32
    total: torch.Tensor  # fp32
    best: torch.Tensor  # int64


def row_distributions_reference(scores, temperature):
    """The formula; `temperature` [M].  [M, V] -> RowDistributions"""
    wide = scores.float()
    wide = wide.masked_fill(wide.isnan(), -torch.inf)
    top, best = wide.amax(-1), wide.argmax(-1)
    heat = torch.where(temperature > 0, temperature.float(), 1)
    total = ((wide - top[:, None]) / heat[:, None]).exp().sum(-1, dtype=torch.float64).float()
    return RowDistributions(top, torch.where(temperature > 0, total, 1.0), best)


def probabilities(scores, temperature):
    """The distributions themselves, for the CPU and for tests.  scores [M, V], temperature [M] -> [M, V], fp32 (fp64 for fp64)"""
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    wide = scores.to(dtype)
    wide = wide.masked_fill(wide.isnan(), -torch.inf)
    greedy = temperature <= 0
    wide = (wide - wide.amax(-1, keepdim=True)) / torch.where(greedy, 1, temperature.to(dtype))[:, None]
    one_hot = torch.zeros_like(wide).scatter(-1, wide.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy[:, None], one_hot, wide.softmax(-1))


@jit(do_not_specialize=["num_chunks", "num_heats"])
def _chunk_distributions(
    scores, temperature, tops, parts, places, vocab_size, num_chunks, num_heats, CHUNK: tl.constexpr
):
    pid = tl.program_id(0)
    row, chunk = (pid // num_chunks).to(tl.int64), pid % num_chunks
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(scores + row * vocab_size + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    heat = tl.load(temperature + row % num_heats).to(tl.float32)
    top = tl.max(x, 0)
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    tl.store(tops + pid, top)
    tl.store(parts + pid, tl.sum(tl.exp((x - shift) / tl.where(heat > 0, heat, 1.0)), 0))
    tl.store(places + pid, tl.min(tl.where(x == top, token, 0x7FFFFFFF), 0))


@jit(do_not_specialize=["num_chunks", "num_heats"])
def _merge_distributions(
    temperature, tops, parts, places, top, total, best, num_chunks, num_heats, CHUNKS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    inside = c < num_chunks
    found = tl.load(tops + row * num_chunks + c, mask=inside, other=float("-inf"))
    part = tl.load(parts + row * num_chunks + c, mask=inside, other=0.0)
    place = tl.load(places + row * num_chunks + c, mask=inside, other=0x7FFFFFFF)
    heat = tl.load(temperature + row % num_heats).to(tl.float32)
    highest = tl.max(found, 0)
    gap = tl.where(found == highest, 0.0, found - highest)  # 0 also between two minus infinities
    total_ = tl.sum(part * tl.exp(gap / tl.where(heat > 0, heat, 1.0)), 0)
    tl.store(top + row, highest)
    tl.store(total + row, tl.where(heat > 0, total_, 1.0))
    tl.store(best + row, tl.min(tl.where(found == highest, place, 0x7FFFFFFF), 0).to(tl.int64))


def row_distributions(scores, temperature):
    """Highest score, its token and the normaliser of every row.  scores [M, V] -> RowDistributions

    temperature: [M], or shorter by a whole factor, and then repeated over the rows. Raises ValueError for shapes that do not fit.
    """
    if scores.dim() != 2 or temperature.dim() != 1 or (scores.shape[0] % max(len(temperature), 1)):
        raise ValueError(
            f"row_distributions takes scores [M, V] and temperature [M] or of a whole part of the rows, got {tuple(scores.shape)} "
            f"and {tuple(temperature.shape)}"
        )
    rows, vocab_size = scores.shape
    if not on_triton(scores):
        return row_distributions_reference(scores, temperature.repeat(rows // max(len(temperature), 1)))
    device, chunks = scores.device, triton.cdiv(vocab_size, SUM_CHUNK)
    tops, parts = torch.empty(2, rows, chunks, dtype=torch.float32, device=device)
    places = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    top, total = torch.empty(2, rows, dtype=torch.float32, device=device)
    best = torch.empty(rows, dtype=torch.int64, device=device)
    if rows:
        temperature = temperature.contiguous()
        _chunk_distributions[(rows * chunks,)](
            scores.contiguous(), temperature, tops, parts, places, vocab_size, chunks, len(temperature), SUM_CHUNK,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        _merge_distributions[(rows,)](
            temperature, tops, parts, places, top, total, best, chunks, len(temperature), triton.next_power_of_2(chunks),
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return RowDistributions(top, total, best)
