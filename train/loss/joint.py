"""Stage `joint` of Medusa-2 (arXiv 2401.10774, section 2.2.2): heads and a LoRA adapter of their target, trained together.

    loss = target_loss + medusa_weight * sum over heads k of weight_k loss_k

target_loss, with self-distillation: KL from the frozen target's distribution (the same model without its adapter) to the adapted
one's, so that the adapter may change what the target computes and hardly what it says; or the cross entropy against the text.
loss_k: as in the stage `heads`, but against the adapted target's distribution, held fixed: that distribution is the one which
will check the heads' drafts. Through the features the gradient of the heads' loss reaches the adapter. lm_head stays the frozen
target's, for the target and for heads that share it.

Where the paper raises the heads' weight slowly or trains the heads alone first (both work, it says), this is the second: the
stage starts from heads of the first one. The learning rates of both rise together.

Letters: B rows, T tokens per row, M = B T, H hidden size, V vocabulary, C labels of a chunk, K heads.
"""

import torch
import torch.nn.functional as F

from ...heads.head import Predictions
from .distillation import Objective, accumulate_gradients, summarize
from .losses import Loss

TARGET_LOSSES = ("kl", "hard")


def accumulate_joint_gradients(
    head,
    target,
    adapter,
    *,
    inputs,
    labels,
    objective,
    target_loss,
    num_labels,
    chunk_tokens,
    autocast,
    with_hits=False,
):
    """Add this micro-batch's share of the gradient to the parameters of the head and of the adapter.

    target: FrozenTarget that the TargetAdapter `adapter` sits on; inputs: (input_ids, position_ids, document_ids), [B, T] each;
    labels, num_labels, chunk_tokens, with_hits: as for `accumulate_gradients`; objective: of the heads, medusa_weight among its
    weights; target_loss: "kl" or "hard"; autocast: the context that heads compute in.
    Returns fp64 [1 + K, 5]: the target's own totals, then the heads'.
    """
    frozen = None
    # A target in fp32 computes in fp32 whatever the heads do; of one in bf16 only the adapter's products are affected.
    own_autocast = autocast
    if target.dtype == torch.float32:
        own_autocast = torch.autocast(target.lm_head.weight.device.type, enabled=False)
    if Loss(target_loss).needs_target:
        # Not without gradients, though nothing has one here: then both passes take the same attention, and an adapter that adds
        # nothing gives the frozen distribution itself.
        with adapter.disabled():
            frozen = target.forward(*inputs).detach().flatten(0, 1)  # [M, H]
    with own_autocast:
        adapted = target.forward(*inputs)  # [B, T, H], with a graph
    # Every loss leaves its gradient at a copy in fp32, and one backward pass takes the sum through the target.
    features = adapted.detach().to(torch.promote_types(adapted.dtype, torch.float32)).requires_grad_()
    fixed = adapted.detach().flatten(0, 1)  # [M, H]
    own_objective = Objective(Loss(target_loss), [1.0])
    shared = {"lm_head": target.lm_head, "num_labels": num_labels, "chunk_tokens": chunk_tokens, "with_hits": with_hits}
    with autocast:
        predictions = head.predict(features, *inputs, target.lm_head.weight)
        heads = accumulate_gradients(predictions, fixed, labels, objective=objective, **shared)
    with own_autocast:
        predictions = own_predictions(features, target.lm_head)
        distribution_from = fixed if frozen is None else frozen
        own = accumulate_gradients(predictions, distribution_from, labels, objective=own_objective, **shared)
    adapted.backward(features.grad.to(adapted.dtype))
    return torch.cat([own, heads])


def own_predictions(features, lm_head):
    """The target's own predictions, as those of a head: features [B, T, H] -> Predictions of one depth.

    Depth 0 of the root t predicts x_{t+2}, and the target does so from the feature at t + 1.
    """
    dtype = lm_head.weight.dtype
    return Predictions([features.flatten(0, 1).roll(-1, 0)], lambda rows, k: lm_head(rows.to(dtype)))


def summarize_joint(totals, objective, num_labels):
    """The figures of one optimiser step: those of `summarize`, of the heads, with target_loss and the sum of both as loss.

    totals: what `accumulate_joint_gradients` returned, summed; objective: the heads', medusa_weight among its weights.
    """
    own, figures = totals[0, 0].item() / num_labels, summarize(totals[1:], objective, num_labels)
    return figures | {"loss": own + figures["loss"], "target_loss": own}


@torch.no_grad()
def held_out_loss(target, encoded, *, max_length, chunk_tokens):
    """Cross entropy per supervised token of held-out conversations, teacher-forced, by the model as it is now.

    encoded: list of (ids, supervised), of which at most max_length tokens count; supervised first tokens have nothing that
    predicts them. Returns (nats per token, number of tokens).
    """
    device, total, count = target.lm_head.weight.device, 0.0, 0
    for ids, supervised in encoded:
        input_ids = torch.tensor([ids[:max_length]], device=device)  # [1, T]
        places = torch.arange(input_ids.shape[1], device=device)
        features = target.features(input_ids, places[None], torch.zeros_like(input_ids))[0]  # [T, H]
        labels = torch.tensor(supervised[:max_length], device=device)[1:].nonzero()[:, 0] + 1
        for positions in labels.split(chunk_tokens):
            logits = target.lm_head(features[positions - 1]).float()  # [C, V]
            total += F.cross_entropy(logits, input_ids[0, positions], reduction="sum").item()
        count += len(labels)
    return total / max(count, 1), count


class AdaptedMeter:
    """An AcceptanceMeter on the adapted target, merged while it measures, and beside it what the adapter did to the target itself:
    heldout_loss of the adapted and frozen_heldout_loss of the frozen target, in nats per token of heldout_tokens.
    """

    def __init__(self, meter, adapter):
        self.meter, self.adapter, self.target = meter, adapter, meter.target

    def measure(self):
        """What AcceptanceMeter.measure returns, with those figures."""
        with self.adapter.disabled():
            frozen, _ = self._held_out_loss()
        with self.adapter.merged():
            adapted, count = self._held_out_loss()
            measured = self.meter.measure()
        losses = {"heldout_loss": adapted, "frozen_heldout_loss": frozen, "heldout_tokens": count}
        return measured and measured | losses

    def _held_out_loss(self):
        """Of the model as it is now."""
        meter = self.meter
        return held_out_loss(meter.target, meter.encoded, max_length=meter.max_length, chunk_tokens=meter.chunk_tokens)
