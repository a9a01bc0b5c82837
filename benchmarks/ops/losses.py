"""`headstart bench kernel distill-loss`: loss and gradient of a head's logits in place, and the target's distribution before it.

The library's side is a trainer's plain code: log_softmax in fp32, torch's own loss, autograd back to the logits. The target's
distribution is computed beforehand for both. Floors: the distribution reads the target's logits; a loss reads both sides' logits
(hard: only the head's) and writes the gradient. Repeated calls overwrite the last gradient; the work does not depend on the
numbers. alpha and the label's rank are computed too.
"""

import torch
import torch.nn.functional as F

from ...kernels.training.distill_loss import LOSSES, distill_loss
from ...kernels.training.target_distribution import target_distribution
from ..random_heads import DRAFT_VOCABULARY

KL_WEIGHT = 0.4  # of lk


def torch_losses(logits, labels, log_p, name, kl_weight):
    """The loss of every row by torch's own operations in fp32.  logits [C, V], labels [C], log_p [C, V] or None -> [C]

    kl_weight: of lk.
    """
    log_q = logits.float().log_softmax(-1)
    if name == "hard":
        return F.nll_loss(log_q, labels, reduction="none")
    kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    if name == "kl":
        return kl
    alpha = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
    if name == "lk-log":
        return -alpha.log()
    if name == "hard-l1":
        return 0.1 * F.nll_loss(log_q, labels, reduction="none") + 0.9 * (log_p.exp() - log_q.exp()).abs().sum(-1)
    if name == "lk":
        return kl_weight * kl + (1 - kl_weight) * (1 - alpha)
    raise ValueError(f"no plain formula of the loss {name!r}")


def bench_distill_loss(bench):
    """Every loss over the whole vocabulary, kl over a draft vocabulary too; bench: kernel.KernelBench."""
    for rows in bench.settings.rows:
        _lines(bench, rows, None)
        if bench.sizes.vocab > DRAFT_VOCABULARY:
            step = bench.sizes.vocab / DRAFT_VOCABULARY  # spread over the whole vocabulary, like frequent tokens
            _lines(bench, rows, (torch.arange(DRAFT_VOCABULARY, device=bench.device) * step).long())


def _lines(bench, rows, draft_ids):
    vocab = bench.sizes.vocab
    size, names = (vocab, LOSSES) if draft_ids is None else (len(draft_ids), ("kl",))
    what = f"{size}" if draft_ids is None else f"{size} of {vocab}"
    count = bench.copies(rows * size * bench.dtype.itemsize)
    target, logits = bench.random(rows, vocab, scale=3), bench.random(count, rows, size, scale=3)
    labels, valid = bench.integers(size, rows), torch.ones(rows, dtype=torch.bool, device=bench.device)
    distribution = target_distribution(target, draft_ids)
    log_p = target.float().log_softmax(-1)
    log_p = log_p if draft_ids is None else log_p[:, draft_ids]
    bench.line(
        "target_distribution",
        what,
        rows,
        lambda: [target_distribution(target, draft_ids) for _ in logits],
        lambda: [target.float().log_softmax(-1) for _ in logits],
        target.nbytes + (0 if draft_ids is None else 2 * distribution.logits.nbytes),
        calls=count,
    )
    for name in names:

        def ours(name=name):
            told = None if name == "hard" else distribution
            for one in logits:
                distill_loss(one, labels, valid, told, name=name, kl_weight=KL_WEIGHT)

        def library(name=name):
            for one in logits:
                with torch.enable_grad():
                    z = one.detach().requires_grad_()
                    torch.autograd.grad(torch_losses(z, labels, log_p, name, KL_WEIGHT).sum(), z)

        moved = (2 if name == "hard" else 3) * logits[0].nbytes
        bench.line("distill_loss", f"{name}, {what}", rows, ours, library, moved, calls=count)
