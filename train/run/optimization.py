"""From gradients to weights: optimiser, learning rate, the precision that heads compute in, the check for finite gradients."""

import math
import time

import torch
import torch.distributed as dist

from .sharded_optimizer import ShardedAdamW

LONG_ROW = 8192  # tokens; on an 8B target EAGLE-3's seven steps keep 2.7 MiB for each of them


class NonFiniteLoss(RuntimeError):
    """The loss or its gradient (`what`) is not finite in some of this rank's `micro_steps`; no optimiser step was made with it."""

    def __init__(self, what, micro_steps):
        super().__init__(f"the {what} is not finite")
        self.what, self.micro_steps = what, micro_steps


def build_optimizer(head, weight_decay, beta1, beta2, *further):
    """AdamW in the parameters' fp32, all state included; weight decay on matrices only. The caller sets each step's lr.

    Frozen parameters stay out: an EAGLE head's embedding is the target's own table. Several processes divide the state.
    further: further groups of parameters, as for torch.optim; their lr is multiplied by their `rate`.
    """
    matrices = [parameter for parameter in trained(head) if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained(head) if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}, *further]
    options = {"lr": 0.0, "betas": (beta1, beta2), "fused": True}
    if dist.is_initialized() and dist.get_world_size() > 1:
        return ShardedAdamW(groups, dist.get_rank(), dist.get_world_size(), **options)
    return torch.optim.AdamW(groups, **options)


def trained(head):
    """The parameters that training changes."""
    return [parameter for parameter in head.parameters() if parameter.requires_grad]


def warmup_cosine(step, num_steps, peak, warmup_ratio, min_ratio):
    """Learning rate of step `step` (from 0): a linear rise to `peak`, then a cosine to min_ratio * peak."""
    warmup = round(warmup_ratio * num_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(num_steps - warmup, 1)
    return peak * (min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * progress)) / 2)


def finish_step(head, optimizer, shares, *, accelerator, lr, max_norm, max_value=0.0):
    """Sum the ranks' gradients and totals and make one optimiser step (see `update`).

    shares: results of `accumulate_gradients`, one per micro-step of this rank. Returns (their sum over all ranks, the gradient's
    norm). Raises NonFiniteLoss, before any weight is changed, if a loss or the norm is not finite; its `micro_steps` are this
    rank's micro-steps with such a loss, or all.
    """
    totals = accelerator.reduce(sum(shares), "sum")
    if not totals[:, 0].isfinite().all():
        raise NonFiniteLoss("loss", [i for i, share in enumerate(shares) if not share[:, 0].isfinite().all()])
    if accelerator.num_processes > 1:  # the ranks' shares are divided by the global number of labels already
        optimizer.sum_gradients()
    grad_norm = update(head, optimizer, lr=lr, max_norm=max_norm, max_value=max_value)
    if not math.isfinite(grad_norm):
        raise NonFiniteLoss("gradient", list(range(len(shares))))
    return totals, grad_norm


def update(head, optimizer, *, lr, max_norm, max_value=0.0):
    """Make one optimiser step with the present gradients, unless their norm is not finite. Returns the norm before clipping.

    lr: of the head; a group of the optimiser with a "rate" learns at that multiple of it.
    max_value: every entry of the gradient is cut to plus or minus this. If it is 0, max_norm: longer gradients are cut to this
    norm; 0: never.
    """
    if isinstance(optimizer, ShardedAdamW):
        # No pieces where there are more ranks than parts.
        parameters, norm = optimizer.own_pieces, optimizer.gradient_norm()
    else:
        parameters = list(head.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    # Awaited before the optimiser's work is launched, not after it: meanwhile the next step is prepared.
    length = norm.item()
    if math.isfinite(length):
        if max_value and parameters:
            torch.nn.utils.clip_grad_value_(parameters, max_value)
        elif max_norm:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("rate", 1.0)
        optimizer.step()
    optimizer.zero_grad()
    return length


def wants_checkpointing(wanted, row_length, num_steps):
    """Whether a head's steps are computed again in the backward pass.

    wanted: "yes", "no", or "auto": in rows of more than LONG_ROW tokens, unless the only step would be kept then all the same.
    """
    return wanted == "yes" or (wanted == "auto" and row_length > LONG_ROW and num_steps > 1)


def choose_autocast(wanted, target, device):
    """ "bf16" or "no" for "auto"; other values are returned unchanged.

    On a GPU bf16. On the CPU the faster of the two at multiplying a chunk of features with the target's lm_head: bf16 is 2.4 times
    as fast on a processor with AVX512_BF16, and far slower than fp32 without such instructions.
    """
    if wanted != "auto":
        return wanted
    if device.type != "cpu":
        return "bf16"

    def seconds(dtype):
        features = torch.ones(512, target.hidden_size, dtype=dtype)
        weight = torch.ones(target.vocab_size, target.hidden_size, dtype=dtype)
        times = []
        for _ in range(4):
            start = time.perf_counter()
            torch.mm(features, weight.t())
            times.append(time.perf_counter() - start)
        return min(times)

    # Only a clear gain in speed is worth the lost digits.
    return "bf16" if seconds(torch.bfloat16) * 1.3 < seconds(torch.float32) else "no"
