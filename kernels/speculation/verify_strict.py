"""The verifier `strict` on the device: follow the child that equals the target's own token; where none does, emit that token.

    parents, depths [N] (or [B, N]) in topological order, node 0 the root; tokens, target_tokens [B, N]; depth_limit [B]
    ->  path [B, D + 1] node at each depth, its last one repeated; num_accepted [B]; bonus [B] the token after the path

D is the greatest depth. Siblings with equal tokens: the deeper path wins, then the lower node. docs/lossless.md says why
the rule is lossless.
"""

import torch

from ..jit import jit, on_triton, tl, triton


def verify_strict_reference(parents, depths, tokens, target_tokens, depth_limit, max_depth):
    """The same in plain torch operations, for any device."""
    if tokens.shape[1] == 1:  # plain decoding
        none = torch.zeros_like(tokens[:, 0], dtype=torch.int64)
        return none[:, None].repeat(1, max_depth + 1), none, target_tokens[:, 0].long()
    batch = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
    parents = parents.long().expand_as(tokens).clamp(min=0)
    depths = depths.long().expand_as(tokens)
    accepted = (tokens == target_tokens.gather(1, parents)) & (depths <= depth_limit[:, None])
    accepted[:, 0] = True
    for _ in range(max_depth):
        accepted &= accepted.gather(1, parents)
    num_accepted = torch.where(accepted, depths, 0).amax(1)  # [B]
    last = (accepted & (depths == num_accepted[:, None])).to(torch.uint8).argmax(1)  # [B], the first one
    path, node = last[:, None].repeat(1, max_depth + 1), last
    for depth in range(max_depth - 1, -1, -1):
        node = torch.where(depth < num_accepted, parents[batch[:, 0], node], node)
        path[:, depth] = node
    return path, num_accepted, target_tokens.gather(1, last[:, None]).squeeze(1).long()


@jit
def _verify_strict(
    parents, depths, tokens, target_tokens, depth_limit, path, num_accepted, bonus, topology_stride, num_nodes, max_depth,
    NODES: tl.constexpr, DEPTHS: tl.constexpr, DOUBLINGS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    parents += request * topology_stride
    depths += request * topology_stride
    tokens += request * num_nodes
    target_tokens += request * num_nodes
    node = tl.arange(0, NODES)
    inside = node < num_nodes
    parent = tl.maximum(tl.load(parents + node, mask=inside, other=0).to(tl.int32), 0)
    depth = tl.load(depths + node, mask=inside, other=0).to(tl.int32)
    wanted = tl.load(target_tokens + parent, mask=inside, other=0).to(tl.int64)
    taken = tl.load(tokens + node, mask=inside, other=0).to(tl.int64) == wanted
    taken = ((taken & (depth <= tl.load(depth_limit + request))) | (node == 0)) & inside
    # A node is accepted if all nodes on its way to the root are taken: pointer doubling, the root is its own parent.
    accepted, up = taken.to(tl.int32), tl.where(node == 0, 0, parent)
    for _ in range(DOUBLINGS):
        accepted &= tl.gather(accepted, up, 0)
        up = tl.gather(up, up, 0)
    count = tl.max(tl.where(accepted == 1, depth, 0))
    last = tl.min(tl.where((accepted == 1) & (depth == count), node, NODES))
    tl.store(num_accepted + request, count.to(tl.int64))
    tl.store(bonus + request, tl.load(target_tokens + last).to(tl.int64))
    path += request * (max_depth + 1)
    step = tl.arange(0, DEPTHS)
    tl.store(path + step, (last + step * 0).to(tl.int64), mask=(step >= count) & (step <= max_depth))
    walked = last
    for back in range(count):
        walked = tl.load(parents + walked).to(tl.int32)
        tl.store(path + count - 1 - back, walked.to(tl.int64))


def verify_strict(parents, depths, tokens, target_tokens, depth_limit, max_depth):
    """Accepted path, its length and the token after it, one program per request.

    parents and depths [N] or [B, N]; tokens, target_tokens [B, N]; depth_limit [B]: deeper nodes are not taken;
    max_depth: of the tree. Returns (path int64 [B, max_depth + 1], num_accepted int64 [B], bonus int64 [B]).
    Raises ValueError for shapes that do not fit.
    """
    if tokens.dim() != 2 or target_tokens.shape != tokens.shape or depth_limit.shape != tokens.shape[:1]:
        raise ValueError(
            f"verify_strict takes tokens and target_tokens [B, N] and depth_limit [B], got {tuple(tokens.shape)}, "
            f"{tuple(target_tokens.shape)} and {tuple(depth_limit.shape)}"
        )
    if parents.shape not in (tokens.shape, tokens.shape[1:]) or depths.shape != parents.shape:
        raise ValueError(
            f"verify_strict takes parents and depths [N] or [B, N] for {tokens.shape[1]} nodes, got {tuple(parents.shape)} and "
            f"{tuple(depths.shape)}"
        )
    if not on_triton(tokens):
        return verify_strict_reference(parents, depths, tokens, target_tokens, depth_limit, max_depth)
    batch, num_nodes = tokens.shape
    path = torch.empty(batch, max_depth + 1, dtype=torch.int64, device=tokens.device)
    num_accepted, bonus = (torch.empty(batch, dtype=torch.int64, device=tokens.device) for _ in range(2))
    if batch:
        _verify_strict[(batch,)](
            parents.contiguous(), depths.contiguous(), tokens.contiguous(), target_tokens.contiguous(), depth_limit.contiguous(),
            path, num_accepted, bonus, num_nodes if parents.dim() == 2 else 0, num_nodes, max_depth,
            triton.next_power_of_2(num_nodes), triton.next_power_of_2(max_depth + 1), max(max_depth, 1).bit_length(), num_warps=1,
        )  # fmt: skip
    return path, num_accepted, bonus
