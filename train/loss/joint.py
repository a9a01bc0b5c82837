"""Stage `joint` of Medusa-2 (arXiv 2401.10774, section 2.2.2): heads and a LoRA adapter of their target, trained together.

    loss = target_loss + medusa_weight * sum over heads k of weight_k loss_k

target_loss is either self-distillation, the KL from the frozen target's distribution (the same model without its adapter) to the
adapted target's, so that the adapter changes the features but hardly the distribution; or the cross entropy against the text.
loss_k is as in the stage `heads`, but against the adapted target's distribution, held fixed, because that distribution will check
the heads' drafts. The gradient of the heads' loss reaches the adapter through the features. lm_head stays the frozen target's, for
the target and for heads that share it.

The paper offers two ways that both work: raise the heads' weight slowly, or train the heads alone first. This is the second: the
stage starts from heads of the stage `heads`. The learning rates of heads and adapter rise together.

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
    Returns fp64 [1 + K, 5]: the totals of the target itself, then those of the heads.
    """
    frozen = None
    # A target in fp32 computes in fp32 whatever the heads do. In a bf16 target autocast changes only the adapter's products.
    own_autocast = autocast
    if target.dtype == torch.float32:
        own_autocast = torch.autocast(target.lm_head.weight.device.type, enabled=False)
    if Loss(target_loss).needs_target:
        # Gradients stay enabled, though nothing has one here: then both passes take the same attention, and an adapter that
        # adds nothing gives exactly the frozen distribution.
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
    """The figures of one optimiser step: `summarize` of the heads, target_loss, and the sum of both losses as loss.

    totals: the sum of results of `accumulate_joint_gradients`; objective: the heads', medusa_weight among its weights.
    """
    own, figures = totals[0, 0].item() / num_labels, summarize(totals[1:], objective, num_labels)
    return figures | {"loss": own + figures["loss"], "target_loss": own}


@torch.no_grad()
def held_out_loss(target, encoded, *, max_length, chunk_tokens):
    """Cross entropy per supervised token of held-out conversations, teacher-forced, of the model in its present state.

    encoded: list of (ids, supervised), cut at max_length tokens; a first token does not count, as nothing predicts it.
    Returns (nats per token, number of tokens).
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
    """An AcceptanceMeter on the adapted target, whose adapter is merged while it measures.

    It also measures how the adapter changed the target: heldout_loss of the adapted and frozen_heldout_loss of the frozen target,
    in nats per token, over heldout_tokens tokens.
    """

    def __init__(self, meter, adapter):
        self.meter, self.adapter, self.target = meter, adapter, meter.target
        self.source, self.measured_on = meter.source, meter.measured_on

    def measure(self, stop=None):
        """The result of AcceptanceMeter.measure with the held-out losses."""
        with self.adapter.disabled():
            frozen, _ = self._held_out_loss()
        with self.adapter.merged():
            adapted, count = self._held_out_loss()
            measured = self.meter.measure(stop)
        losses = {"heldout_loss": adapted, "frozen_heldout_loss": frozen, "heldout_tokens": count}
        return measured and measured | losses

    def _held_out_loss(self):
        """held_out_loss of the model in its present state."""
        meter = self.meter
        return held_out_loss(meter.target, meter.encoded, max_length=meter.max_length, chunk_tokens=meter.chunk_tokens)
