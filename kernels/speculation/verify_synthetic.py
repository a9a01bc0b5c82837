"""The verifier `synthetic` on the device: accept by given rates, whatever the tokens are; for benchmarks without a trained head.

    path [D + 1]: nodes of the tree's deepest path; rates [R >= D] fp64: the chance that depth 1, 2, ... is reached, never rising
    seed, committed, remaining [B]; target_tokens [B, N]
    ->  path [B, D + 1], num_accepted [B], bonus [B]: as verify_strict

The draw of a request is the finaliser of splitmix64 over its seed and committed length: it is the same in every batch.
"""

import torch

from ..jit import jit, on_triton, tl, triton


def verify_synthetic_reference(path, rates, seed, committed, remaining, target_tokens):
    """The same in plain torch operations."""
    x = seed + committed * -0x61C8864680B583EB
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    uniform = (x >> 11 & (1 << 53) - 1).double() * 2.0**-53  # [B]
    num_accepted = (uniform[:, None] < rates[: len(path) - 1]).sum(1)
    num_accepted = torch.minimum(num_accepted, (remaining - 1).clamp_min(0))
    path = path.expand(len(seed), -1)
    bonus = target_tokens.gather(1, path.gather(1, num_accepted[:, None])).squeeze(1)
    return path, num_accepted, bonus


@jit
def _verify_synthetic(
    deepest, rates, seed, committed, remaining, target_tokens, path, num_accepted, bonus, num_nodes, max_depth,
    DEPTHS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    one = request + tl.arange(0, 1)  # a vector of one: integers wrap
    x = tl.load(seed + one) + tl.load(committed + one) * -0x61C8864680B583EB
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    uniform = ((x >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16
    step = tl.arange(0, DEPTHS)
    rate = tl.load(rates + step, mask=step < max_depth, other=0.0)
    count = tl.sum((uniform < rate).to(tl.int64), 0)
    count = tl.minimum(count, tl.maximum(tl.load(remaining + request) - 1, 0))
    node = tl.load(deepest + step, mask=step <= max_depth, other=0)
    tl.store(path + request * (max_depth + 1) + step, node, mask=step <= max_depth)
    tl.store(num_accepted + request, count)
    tl.store(bonus + request, tl.load(target_tokens + request * num_nodes + tl.load(deepest + count)))


def verify_synthetic(path, rates, seed, committed, remaining, target_tokens):
    """Accepted path, its length and the token after it; see above for shapes. All integers are int64."""
    if not on_triton(target_tokens):
        return verify_synthetic_reference(path, rates, seed, committed, remaining, target_tokens)
    (batch, num_nodes), depth, device = target_tokens.shape, len(path) - 1, target_tokens.device
    paths = torch.empty(batch, depth + 1, dtype=torch.int64, device=device)
    num_accepted, bonus = (torch.empty(batch, dtype=torch.int64, device=device) for _ in range(2))
    if batch:
        _verify_synthetic[(batch,)](
            path.contiguous(), rates, seed.contiguous(), committed.contiguous(), remaining.contiguous(),
            target_tokens.contiguous(), paths, num_accepted, bonus, num_nodes, depth,
            triton.next_power_of_2(depth + 1), num_warps=1,
        )  # fmt: skip
    return paths, num_accepted, bonus
