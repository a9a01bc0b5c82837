"""The losses of parallel heads against a frozen target, chunk by chunk, and their metrics.

Alignment: head k (from 0) reads the feature at t and predicts x_{t+2+k}. Seen from the label at y = t + 2 + k:
the soft label is the target's law at y - 1, the feature lies at y - 2 - k, and label and feature belong to one document. All
heads therefore share one projection of the target per label.

    loss(y, k) = hard_weight * -log q_k(x_y)  +  soft_weight * KL(p_{y-1} || q_k)
    loss       = sum over y, k of decay^k loss(y, k)  /  number of labels in the whole optimiser step, all ranks

Only supervised positions are projected, `chunk_tokens` of them at a time, each followed at once by its backward: no tensor of
[all tokens, V] exists. What it does not do: labels in a reduced vocabulary, losses other than these two.

Letters: B rows, T tokens per row, M = B T, N labels, C labels of a chunk, H hidden size, V vocabulary, K heads.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Labels:
    """The supervised positions of a micro-batch, counted in the flattened rows [M]."""

    positions: torch.Tensor  # [N] where the labels stand
    tokens: torch.Tensor  # [N] the labels
    valid: torch.Tensor  # [K, N] bool: head k has a feature in the label's own document


def find_labels(input_ids, document_ids, supervised, num_heads):
    """Labels of packed rows.  input_ids, document_ids (-1 on padding), supervised: [B, T]  ->  Labels

    A label needs a feature for head 0 at least; later heads miss the labels too close to their document's start.
    """
    valid = []
    for k in range(num_heads):
        same = torch.zeros_like(supervised)
        if 2 + k < document_ids.shape[1]:
            same[:, 2 + k :] = document_ids[:, 2 + k :] == document_ids[:, : -(2 + k)]
        valid.append((same & supervised & (document_ids >= 0)).flatten())
    valid = torch.stack(valid)  # [K, M]
    positions = valid[0].nonzero()[:, 0]
    return Labels(positions, input_ids.flatten()[positions], valid[:, positions])


class _Distillation(torch.autograd.Function):
    """Row losses of logits [C, V], with the gradient made in the forward pass: one [C, V] tensor is kept, not four."""

    @staticmethod
    def forward(ctx, logits, labels, target_probs, target_plogp, hard_weight, soft_weight):
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        log_q = torch.log_softmax(logits, -1, dtype=wide)
        loss = log_q.gather(-1, labels[:, None])[:, 0] * -hard_weight  # [C]
        if soft_weight:
            loss = loss + soft_weight * (target_plogp - torch.linalg.vecdot(target_probs, log_q))
        # d loss / d logits = (hard + soft) q - soft p - hard onehot(label)
        gradient = log_q.exp_()
        if hard_weight + soft_weight != 1:
            gradient.mul_(hard_weight + soft_weight)
        if soft_weight:
            gradient.sub_(target_probs, alpha=soft_weight)
        if hard_weight:
            gradient.scatter_add_(-1, labels[:, None], torch.full_like(loss, -hard_weight)[:, None])
        ctx.save_for_backward(gradient.to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss[:, None].to(gradient.dtype), None, None, None, None, None


def distillation_loss(logits, labels, target_law, hard_weight, soft_weight):
    """hard_weight * cross entropy + soft_weight * forward KL, per row, in fp32 at least.

    logits [C, V]; labels [C] int64; target_law: what `target_law` made, or None where soft_weight is 0  ->  [C]
    """
    probs, plogp = target_law if soft_weight else (None, None)
    return _Distillation.apply(logits, labels, probs, plogp, hard_weight, soft_weight)


def target_law(logits):
    """The target's law and its negative entropy.  logits [C, V] -> (p [C, V], sum p log p [C]), fp32 at least"""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_p = torch.log_softmax(logits, -1, dtype=wide)
    p = log_p.exp()
    return p, torch.linalg.vecdot(p, log_p)


@dataclass(frozen=True)
class Objective:
    """What is minimised. hard_weight, soft_weight: of the two losses; weights: one per head."""

    hard_weight: float
    soft_weight: float
    weights: list


def accumulate_gradients(head, features, labels, lm_head, objective, num_labels, chunk_tokens, with_hits=False):
    """Add this micro-batch's share of the gradient to the head's parameters.

    features [M, H]; labels: Labels; lm_head: the target's output module; num_labels: labels in the whole optimiser step, over
    all micro-steps and ranks, so that the shares add up to the gradient of the mean. with_hits: count top-1/top-5 hits too.
    Returns fp64 [K, 4]: per head the summed loss (unweighted by decay), the number of labels, top-1 and top-5 hits.
    """
    num_heads = len(objective.weights)
    shared_weight = usable_weight(head, lm_head.weight)
    totals = torch.zeros(num_heads, 4, dtype=torch.float64, device=features.device)
    for start in range(0, len(labels.positions), chunk_tokens):
        positions = labels.positions[start : start + chunk_tokens]
        tokens = labels.tokens[start : start + chunk_tokens]
        law = None
        if objective.soft_weight:
            with torch.no_grad():
                law = target_law(lm_head(features[positions - 1]))
        for k in range(num_heads):
            valid = labels.valid[k, start : start + chunk_tokens]
            # Labels without a feature of their own document read some other position and count for nothing.
            source = features[(positions - 2 - k).clamp_min(0)]
            logits = head.logits(source.to(head_dtype(head)), k, shared_weight)  # [C, V]
            loss = distillation_loss(logits, tokens, law, objective.hard_weight, objective.soft_weight)
            loss = torch.where(valid, loss, 0).sum()
            (loss * (objective.weights[k] / num_labels)).backward()
            totals[k, 0] += loss.detach()
            totals[k, 1] += valid.sum()
            if with_hits:
                best = logits.detach().topk(min(5, logits.shape[-1]), -1).indices  # [C, 5]
                hits = (best == tokens[:, None]) & valid[:, None]
                totals[k, 2] += hits[:, 0].sum()
                totals[k, 3] += hits.sum()
    return totals


def head_dtype(head):
    return next(head.parameters()).dtype


def usable_weight(head, lm_head_weight):
    """The target's lm_head as heads that share it multiply with it: in their dtype, unless autocast converts both."""
    if not head.config.shared_lm_head or torch.is_autocast_enabled(lm_head_weight.device.type):
        return lm_head_weight
    return lm_head_weight.to(head_dtype(head))


def summarize(totals, objective, num_labels):
    """The figures of one optimiser step for metrics.jsonl: the weighted loss, and loss, top-1 and top-5 of each head.

    totals: what `accumulate_gradients` returned, summed; num_labels: what it divided by. A head's own loss and hit rates are
    over its own labels, without its weight; hits are counted against the text.
    """
    losses, counts, top1, top5 = totals.t().tolist()
    line = {"loss": sum(w * loss for w, loss in zip(objective.weights, losses)) / num_labels}
    for k, count in enumerate(counts):
        shares = (losses[k], top1[k], top5[k])
        line |= {f"head{k}_{name}": share / max(count, 1) for name, share in zip(("loss", "top1", "top5"), shares)}
    return line


@torch.no_grad()
def count_teacher_forced_runs(head, features, labels, lm_head_weight, chunk_tokens):
    """Runs of consecutive top-1 hits of the heads against the text: what a chain would gain if the target wrote this text.

    features [M, H]; labels: Labels. A root at t counts if all K labels t+2 .. t+1+K are supervised and in its document.
    Returns (how often the run reaches head k, list of K ints; number of roots). The engine's own figure compares with the
    target's choices instead of the text's tokens; the two are different quantities.
    """
    num_heads, num_labels = labels.valid.shape
    lm_head_weight = usable_weight(head, lm_head_weight)
    hits = torch.zeros(num_heads, features.shape[0], dtype=torch.bool, device=features.device)  # by label position
    valid = torch.zeros_like(hits)
    for k in range(num_heads):
        valid[k, labels.positions] = labels.valid[k]
        for start in range(0, num_labels, chunk_tokens):
            positions = labels.positions[start : start + chunk_tokens]
            source = features[(positions - 2 - k).clamp_min(0)]
            best = head.logits(source.to(head_dtype(head)), k, lm_head_weight).argmax(-1)
            hits[k, positions] = best == labels.tokens[start : start + chunk_tokens]
    # Head k's label stands k places after head 0's: shift, so that a column holds one root's labels.
    length = max(features.shape[0] - (num_heads - 1), 0)
    run = torch.stack([hits[k, k : k + length] for k in range(num_heads)]).cumprod(0).bool()
    roots = torch.stack([valid[k, k : k + length] for k in range(num_heads)]).all(0)
    return (run & roots).sum(1).tolist(), int(roots.sum())
