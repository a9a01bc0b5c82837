"""The losses of one row: a head's law q against the text or against the target's law p, with their gradients written out.

    hard      -log q(label)                    cross entropy against the text
    kl        sum p (log p - log q)            forward KL from the target's law
    lk        w kl + (1 - w)(1 - alpha)        LK (arXiv 2602.23881): alpha = sum min(p, q) is the probability that a draft
                                               from q is accepted; w = exp(-eta alpha), held fixed: kl leads as long as q is far off
    lk-log    -log alpha                       LK's other form
    + top_k_weight * sum of -p log q over the top_k likeliest tokens of p (not normalised again): HASS's term (arXiv 2408.15766)

Draft vocabularies of Vd < V tokens (`draft_ids`): q is normalised over the Vd, p over all V; over the slice it sums to P < 1. Each
sum above then runs over the slice. kl counts what the draft can say and nothing for the mass outside, where it would be
infinite: its least value is P log P < 0, at q = p / P. alpha is the exact rate of acceptance as before (q is 0 outside), at most P.
The top_k tokens are the likeliest of the slice. hard exists for labels inside alone: the caller leaves the others out.

What it does not do: project to the vocabulary, weigh rows or positions, look at a mask (train/distillation.py).

Letters: C rows, V vocabulary of the logits (Vd with a draft vocabulary).
"""

from dataclasses import dataclass

import torch

LOSSES = ("hard", "kl", "lk", "lk-log")


@dataclass(frozen=True)
class Loss:
    """Which loss: its name, the eta of lk, and weight and number of tokens of HASS's term, which is added to any of them."""

    name: str = "kl"
    eta: float = 3.0
    top_k_weight: float = 0.0
    top_k: int = 10

    def __post_init__(self):
        if self.name not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {self.name!r}")

    @property
    def needs_law(self):
        """Is the target's law a part of it, or the text alone?"""
        return self.name != "hard" or self.top_k_weight > 0


@dataclass(frozen=True)
class TargetLaw:
    """The target's law over the tokens that the head can say, in fp32 at least."""

    p: torch.Tensor  # [C, V]
    plogp: torch.Tensor  # [C] sum p log p
    mass: torch.Tensor | None  # [C] sum p, where a draft vocabulary leaves some out


def target_law(logits, draft_ids=None):
    """The law of the target's logits [C, all V]; draft_ids: int64 [Vd], the tokens of a draft vocabulary, None for all."""
    log_p = torch.log_softmax(logits, -1, dtype=_wide(logits))
    if draft_ids is not None:
        log_p = log_p[:, draft_ids]
    p = log_p.exp()
    return TargetLaw(p, _dot(p, log_p), None if draft_ids is None else p.sum(-1))


def row_losses(logits, labels, law, loss):
    """The loss of every row, in fp32 at least.

    logits [C, V]; labels [C] int64 from 0 to V - 1; law: TargetLaw, or None where the loss needs none  ->  [C]
    """
    return _RowLosses.apply(logits, labels, law, loss)


class _RowLosses(torch.autograd.Function):
    """Row losses of logits [C, V], with the gradient made in the forward pass: one [C, V] tensor is kept, not four.

    With z the logits, d q_j / d z_i = q_j (1[i = j] - q_i), every gradient is `share` times q minus something:

        hard    q - onehot(label)                  kl      P q - p
        alpha   kept - S q,  where kept = q where q < p, else 0, and S = sum kept
        top-K   M q - top,   where top = p on the K tokens, else 0, and M = sum top
    """

    @staticmethod
    def forward(ctx, logits, labels, law, loss):
        log_q = torch.log_softmax(logits, -1, dtype=_wide(logits))
        share = None  # [C] what q counts in the gradient; None: 1
        if loss.name == "hard":
            value = -log_q.gather(-1, labels[:, None])[:, 0]  # [C]
        else:
            value = law.plogp - _dot(law.p, log_q)
            share = law.mass
        if loss.top_k_weight:
            likely, tokens = law.p.topk(min(loss.top_k, law.p.shape[-1]), -1)  # [C, K] each
            value_top = -_dot(likely, log_q.gather(-1, tokens))
        gradient = log_q.exp_()  # q: log_q is gone
        if loss.name in ("lk", "lk-log"):
            alpha = torch.minimum(law.p, gradient).sum(-1)  # [C]
            kept = gradient.where(gradient < law.p, 0)  # [C, V]
            kept_sum = kept.sum(-1)
            if loss.name == "lk":
                weight = torch.exp(-loss.eta * alpha)
                value = weight * value + (1 - weight) * (1 - alpha)
                share = weight * (1 if law.mass is None else law.mass) + (1 - weight) * kept_sum
                of_p, of_kept = weight, 1 - weight
            else:
                # S <= alpha, so both quotients are at most 1 however small alpha is.
                alpha = alpha.clamp_min(torch.finfo(alpha.dtype).tiny)
                value = -alpha.log()
                share, of_p, of_kept = kept_sum / alpha, None, 1 / alpha
        if loss.top_k_weight:
            value = value + loss.top_k_weight * value_top
            share = (1 if share is None else share) + loss.top_k_weight * likely.sum(-1)
        if share is not None:
            gradient.mul_(share[:, None])
        if loss.name == "hard":
            gradient.scatter_add_(-1, labels[:, None], torch.full_like(value, -1)[:, None])
        elif loss.name == "kl":
            gradient.sub_(law.p)
        else:
            if of_p is not None:
                gradient.addcmul_(law.p, of_p[:, None], value=-1)
            gradient.sub_(kept.mul_(of_kept[:, None]))
        if loss.top_k_weight:
            gradient.scatter_add_(-1, tokens, likely * -loss.top_k_weight)
        ctx.save_for_backward(gradient.to(logits.dtype))
        return value

    @staticmethod
    def backward(ctx, grad_loss):
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss[:, None].to(gradient.dtype), None, None, None


def _dot(a, b):
    """Sum of a b over the last axis, not in the bfloat16 that autocast would make of it: that keeps two or three digits."""
    with torch.autocast(a.device.type, enabled=False):
        return torch.linalg.vecdot(a, b)


def _wide(logits):
    """The dtype in which losses are computed."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
