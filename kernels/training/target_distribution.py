"""The target's distribution p as the losses of a chunk need it, computed once for all heads that are compared with it.

    log p(v) = (y(v) - top) - log_sum,   top = max y,   log_sum = log sum exp(y - top)          y: the target's logits [C, V]

Both run over the whole vocabulary V, also where the head drafts over a part of it (`draft_ids`, Vd tokens): then those Vd entries
of the distribution are kept, and their sum `mass` is below 1. On a GPU no probability is written to memory: y stays in its own
dtype, and the kernel that walks over a row (distill_loss.py) computes p as it goes. Subtracting top first keeps five digits that a
log-normaliser of 1e4 would cost.

Logits of minus infinity have p = 0. A row has no distribution if it holds nothing else, or plus infinity, or NaN: its log_sum is
NaN.

Letters: C rows, V vocabulary (Vd with a draft vocabulary), K tokens of HASS's term.
"""

from typing import NamedTuple

import torch

from ..jit import jit, on_triton, tl, triton

BLOCK = 8192  # tokens loaded at once: 8 for each of 1024 threads
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TargetDistribution(NamedTuple):
    """The distribution of C rows over the tokens that the head can say, all but the logits in fp32 at least.

    The kernels use top and log_sum, the reference p and plogp; the fields of the other are None.
    """

    logits: torch.Tensor  # [C, V]
    mass: torch.Tensor | None = None  # [C] sum of p, where a draft vocabulary leaves tokens out; None: 1
    likely: torch.Tensor | None = None  # [C, K] p of the likeliest tokens of the slice
    likely_tokens: torch.Tensor | None = None  # int64 [C, K] their places in the slice
    top: torch.Tensor | None = None  # [C]
    log_sum: torch.Tensor | None = None  # [C]
    p: torch.Tensor | None = None  # [C, V]
    plogp: torch.Tensor | None = None  # [C] sum p log p


def wide(dtype):
    """The dtype in which distributions and losses are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def target_distribution_reference(logits, draft_ids=None):
    """The formula in plain torch, for any device."""
    log_p = torch.log_softmax(logits, -1, dtype=wide(logits.dtype))
    if draft_ids is not None:
        logits, log_p = logits[:, draft_ids], log_p[:, draft_ids]
    p = log_p.exp()
    mass = None if draft_ids is None else p.sum(-1)
    return TargetDistribution(logits, mass, p=p, plogp=sum_p_times(p, log_p))


def sum_p_times(p, x):
    """sum p x of every row; terms with p = 0 are 0 even if x is infinite."""
    total = dot(p, x)
    return dot(p, torch.where(p == 0, 0, x)) if total.isnan().any() else total


def dot(a, b):
    """Sum of a b over the last axis. Autocast is off: its bfloat16 would keep only two or three digits."""
    with torch.autocast(a.device.type, enabled=False):
        return torch.linalg.vecdot(a, b)


@jit
def add_lanes(top, total, x):
    """Add one value per lane to the lane's highest so far and its sum of exp(value - highest), with one exponential.

    A lane that has seen only minus infinities counts them in its sum; `merge_lanes` gives that sum no weight.
    """
    gap = tl.where(x == top, 0.0, x - top)  # 0 also between two minus infinities
    shrunk = tl.exp(-tl.abs(gap))
    total = tl.where(gap > 0, total * shrunk + 1.0, total + shrunk)
    return tl.maximum(top, x), total


@jit
def merge_lanes(top, total):
    """(highest, log sum exp(value - highest)) of all lanes."""
    highest = tl.max(top, 0)
    return highest, tl.log(tl.sum(total * tl.exp(top - highest), 0))


@jit
def _distribution(
    logits, draft_ids, part, tops, log_sums, masses, vocab_size, draft_size, SLICE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        token = start + lane
        y = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        top, total = add_lanes(top, total, y)
    top_, log_sum = merge_lanes(top, total)
    tl.store(tops + row, top_)
    tl.store(log_sums + row, log_sum)
    if SLICE:
        mass = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, draft_size, BLOCK):
            place = start + lane
            inside = place < draft_size
            token = tl.load(draft_ids + place, mask=inside, other=0)
            y = tl.load(logits + row * vocab_size + token, mask=inside, other=float("-inf"))
            tl.store(part + row * draft_size + place, y, mask=inside)
            mass += tl.exp((y.to(tl.float32) - top_) - log_sum)
        tl.store(masses + row, tl.sum(mass, 0))


def target_distribution(logits, draft_ids=None, top_k=0):
    """The TargetDistribution of the target's logits [C, V], which it holds on to.

    draft_ids: int64 [Vd], the tokens of a draft vocabulary. top_k: also find the top_k likeliest tokens of the slice (all of it, if
    it holds fewer). Raises ValueError for shapes and dtypes that do not fit.
    """
    if logits.dim() != 2 or (draft_ids is not None and draft_ids.dim() != 1):
        shapes = tuple(logits.shape), None if draft_ids is None else tuple(draft_ids.shape)
        raise ValueError(
            f"target_distribution takes logits [C, V] and draft_ids [Vd] or None, got {shapes[0]} and {shapes[1]}"
        )
    if not on_triton(logits):
        distribution = target_distribution_reference(logits, draft_ids)
    else:
        check_kernel_dtype("target_distribution", logits)
        rows, vocab_size = logits.shape
        logits, part, masses, size = logits.contiguous(), None, None, 0
        tops, log_sums = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
        if draft_ids is not None:
            size = len(draft_ids)
            part = torch.empty(rows, size, dtype=logits.dtype, device=logits.device)
            masses = torch.empty_like(tops)
        if rows:
            block, warps = launch(vocab_size)
            _distribution[(rows,)](
                logits, draft_ids, part, tops, log_sums, masses, vocab_size, size, draft_ids is not None, block, num_warps=warps
            )  # fmt: skip
        distribution = TargetDistribution(logits if part is None else part, masses, top=tops, log_sum=log_sums)
    if top_k:
        distribution = with_likely(distribution, top_k)
    return distribution


def with_likely(distribution, top_k):
    """Add the top_k likeliest tokens of the slice to the distribution (all tokens, if it holds fewer)."""
    logits, tokens = distribution.logits.topk(min(top_k, distribution.logits.shape[-1]), -1)  # [C, K] each
    if distribution.p is not None:
        p = distribution.p.gather(-1, tokens)
    else:
        p = ((logits.float() - distribution.top[:, None]) - distribution.log_sum[:, None]).exp_()
    return distribution._replace(likely=p, likely_tokens=tokens)


def check_kernel_dtype(op, logits):
    """Raises ValueError for a dtype of logits that the kernels do not read: fp64 is for the reference."""
    if logits.dtype not in KERNEL_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in KERNEL_DTYPES)
        raise ValueError(f"{op} on {logits.device} takes {names}, got {logits.dtype}")


def launch(vocab_size):
    """(block, warps) of a program that walks over a row: 8 tokens per thread, 1024 threads where the row is long enough."""
    block = min(BLOCK, max(triton.next_power_of_2(vocab_size), 256))
    return block, block // 256
