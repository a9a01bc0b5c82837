"""Memory of a training step, estimated before the first one: weights, gradients, moments, activations, logits.

The head runs over short rows of three lengths. What autograd saves there is a constant (copies of weights), a part per token and,
where attention keeps its scores, a part per pair of tokens of a row. So the long rows need not be tried, and no family is named.

Not counted: what the allocator wastes, NCCL's buffers, the target's pass without a graph, which ends before the head's begins, and
the activations of a target whose adapter is trained.

Letters: C labels of a chunk, V vocabulary.
"""

from dataclasses import dataclass

import torch

from ...heads.packed_attention import plain_attention
from ...inference.models.memory import free_bytes, in_gib

_LENGTHS = (8, 16, 32)  # of the rows that are tried
_BACKWARD = 0.5  # a step's backward works with gradients of this share of what the step saved


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device.  target, head: weights

    logits: of a chunk, and what its product keeps; per_token: the part of `activations` that every token of a micro-step adds;
    to_come: the part of all that is not yet allocated when the estimate is made.
    """

    target: int
    head: int
    gradients: int
    moments: int
    activations: int
    logits: int
    per_token: int
    to_come: int

    @property
    def parts(self):
        """{name: bytes}"""
        parts = {"target": self.target, "head": self.head, "gradients": self.gradients, "optimiser": self.moments}
        return parts | {"logits": self.logits, "activations": self.activations}

    @property
    def total(self):
        return sum(self.parts.values())

    def describe(self, num_tokens):
        """One line.  num_tokens: of a micro-step"""
        listed = ", ".join(f"{name} {in_gib(size)}" for name, size in self.parts.items())
        return (
            f"about {in_gib(self.total)}: {listed} ({num_tokens} tokens at once, {self.per_token / 2**20:.3f} MiB each)"
        )


def estimate_memory(head, target, optimizer, *, batch_rows, row_length, chunk_tokens, num_depths, autocast, every=1):
    """The MemoryEstimate of this process.

    optimizer: of build_optimizer; num_depths: how many the loss counts; autocast: the context that the head computes in; every: it
    predicts after one of so many tokens.
    """
    updated = sum(parameter.nbytes for group in optimizer.param_groups for parameter in group["params"])
    buffer = getattr(optimizer, "buffer", None)  # of ShardedAdamW: all gradients; this process updates a part
    targets = _storages(_local(tensor) for tensor in (*target.model.parameters(), *target.model.buffers()))
    heads = _storages(head.parameters())
    with plain_attention(), autocast:  # FlexAttention would be compiled for these lengths
        kept, working = _activations(head, target, num_depths, every)
        num_labels = min(chunk_tokens, batch_rows * row_length)
        logits = chunk_bytes(head, target, num_labels=num_labels, num_depths=num_depths)

    def of_all_rows(constant, per_token, per_pair):
        per_pair = 0 if target.lm_head.weight.is_cuda else per_pair  # FlexAttention keeps no scores
        return round(constant + batch_rows * row_length * (per_token + per_pair * row_length))

    passing = of_all_rows(*working)
    if head.checkpoint_steps and head.steps_in_a_pass:  # they are computed again after the last chunk is gone
        passing = max(passing - logits, 0)
    gradients, moments = updated if buffer is None else buffer.nbytes, 2 * updated
    activations = of_all_rows(*kept) + passing
    return MemoryEstimate(
        target=sum(targets.values()),
        head=sum(size for place, size in heads.items() if place not in targets),
        gradients=gradients,
        moments=moments,
        activations=activations,
        logits=logits,
        per_token=round(kept[1] + working[1]),
        to_come=moments + activations + logits + (gradients if buffer is None else 0),
    )


def _activations(head, target, num_depths, every):
    """Bytes of activations, twice (constant, per token, per pair of tokens of a row).

    What all steps save; and what the backward pass of the last one works with: its gradients, and with checkpoint_steps all that is
    computed again.
    """

    def saved(count):
        lengths = [n * every for n in _LENGTHS]
        shape = {"num_depths": count, "every": every}
        return _fit(lengths, [saved_bytes(head, target, row_length=n, **shape) if count else 0 for n in lengths])

    kept, checkpointed = saved(num_depths), head.checkpoint_steps
    head.checkpoint_steps = False
    whole, before = saved(num_depths), saved(num_depths - 1)
    head.checkpoint_steps = checkpointed
    share = _BACKWARD + checkpointed
    if checkpointed and head.steps_in_a_pass:
        before = [every - (every - one) / head.steps_in_a_pass for every, one in zip(whole, kept)]
    kept = whole[0], *kept[1:]  # autocast keeps its copies of the weights in any case
    return kept, [share * (every - less) for every, less in zip(whole, before)]


def saved_bytes(head, target, *, row_length, num_depths, every=1):
    """Bytes of one row: the target's features, what autograd saves, and the gradients of the states."""
    return _try(head, target, row_length, num_depths, every)[1]


def chunk_bytes(head, target, *, num_labels, num_depths):
    """Bytes of a chunk of C labels: the logits of target and head, and what autograd saves of the head's product."""
    predictions, _, weights = _try(head, target, 2, num_depths)
    state, together = predictions.states[0], len(predictions.groups(target.vocab_size)[0])

    def needed(count):
        saved = {}
        with _noting(saved):
            logits = predictions.logits(state.new_zeros(together * count, state.shape[-1]).requires_grad_(), 0)
        # For a moment a draft vocabulary's part of the target's logits is a third. On the CPU the loss is plain torch, in fp32.
        own = logits.nbytes + (0 if predictions.draft_ids is None else logits.nbytes // together)
        own += 0 if logits.is_cuda else 3 * 4 * logits.numel() // together
        return _beside(saved, weights) + count * target.vocab_size * target.dtype.itemsize + own

    few, more = needed(1), needed(2)
    return few + (num_labels - 1) * (more - few)


def _try(head, target, row_length, num_depths, every=1):
    """(Predictions, saved_bytes, the storages of the weights) of one row."""
    layers, lm_head = head.aux_layers, target.lm_head.weight
    places = {"device": lm_head.device}
    features = torch.zeros(1, row_length, (1 + len(layers)) * target.hidden_size, dtype=target.dtype, **places)
    rows = [torch.zeros(1, row_length, dtype=torch.int64, **places) for _ in range(3)]
    weights, saved = _storages([lm_head, *head.parameters()]), _storages([features, *rows])
    with _noting(saved):
        fewer = {"every": every} if every > 1 else {}
        predictions = head.predict(target.split(features, layers)[1], *rows, lm_head, num_depths, **fewer)
    gradients = sum(state.nbytes for state in predictions.states if state.requires_grad)
    return predictions, _beside(saved, weights) + gradients, weights


def _noting(saved):
    """A context in which the storages of all tensors that autograd saves are added to `saved`."""

    def note(tensor):
        saved.update(_storages([tensor]))
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)


def _storages(tensors):
    """{storage: its bytes}; tensors that share one count once."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage.nbytes() for storage in found}


def _beside(saved, weights):
    return sum(size for place, size in saved.items() if place not in weights)


def _local(tensor):
    """This rank's part of a tensor that FSDP has divided."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _fit(lengths, sizes):
    """(constant, per token, per pair) of the sizes at three lengths, a polynomial of the second degree in the length."""
    (a, b, c), (x, y, z) = lengths, sizes
    first, second = (y - x) / (b - a), (z - y) / (c - b)
    per_pair = (second - first) / (c - a)
    per_token = first - per_pair * (a + b)
    return x - per_token * a - per_pair * a * a, per_token, per_pair


def check_estimate(estimate, device):
    """A warning if what is to come may not fit into the device's free memory; else None.

    ValueError if not even gradients and the optimiser's state fit.
    """
    free, fixed = free_bytes(device), estimate.to_come - estimate.activations - estimate.logits
    if estimate.to_come <= free:
        return None
    said = f"{in_gib(estimate.to_come)} more, and {in_gib(free)} are free on {device}"
    if fixed > free:
        raise ValueError(
            f"the training needs about {said}; gradients and the optimiser's state alone take {in_gib(fixed)}: train on more GPUs, "
            "which divide the state, or on one with more memory, divide the target (fsdp2.yaml), or train a smaller head (Medusa: "
            "shared_lm_head; EAGLE-3: draft_vocab_size, hidden_size)"
        )
    advice = "lower chunk_tokens"
    if estimate.activations > estimate.logits:
        advice = "lower batch_rows and raise accumulate by as much, lower row_length, or set checkpoint_activations"
    return f"warning: the training needs about {said}, so it may run out of memory: {advice}"
