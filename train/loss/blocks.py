"""What a block drafter (heads/block.py) learns from packed rows: anchors drawn at random, the labels of their blocks, the loss.

An anchor is a supervised token x_a, with a token of its document before it and a supervised one after it. Its block sees the
features of that document up to place a - 1 and holds x_a in its first slot, as in drafting, where x_a is the newest token. Depth k
(from 0) predicts x_{a+1+k}: a label if that token is supervised and of the anchor's document. Its soft label is the target's
distribution at a + k, and an edge or a selector is given the text's own x_{a+k}.

    loss = sum over anchors and depths of weight row_loss / number of labels of the whole optimiser step, of all depths and ranks

row_loss is one of kernels/training/distill_loss.py. The weights are given per depth, or follow from a block's own losses (D-PACE,
arXiv 2605.18810; for the hard loss, whose q_i = exp(-loss_i) is the chance of the text's token at depth i):

    weight_k = sum over m >= k of prod over i <= m of (q_i + 1) / 2         over the block's labels, without a gradient

A head with a confidence learns the rate of acceptance: the label of a slot's confidence is alpha = sum min(p, q), held fixed, and
the binary cross entropy from it, times confidence_weight, is added to row_loss, as in DSpark.

A head with a selector learns in row_loss the scores U of its slots alone, which decide who the candidates are. Their choice is
learnt from the cross entropy of the selector's scores S over the candidates against the text's token: selector_weight times it is
added to row_loss. Where that token is no candidate there is nothing to choose, and the term is 0, as NVIDIA's trainer has it; the
speculators library puts the token in the last candidate's place instead. Its gradient reaches U too.

Anchors are drawn from the run's seed, the step and the row's place in the step, so every rank knows those of all ranks. Blocks are
projected a few at a time, all depths in one product, and the backward of each chunk follows at once: no tensor of [all labels, V]
exists. Labels that blocks of a chunk share are projected by the target once.

Letters: N rows of an optimiser step, B of a micro-batch, T tokens per row, R blocks per row, K depths, C blocks of a chunk, H
hidden size, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from ...heads.head import cast_lm_head
from ...kernels.training.distill_loss import distill_loss
from ...kernels.training.target_distribution import TargetDistribution, target_distribution
from .distillation import Objective, summarize

_NO_ANCHOR = 1  # stands where a row has fewer anchors than another; its block has no labels


@dataclass(frozen=True)
class BlockObjective(Objective):
    """An Objective of blocks.

    dynamic: D-PACE's weights instead of those of the depths; confidence_weight: of the confidence's loss, selector_weight: of the
    selector's; 0: there is none.
    """

    dynamic: bool = False
    confidence_weight: float = 0.0
    selector_weight: float = 0.0

    @property
    def needs_target(self):
        """Whether the losses need the target's distribution, and not only the text."""
        return self.loss.needs_target or self.confidence_weight > 0


@dataclass(frozen=True)
class Blocks:
    """The blocks of some rows, on the CPU."""

    anchors: torch.Tensor  # int64 [N, R], ascending
    valid: torch.Tensor  # bool [N, R, K]: depth k has a label

    @property
    def num_labels(self):
        return int(self.valid.sum())

    def of_rows(self, first, count):
        """Those of `count` rows from the `first` on, with as few places for blocks as they need."""
        anchors, valid = self.anchors[first : first + count], self.valid[first : first + count]
        most = max(int(valid[..., 0].sum(1).max()), 1)
        return Blocks(anchors[:, :most], valid[:, :most])

    def seen(self, input_ids):
        """What the head is told: the tokens in the first slots, and the last place that each block sees.  -> two [B, R]"""
        anchors = self.anchors.to(input_ids.device)
        return input_ids.gather(1, anchors), anchors - 1


def draw_blocks(rows, num_anchors, num_depths, *, seed, step):
    """The Blocks of an optimiser step's `rows` (PackedRows): up to num_anchors in each row, without repetition."""
    marked, documents = rows.supervised & (rows.document_ids >= 0), rows.document_ids
    starts = torch.zeros_like(marked)
    goes_on = documents[:, 1:] == documents[:, :-1]
    starts[:, 1:] = marked[:, 1:] & goes_on
    starts[:, :-1] &= marked[:, 1:] & goes_on
    starts[:, -1] = False
    drawn = []
    for place, row in enumerate(starts):
        found = row.nonzero()[:, 0].numpy()
        if len(found) > num_anchors:
            rng = np.random.default_rng((seed, step, place))
            found = np.sort(rng.choice(found, num_anchors, replace=False))
        drawn.append(torch.from_numpy(found))
    anchors = torch.full((len(drawn), max(1, *map(len, drawn))), _NO_ANCHOR)
    real = torch.zeros(anchors.shape, dtype=torch.bool)
    for row, found in enumerate(drawn):
        anchors[row, : len(found)] = found
        real[row, : len(found)] = True
    places = anchors[..., None] + 1 + torch.arange(num_depths)  # [N, R, K]
    inside, flat = places < documents.shape[1], places.clamp(max=documents.shape[1] - 1).flatten(1)
    valid = marked.gather(1, flat) & (
        documents.gather(1, flat) == documents.gather(1, anchors).repeat_interleave(num_depths, 1)
    )
    return Blocks(anchors, valid.view_as(inside) & inside & real[..., None])


def accumulate_block_gradients(
    head, states, blocks, input_ids, last, *, lm_head, objective, num_labels, chunk_tokens, with_hits=False
):
    """Add this micro-batch's share of the gradient to the head's parameters.

    states [B, R, K, H]: of the slots that predict, with their graph; input_ids [B, T]; last [B T, H]: the target's last states;
    lm_head: the target's, a module; objective: BlockObjective of K depths; num_labels: the divisor, the labels of the whole
    optimiser step on all ranks. A label outside a draft vocabulary has no hard loss: it counts only in num_labels. Under
    torch.no_grad only the totals are made.
    Returns fp64 [K, 10], per depth: sum of losses, number of labels, and (with_hits, or if the objective adapts) top-1 hits, top-5
    hits and the sum of rates of acceptance if the target's distribution is needed; then the sum of what is minimised, and of the
    confidence's losses; of a selector the sum of losses, of labels that are its first choice, and of labels among its candidates.
    """
    device, K, loss = states.device, states.shape[2], objective.loss
    confident, selects = objective.confidence_weight > 0, head.candidate_selector is not None
    with_hits = with_hits or objective.adapts or confident
    weight, draft_ids, ids = cast_lm_head(lm_head.weight, states.dtype), head.draft_token_ids, input_ids.flatten()
    totals = torch.zeros(K, 10, dtype=torch.float64, device=device)
    flat, carries = states.detach().flatten(0, 1), states.requires_grad and torch.is_grad_enabled()  # [B R, K, H]
    gradients = torch.zeros_like(flat) if carries else None
    outside = None
    if draft_ids is not None:
        outside = torch.full((weight.shape[0],), -1, device=device)
        outside[draft_ids] = torch.arange(len(draft_ids), device=device)  # [V of the target], -1 outside
    for chosen, before, valid in _chunks(blocks, input_ids.shape[1], max(chunk_tokens // K, 1)):
        common, same = before.unique(return_inverse=True)  # on the CPU, so nothing waits for the device
        chosen, before, valid, common, same = (one.to(device) for one in (chosen, before, valid, common, same))
        tokens, previous = ids[before + 1], ids[before]  # [K, C]
        target = None
        if objective.needs_target:
            with torch.no_grad():
                target = target_distribution(lm_head(last[common]), draft_ids)
        if outside is not None:
            tokens = outside[tokens]
            valid = valid & (tokens >= 0) if loss.needs_label else valid
        rows = flat[chosen].transpose(0, 1).flatten(0, 1).requires_grad_(carries)  # [K C, H], depth by depth
        if selects:
            logits = head.slot_logits(rows, weight)  # [K C, V]
            choice = Choice(head.candidate_selector, logits.detach(), rows, previous.flatten(), tokens, valid)
        else:
            logits = head.logits(rows, previous.flatten(), weight)
        gradient = logits.detach()  # the same memory; no backward reads the logits
        found = []
        for k, part in enumerate(gradient.chunk(K)):
            figures = distill_loss(
                part,
                tokens[k],
                valid[k],
                _rows_of(target, same[k]),
                name=loss.formula,
                kl_weight=objective.kl_weight(k),
                factor=(1.0 if objective.dynamic else objective.weights[k]) / num_labels,
                measure=with_hits,
            )
            found.append((figures.loss, figures.alpha))
            if with_hits:
                totals[k, 2] += (figures.rank == 1).sum()
                totals[k, 3] += (figures.rank <= 5).sum()
                if figures.alpha is not None:
                    totals[k, 4] += figures.alpha.sum()
        losses = torch.stack([one for one, _ in found])  # [K, C]
        weights = losses.new_tensor(objective.weights)[:, None]
        if objective.dynamic:
            weights = dynamic_weights(losses, valid)
            gradient *= weights.flatten()[:, None].to(gradient.dtype)
        ends, given, weighed = [logits], [gradient], weights * losses
        if confident:
            rates = torch.stack([rate for _, rate in found])
            sure = head.confidence_logits(rows, previous.flatten()).view_as(rates).to(rates.dtype)  # [K, C]
            unsure = F.binary_cross_entropy_with_logits(sure, rates, reduction="none") * valid
            weighed_unsure = objective.confidence_weight * weights * unsure
            ends.append(weighed_unsure.sum() / num_labels)
            given.append(None)
            weighed = weighed + weighed_unsure.detach()
            totals[:, 6] += unsure.detach().sum(1)
        if selects:
            weighed_choice = objective.selector_weight * weights * choice.losses
            if carries:
                (weighed_choice.sum() / num_labels).backward()
                choice.add_gradient(gradient)
            weighed = weighed + weighed_choice.detach()
            totals[:, 7:] += choice.figures
        if logits.requires_grad:
            torch.autograd.backward(ends, given)
        if carries:
            gradients[chosen] = rows.grad.unflatten(0, (K, -1)).transpose(0, 1)
        totals[:, 0] += losses.sum(1)
        totals[:, 1] += valid.sum(1)
        totals[:, 5] += weighed.sum(1)
        del logits, gradient, target, part, ends, given  # freed before the next chunk's are made
    if carries:
        states.backward(gradients.view_as(states))
    return totals


class Choice:
    """A selector's choice at [K, C] labels: its losses, 0 where not valid or where the label is no candidate.

    logits [K C, V]: U, read before their gradient overwrites them; rows [K C, H]: states; before [K C]: the tokens before;
    tokens and valid [K, C]: the labels
    """

    def __init__(self, selector, logits, rows, before, tokens, valid):
        self.candidates = selector.candidates(logits)  # [K C, top_k]
        self.unary = logits.gather(1, self.candidates).to(torch.promote_types(logits.dtype, torch.float32))
        self.unary.requires_grad_(rows.requires_grad)
        scores = selector.scores(self.unary, self.candidates, rows, selector.before(before))
        same = self.candidates == tokens.flatten()[:, None]
        found = same.any(1) & valid.flatten()
        losses = F.cross_entropy(scores, same.to(torch.uint8).argmax(1), reduction="none") * found
        self.losses = losses.view_as(valid)
        first = found & same.gather(1, scores.argmax(1, keepdim=True))[:, 0]
        figures = torch.stack((losses.detach(), first, found))  # [3, K C]
        self.figures = figures.unflatten(1, valid.shape).sum(2).T  # [K, 3]

    def add_gradient(self, gradient):
        """Add the losses' gradient by U, after their backward, to that of the logits [K C, V]."""
        gradient.scatter_add_(1, self.candidates, self.unary.grad.to(gradient.dtype))


def _chunks(blocks, row_length, size):
    """The real blocks, `size` at a time: (their numbers among B R [C], the places in B T before their labels [K, C], valid [K, C]).

    Where there is no label the place is that of the block's first one.
    """
    chosen = blocks.valid[..., 0].flatten().nonzero()[:, 0]
    for some in chosen.split(size):
        valid = blocks.valid.flatten(0, 1)[some]  # [C, K]
        first = (blocks.anchors + torch.arange(len(blocks.anchors))[:, None] * row_length).flatten()[some]
        before = torch.where(valid, first[:, None] + torch.arange(valid.shape[1]), first[:, None])
        yield some, before.T.contiguous(), valid.T.contiguous()


def _rows_of(distribution, index):
    """Some rows of a TargetDistribution, or None for none."""
    return distribution and TargetDistribution(*(part if part is None else part[index] for part in distribution))


def dynamic_weights(losses, valid):
    """D-PACE's weights of blocks.  losses: hard ones, 0 where not valid; both [K, C]  ->  [K, C], without a gradient"""
    reached = ((1 + (-losses.detach()).exp()) / 2).cumprod(0) * valid
    return reached.flip(0).cumsum(0).flip(0) * valid


def summarize_blocks(totals, objective, num_labels):
    """`summarize` of the totals of `accumulate_block_gradients`, with the loss that was minimised, and those of other parts.

    A selector's top1 is the share of labels that are its first choice, its recall that of labels among its candidates.
    """
    line = summarize(totals[:, :5], objective, num_labels)
    line["loss"] = totals[:, 5].sum().item() / num_labels
    if objective.confidence_weight:
        for k, (total, count) in enumerate(totals[:, [6, 1]].tolist()):
            line[f"head{k}_confidence_loss"] = total / max(count, 1)
    if objective.selector_weight:
        for k, (count, *figures) in enumerate(totals[:, [1, 7, 8, 9]].tolist()):
            for name, total in zip(("loss", "top1", "recall"), figures):
                line[f"head{k}_selector_{name}"] = total / max(count, 1)
    return line
