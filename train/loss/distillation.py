"""Distil the frozen target into a head of any family: labels, loss chunk by chunk, metrics.

Head.predict (heads/head.py) gives the predictions.

Alignment: depth k (from 0; head k, step k) of the root at t predicts x_{t+2+k}. Seen from the label at y = t + 2 + k: the soft
label is the target's distribution at y - 1, the root lies at y - 2 - k, and label and root belong to one document. All depths
therefore share one projection of the target per label.

    loss = sum over y, k of weight_k row_loss(y, k)  /  number of labels in the whole optimiser step, all ranks
    row_loss = token_weight token_loss + feature_weight feature_loss

token_loss is one of kernels/training/distill_loss.py; its lk depends on the previous step (Objective). feature_loss, for heads
whose states are features (EAGLE), is the smooth L1 distance of the state at y - 2 - k from the target's feature at y - 1,
averaged over its H values. Only supervised positions are projected, `chunk_tokens` at a time, and the backward of each chunk
follows at once: no tensor of [all tokens, V] exists. Beside the weights there are at most two tensors [C, V], in the dtype of the
logits: the target's, shared by all depths, and those of one depth, which the loss turns into their gradient. (While a draft
vocabulary's part is taken out of the target's logits, that part is a third.) Depths with one function over a draft vocabulary are
projected together, as many as fit into the second tensor: every backward pass through an lm_head adds a gradient of its size to the
one before, which took longer than the product for chunks of 1024 labels. Where a depth's state depends on earlier states
(recurrent heads), the chunks leave their gradients at the states, and one backward pass at the end goes on to the parameters.

Letters: B rows, T tokens per row, M = B T, N labels, C labels of a chunk, S width of a state, H hidden size, V vocabulary,
K depths, G depths of a group.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from ...kernels.training.distill_loss import distill_loss
from ...kernels.training.target_distribution import target_distribution
from .losses import Loss


@dataclass(frozen=True)
class Labels:
    """The supervised positions of a micro-batch, counted in the flattened rows [M]."""

    positions: torch.Tensor  # [N] positions of the labels
    tokens: torch.Tensor  # [N] the labels
    valid: torch.Tensor  # [K, N] bool: depth k has its root in the label's own document


def find_labels(input_ids, document_ids, supervised, num_depths):
    """Labels of packed rows.  input_ids, document_ids (-1 on padding), supervised: [B, T]  ->  Labels

    Every label has a root at least for depth 0; later depths lack the labels too close to their document's start.
    """
    valid = []
    for k in range(num_depths):
        same = torch.zeros_like(supervised)
        if 2 + k < document_ids.shape[1]:
            same[:, 2 + k :] = document_ids[:, 2 + k :] == document_ids[:, : -(2 + k)]
        valid.append((same & supervised & (document_ids >= 0)).flatten())
    valid = torch.stack(valid)  # [K, M]
    positions = valid[0].nonzero()[:, 0]
    return Labels(positions, input_ids.flatten()[positions], valid[:, positions])


@dataclass(frozen=True)
class Objective:
    """The objective that is minimised: the loss of a row, and one weight per depth k.

    rates: for lk, each depth's mean rate of acceptance in the previous step, over all ranks; None in the first step.
    """

    loss: Loss
    weights: list
    token_weight: float = 1.0
    feature_weight: float = 0.0
    rates: list | None = None

    @property
    def adapts(self):
        """Does the loss follow the rate of acceptance, so that every step must measure it?"""
        return self.loss.name == "lk"

    def at(self, rates):
        """The objective of a step, given the depths' rates of acceptance in the previous step."""
        return replace(self, rates=rates)

    def kl_weight(self, k):
        """The weight of kl within lk at depth k; 1 in the first step."""
        return self.loss.kl_weight(self.rates[k] if self.rates else 0.0)

    def after(self, totals):
        """The objective of the next step.  totals: what `accumulate_gradients` returned, summed over ranks and micro-steps."""
        if not self.adapts:
            return self
        before = self.rates or [0.0] * len(self.weights)
        counted = zip(totals[:, 4].tolist(), totals[:, 1].tolist(), before, strict=True)
        return self.at([accepted / count if count else rate for accepted, count, rate in counted])


def accumulate_gradients(
    predictions, features, labels, *, lm_head, objective, num_labels, chunk_tokens, with_hits=False
):
    """Add this micro-batch's share of the gradient to the parameters that made the predictions.

    features [M, H]: the target's last states; labels: Labels of at least K depths; lm_head: the target's, a module; num_labels: the
    divisor, the labels of the whole optimiser step on all ranks. A label outside a draft vocabulary has no hard loss: it counts
    only in num_labels. Under torch.no_grad only the totals are made.
    Returns fp64 [K, 5], per depth: sum of token losses, number of labels, and (with_hits, or if the objective adapts) top-1 hits,
    top-5 hits, and the sum of rates of acceptance if the loss needs the target's distribution. With a feature_weight [K, 6]: the
    sum of feature losses comes last.
    """
    num_depths, draft_ids, loss = len(objective.weights), predictions.draft_ids, objective.loss
    with_hits = with_hits or objective.adapts
    regresses = objective.feature_weight > 0
    totals = torch.zeros(num_depths, 5 + regresses, dtype=torch.float64, device=features.device)
    gradients = [torch.zeros_like(state) if state.requires_grad else None for state in predictions.states]
    groups = predictions.groups(lm_head.weight.shape[0])
    if draft_ids is not None:
        places = torch.full((lm_head.weight.shape[0],), -1, device=draft_ids.device)
        places[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)  # [V of the target], -1 outside
    for start in range(0, len(labels.positions), chunk_tokens):
        positions = labels.positions[start : start + chunk_tokens]
        tokens = labels.tokens[start : start + chunk_tokens]
        valid = labels.valid[:, start : start + chunk_tokens]  # [K, C]
        distribution = None
        if loss.needs_target:
            with torch.no_grad():
                distribution = target_distribution(
                    lm_head(features[positions - 1]), draft_ids, loss.top_k if loss.top_k_weight else 0
                )
        if draft_ids is not None:
            tokens = places[tokens]
            if loss.needs_label:
                valid = valid & (tokens >= 0)
        for group in groups:
            # Labels without a feature of their own document read another position, and do not count.
            sources = [(positions - 2 - k).clamp_min(0) for k in group]
            rows = torch.cat([predictions.states[k].detach()[source] for k, source in zip(group, sources)])
            rows.requires_grad_(gradients[group[0]] is not None)
            logits = predictions.logits(rows, group[0])  # [G C, V]
            gradient = logits.detach()  # the same memory; no backward reads the logits
            ends, given = [logits], [gradient]
            for k, part, states in zip(group, gradient.split(len(positions)), rows.split(len(positions))):
                share = objective.weights[k] / num_labels
                figures = distill_loss(
                    part,
                    tokens,
                    valid[k],
                    distribution,
                    name=loss.formula,
                    kl_weight=objective.kl_weight(k),
                    top_k_weight=loss.top_k_weight,
                    factor=objective.token_weight * share,
                    measure=with_hits,
                )
                if regresses:
                    feature_loss = torch.where(valid[k], _smooth_l1(states, features[positions - 1]), 0).sum()
                    ends.append(feature_loss * (objective.feature_weight * share))
                    given.append(None)
                    totals[k, 5] += feature_loss.detach()
                totals[k, 0] += figures.loss.sum()
                totals[k, 1] += valid[k].sum()
                if with_hits:
                    totals[k, 2] += (figures.rank == 1).sum()
                    totals[k, 3] += (figures.rank <= 5).sum()
                    if figures.alpha is not None:
                        totals[k, 4] += figures.alpha.sum()
            if logits.requires_grad:
                torch.autograd.backward(ends, given)
            if rows.grad is not None:
                for k, source, part in zip(group, sources, rows.grad.split(len(positions))):
                    gradients[k].index_add_(0, source, part)
            del logits, gradient, part, ends, given  # freed before the next group's are made
    carrying = [k for k, gradient in enumerate(gradients) if gradient is not None]
    torch.autograd.backward([predictions.states[k] for k in carrying], [gradients[k] for k in carrying])
    return totals


def _smooth_l1(states, features):
    """Distance of [C, H] from [C, H] in fp32 at least, averaged over H  ->  [C]"""
    wide = torch.promote_types(states.dtype, torch.float32)
    return F.smooth_l1_loss(states.to(wide), features.to(wide), reduction="none").mean(-1)


def summarize(totals, objective, num_labels):
    """The figures of one optimiser step for metrics.jsonl: the weighted loss, and loss, top-1, top-5 and alpha of each depth.

    totals: the sum of results of `accumulate_gradients`; num_labels: its divisor. A depth's own losses (of tokens, and of features
    where they count), hit rates and alpha are over its own labels, without weights. Hits are counted against the text; alpha is the
    mean chance that a token drawn from the head is accepted (only if the loss needs the target's distribution).
    """
    losses, counts, *others = totals.t().tolist()
    names = ("loss", "top1", "top5", "alpha", "feature_loss")
    columns = dict(zip(names, (losses, *others)))
    if not objective.loss.needs_target:
        del columns["alpha"]
    features = columns.get("feature_loss", [0.0] * len(losses))
    parts = zip(objective.weights, losses, features, strict=True)
    weighed = (w * (objective.token_weight * one + objective.feature_weight * other) for w, one, other in parts)
    line = {"loss": sum(weighed) / num_labels}
    for k, count in enumerate(counts):
        line |= {f"head{k}_{name}": column[k] / max(count, 1) for name, column in columns.items()}
    return line


@torch.no_grad()
def count_teacher_forced_runs(predictions, labels, chunk_tokens):
    """Count runs of consecutive top-1 hits against the text: the acceptance of a chain if the target wrote this text.

    predictions: Predictions over M rows; labels: Labels of its K depths. A root at t counts if all K labels t+2 .. t+1+K are
    supervised and in its document. Returns (list of K ints: how many runs reach depth k; number of roots). The engine's figure
    compares with the target's own choices instead of the text's tokens, so the two differ.
    """
    num_depths, num_labels = labels.valid.shape
    num_rows = len(predictions.states[0])
    hits = torch.zeros(num_depths, num_rows, dtype=torch.bool, device=labels.tokens.device)  # by label position
    valid = torch.zeros_like(hits)
    for k in range(num_depths):
        valid[k, labels.positions] = labels.valid[k]
        for start in range(0, num_labels, chunk_tokens):
            positions = labels.positions[start : start + chunk_tokens]
            best = predictions.logits(predictions.states[k][(positions - 2 - k).clamp_min(0)], k).argmax(-1)
            if predictions.draft_ids is not None:
                best = predictions.draft_ids[best]
            hits[k, positions] = best == labels.tokens[start : start + chunk_tokens]
    # Depth k's label stands k places after depth 0's: shift, so that a column holds one root's labels.
    length = max(num_rows - (num_depths - 1), 0)
    run = torch.stack([hits[k, k : k + length] for k in range(num_depths)]).cumprod(0).bool()
    roots = torch.stack([valid[k, k : k + length] for k in range(num_depths)]).all(0)
    return (run & roots).sum(1).tolist(), int(roots.sum())
