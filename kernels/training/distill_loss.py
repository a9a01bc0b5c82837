"""Losses of a head's distribution q against the text or the target's distribution p; gradients overwrite the logits.

    hard      -log q(label)                    cross entropy against the text
    kl        sum p (log p - log q)            forward KL from the target's distribution
    lk        w kl + (1 - w)(1 - alpha)        LK (arXiv 2602.23881): alpha = sum min(p, q) is the probability that a draft
                                               from q is accepted; the caller sets w for all rows (train/loss/losses.py)
    lk-log    -log alpha                       LK's other form
    hard-l1   0.1 hard + 1.8 (1 - alpha)       DSpark's: 0.9 times the L1 distance of p and q, which is 2 (1 - alpha)
    + top_k_weight * sum of -p log q over the likeliest tokens of p (not normalised again): HASS's term (arXiv 2408.15766)

With z the logits, d q_j / d z_i = q_j (1[i = j] - q_i), so every gradient is `share` times q minus something:

    hard    q - onehot(label)                  kl      P q - p,  P = sum p
    alpha   kept - S q,  where kept = q where q < p, else 0, and S = sum kept
    top-K   M q - top,   where top = p on the K tokens, else 0, and M = sum top

The logits are overwritten by `factor` times the gradient of their row's loss: the caller hands them to the backward of the product
that made them. Two walks over a row, three for losses with alpha. On a GPU nothing of size [C, V] exists beside the logits and the
target's (target_distribution.py), and all arithmetic is fp32. By-products: alpha, the row's rate of acceptance, and the label's
rank.

Draft vocabularies of Vd < V tokens: q is normalised over the Vd tokens, p over all V; over this slice p sums to P < 1. Each sum
above then runs over the slice. kl counts the tokens of the slice and ignores the mass outside, where it would be infinite: its
minimum is P log P < 0, at q = p / P. alpha is still the exact rate of acceptance (q is 0 outside), at most P. The likeliest tokens
are those of the slice. The text's token outside the slice has no hard loss: in hard-l1 the other part is left.

Terms with p = 0 are 0 whatever q is (0 log 0 = 0); q = 0 where p > 0 makes kl infinite, but its gradient stays finite. NaN, plus
infinity and a row of minus infinities make the loss NaN. This file does not project, and knows nothing of positions
(train/loss/distillation.py).

Letters: C rows, V vocabulary of the logits (Vd with a draft vocabulary), K tokens of HASS's term.
"""

from typing import NamedTuple

import torch

from ..jit import jit, on_triton, tl, triton
from ..sampling.rank_tokens import rank_tokens_reference
from .target_distribution import add_lanes, check_kernel_dtype, launch, merge_lanes, sum_p_times, wide

LOSSES = ("hard", "kl", "lk", "lk-log", "hard-l1")
OF_HARD, OF_ALPHA = 0.1, 1.8  # in hard-l1
NO_RANK = 0x7FFFFFFF  # after all tokens
_TINY = torch.finfo(torch.float32).tiny


class RowFigures(NamedTuple):
    """Figures of C rows, [C] each; 0, 0 and NO_RANK for rows that are not valid."""

    loss: torch.Tensor  # fp32, fp64 for fp64 logits
    alpha: torch.Tensor | None  # the same; None where not measured, or without the target's distribution
    rank: torch.Tensor | None  # int64: the label's rank from 1, ties to the lowest id; NO_RANK for label -1


def distill_loss_reference(logits, labels, valid, distribution, *, name, kl_weight, top_k_weight, factor, measure):
    """The formulas in plain torch, for any device; distribution: by target_distribution_reference."""
    log_q = torch.log_softmax(logits, -1, dtype=wide(logits.dtype))
    shown, rank, alpha = labels.clamp_min(0), None, None
    share = None  # [C] what q counts in the gradient; None: 1
    if measure:
        rank = rank_tokens_reference(logits, shown).where(valid & (labels >= 0), NO_RANK)
    p = None if distribution is None else distribution.p  # [C, V]
    if name in ("hard", "hard-l1"):
        value = -log_q.gather(-1, shown[:, None])[:, 0]  # [C]
        of_label = torch.ones_like(value)
    elif name != "lk-log":
        value = distribution.plogp - sum_p_times(p, log_q)
        share = distribution.mass
    if top_k_weight:
        said = log_q.gather(-1, distribution.likely_tokens)  # [C, K]
        value_top = -sum_p_times(distribution.likely, said)
    gradient = log_q.exp_()  # q: log_q is gone
    if distribution is not None and (measure or name in ("lk", "lk-log", "hard-l1")):
        alpha = torch.minimum(p, gradient).sum(-1)  # [C]
    if name in ("lk", "lk-log", "hard-l1"):
        kept = gradient.where(gradient < p, 0)  # [C, V]
        kept_sum = kept.sum(-1)
        if name == "lk":
            of_p, of_kept = kl_weight, 1 - kl_weight
            value = of_p * value + of_kept * (1 - alpha)
            share = of_p * (1 if distribution.mass is None else distribution.mass) + of_kept * kept_sum
        elif name == "hard-l1":
            of_label = torch.full_like(value, OF_HARD).where(labels >= 0, 0)
            value = (OF_HARD * value).where(labels >= 0, 0) + OF_ALPHA * (1 - alpha)
            share, of_p, of_kept = of_label + OF_ALPHA * kept_sum, 0, OF_ALPHA
        else:
            # S <= alpha, so both quotients are at most 1 however small alpha is.
            least = alpha.clamp_min(_TINY)
            value = -least.log()
            share, of_p, of_kept = kept_sum / least, 0, (1 / least)[:, None]
    if top_k_weight:
        value = value + top_k_weight * value_top
        share = (1 if share is None else share) + top_k_weight * distribution.likely.sum(-1)
    gradient.mul_(factor if share is None else factor * share[:, None])
    if name in ("hard", "hard-l1"):
        gradient.scatter_add_(-1, shown[:, None], -factor * of_label[:, None])
    if name == "kl":
        gradient.sub_(p, alpha=factor)
    elif name != "hard":
        if of_p:
            gradient.sub_(p, alpha=factor * of_p)
        gradient.sub_(kept.mul_(of_kept), alpha=factor)
    if top_k_weight:
        gradient.scatter_add_(-1, distribution.likely_tokens, distribution.likely * (-factor * top_k_weight))
    gradient[~valid] = 0
    logits.copy_(gradient)
    return RowFigures(value.where(valid, 0), alpha.where(valid, 0) if measure and alpha is not None else None, rank)


@jit
def _distill(
    logits, labels, valid, target, target_top, target_log_sum, mass, likely, likely_tokens, losses, alphas, ranks,
    vocab_size, factor, kl_weight, top_k_weight,
    NAME: tl.constexpr, DISTRIBUTION: tl.constexpr, SLICE: tl.constexpr, TOP_K: tl.constexpr, MEASURE: tl.constexpr,
    NONE: tl.constexpr, TINY: tl.constexpr, OF_HARD: tl.constexpr, OF_ALPHA: tl.constexpr, BLOCK: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. It never reads what it wrote: the logits of the label and of the likely tokens are read before the first walk."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    z_row = logits + row * vocab_size
    if tl.load(valid + row) == 0:
        for start in range(0, vocab_size, BLOCK):
            nothing = tl.zeros((BLOCK,), logits.dtype.element_ty)
            tl.store(z_row + start + lane, nothing, mask=start + lane < vocab_size)
        tl.store(losses + row, 0.0)
        if MEASURE:
            tl.store(ranks + row, NONE)
            if DISTRIBUTION:
                tl.store(alphas + row, 0.0)
    else:
        # Read before the first walk: after the barriers of its reductions a warp may overwrite what another warp has not read yet.
        label = tl.load(labels + row)
        of_label = tl.load(z_row + tl.maximum(label, 0)).to(tl.float32)
        if TOP_K > 0:
            i = tl.arange(0, TOP_BLOCK)
            likely_ = tl.load(likely + row * TOP_K + i, mask=i < TOP_K, other=0.0)
            of_likely = tl.load(z_row + tl.load(likely_tokens + row * TOP_K + i, mask=i < TOP_K, other=0)).to(
                tl.float32
            )

        # First walk: the normaliser of q, and how many tokens stand before the label.
        highest = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        before = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, vocab_size, BLOCK):
            token = start + lane
            z = tl.load(z_row + token, mask=token < vocab_size, other=float("-inf"), eviction_policy="evict_last")
            z = z.to(tl.float32)
            highest, total = add_lanes(highest, total, z)
            if MEASURE:
                before += ((z > of_label) | ((z == of_label) & (token < label))).to(tl.int32)
        top, log_sum = merge_lanes(highest, total)
        if MEASURE:
            tl.store(ranks + row, tl.where(label < 0, NONE, tl.sum(before, 0) + 1))

        share = 1.0  # what q counts in the gradient
        if SLICE and (NAME == "kl" or NAME == "lk"):
            share = tl.load(mass + row)
        value_top, share_top = 0.0, 0.0
        if TOP_K > 0:
            said = tl.where(likely_ == 0, 0.0, (of_likely - top) - log_sum)
            value_top = -top_k_weight * tl.sum(likely_ * said, 0)
            share_top = top_k_weight * tl.sum(likely_, 0)
        if DISTRIBUTION:
            y_row = target + row * vocab_size
            y_top, y_log_sum = tl.load(target_top + row), tl.load(target_log_sum + row)

        # Second walk of lk, lk-log and hard-l1: alpha, S and kl.
        kl = tl.zeros((BLOCK,), tl.float32)
        alpha = tl.zeros((BLOCK,), tl.float32)
        kept_sum = tl.zeros((BLOCK,), tl.float32)
        of_p, of_kept = 1.0, 0.0
        value = top - of_label + log_sum  # hard
        if NAME == "lk" or NAME == "lk-log" or NAME == "hard-l1":
            for start in range(0, vocab_size, BLOCK):
                token = start + lane
                z = tl.load(z_row + token, mask=token < vocab_size, other=float("-inf"), eviction_policy="evict_last")
                y = tl.load(y_row + token, mask=token < vocab_size, other=float("-inf"), eviction_policy="evict_last")
                log_q, log_p = (z.to(tl.float32) - top) - log_sum, (y.to(tl.float32) - y_top) - y_log_sum
                q, p = tl.exp(log_q), tl.exp(log_p)
                alpha += tl.minimum(p, q, propagate_nan=tl.PropagateNan.ALL)
                kept_sum += tl.where(q < p, q, 0.0)
                if NAME == "lk":
                    kl += tl.where(p == 0, 0.0, p * (log_p - log_q))
            alpha_, kept_ = tl.sum(alpha, 0), tl.sum(kept_sum, 0)
            if NAME == "lk":
                of_p, of_kept = kl_weight, 1.0 - kl_weight
                value = of_p * tl.sum(kl, 0) + of_kept * (1.0 - alpha_)
                share = of_p * share + of_kept * kept_
            elif NAME == "hard-l1":
                value = tl.where(label < 0, 0.0, OF_HARD * value) + OF_ALPHA * (1.0 - alpha_)
                share, of_kept = tl.where(label < 0, 0.0, OF_HARD) + OF_ALPHA * kept_, OF_ALPHA
            else:
                least = tl.where(alpha_ < TINY, TINY, alpha_)  # NaN stays NaN
                value = -tl.log(least)
                share, of_kept = kept_ / least, 1.0 / least
            if MEASURE:
                tl.store(alphas + row, alpha_)
        share += share_top

        # Last walk: the gradient, in place; for hard and kl also the sums that a second walk would have found.
        for start in range(0, vocab_size, BLOCK):
            token = start + lane
            inside = token < vocab_size
            z = tl.load(z_row + token, mask=inside, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
            log_q = (z - top) - log_sum
            q = tl.exp(log_q)
            gradient = share * q
            if DISTRIBUTION and (NAME != "hard" or MEASURE):
                y = tl.load(y_row + token, mask=inside, other=float("-inf")).to(tl.float32)
                log_p = (y - y_top) - y_log_sum
                p = tl.exp(log_p)
                if NAME == "hard" or NAME == "kl":
                    alpha += tl.minimum(p, q, propagate_nan=tl.PropagateNan.ALL)
                if NAME == "kl":
                    kl += tl.where(p == 0, 0.0, p * (log_p - log_q))
                if NAME == "kl" or NAME == "lk":
                    gradient -= of_p * p
                if NAME == "lk" or NAME == "lk-log" or NAME == "hard-l1":
                    gradient -= of_kept * tl.where(q < p, q, 0.0)
            if NAME == "hard":
                gradient -= tl.where(token == label, 1.0, 0.0)
            if NAME == "hard-l1":
                gradient -= tl.where(token == label, OF_HARD, 0.0)
            for one in tl.static_range(TOP_K):
                at = row * TOP_K + one
                gradient -= tl.where(token == tl.load(likely_tokens + at), top_k_weight * tl.load(likely + at), 0.0)
            tl.store(z_row + token, (factor * gradient).to(logits.dtype.element_ty), mask=inside)
        if NAME == "kl":
            value = tl.sum(kl, 0)
        tl.store(losses + row, value + value_top)
        if DISTRIBUTION and MEASURE and (NAME == "hard" or NAME == "kl"):
            tl.store(alphas + row, tl.sum(alpha, 0))


def distill_loss(
    logits, labels, valid, distribution, *, name, kl_weight=None, top_k_weight=0.0, factor=1.0, measure=True
):
    """Losses of the rows of logits [C, V], which are overwritten by `factor` times their gradients.  -> RowFigures

    labels: int64 [C] from 0 to V - 1, or -1 outside a draft vocabulary: such a row must not be valid where the loss is hard;
    valid: bool [C], the other rows have no loss and a gradient of zeros; distribution: TargetDistribution of the same tokens, or
    None where only hard is wanted; name: one of LOSSES; kl_weight: w of lk, from 0 to 1; top_k_weight: of HASS's term over
    distribution.likely_tokens; measure: alpha and rank too.
    Raises ValueError for shapes, dtypes and names that do not fit.
    """
    rows = logits.shape[:1]
    if logits.dim() != 2 or not logits.is_contiguous() or labels.shape != rows or valid.shape != rows:
        raise ValueError(
            f"distill_loss takes contiguous logits [C, V], labels [C] and valid [C], got {tuple(logits.shape)}"
            f"{'' if logits.is_contiguous() else ' (strided)'}, {tuple(labels.shape)} and {tuple(valid.shape)}"
        )
    if name not in LOSSES:
        raise ValueError(f"the loss must be one of {', '.join(LOSSES)}, got {name!r}")
    if name == "lk" and not (kl_weight is not None and 0 <= kl_weight <= 1):
        raise ValueError(f"lk takes a kl_weight from 0 to 1, got {kl_weight}")
    if distribution is None and (name != "hard" or top_k_weight):
        raise ValueError(f"the loss {name!r} with top_k_weight {top_k_weight} needs the target's distribution")
    if distribution is not None and distribution.logits.shape != logits.shape:
        raise ValueError(
            f"the distribution is over [C, V] = {tuple(distribution.logits.shape)} and the logits are {tuple(logits.shape)}: give "
            "target_distribution the draft vocabulary's ids"
        )
    if top_k_weight and distribution.likely is None:
        raise ValueError(
            f"top_k_weight {top_k_weight} needs the target's likeliest tokens: give target_distribution a top_k"
        )
    if not on_triton(logits):
        return distill_loss_reference(
            logits,
            labels,
            valid,
            distribution,
            name=name,
            kl_weight=kl_weight,
            top_k_weight=top_k_weight,
            factor=factor,
            measure=measure,
        )
    check_kernel_dtype("distill_loss", logits)
    fresh = dict(dtype=torch.float32, device=logits.device)
    count, vocab_size = logits.shape
    losses, alphas, ranks = torch.empty(count, **fresh), None, None
    if measure:
        alphas = None if distribution is None else torch.empty(count, **fresh)
        ranks = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count:
        top_k = distribution.likely.shape[1] if top_k_weight else 0
        told = (None,) * 6
        if distribution is not None:
            told = (
                distribution.logits.contiguous(),
                distribution.top,
                distribution.log_sum,
                distribution.mass,
                distribution.likely,
                distribution.likely_tokens,
            )
        block, warps = launch(vocab_size)
        _distill[(count,)](
            logits, labels.contiguous(), valid.contiguous(), *told, losses, alphas, ranks,
            vocab_size, float(factor), float(kl_weight or 0), float(top_k_weight),
            name, distribution is not None, distribution is not None and distribution.mass is not None, top_k, measure, NO_RANK,
            _TINY, OF_HARD, OF_ALPHA, block, triton.next_power_of_2(max(top_k, 1)), num_warps=warps,
        )  # fmt: skip
    return RowFigures(losses, alphas, ranks)
