"""Grow a draft tree from the draft's confidence (EAGLE-2, arXiv 2406.16858): choose the nodes to expand, then those of the tree.

    grow    n nodes of one depth have k candidates each: they join the table, and the k with the greatest totals are the next nodes.
            total = the node's value + min(score - log_sum, 0). NaN counts as minus infinity.
            log_sum [n, B]: log(sum(exp)) of all scores after the node; if temperature [B] is above 0, of its k candidates only
    prune   the N - 1 candidates with the greatest totals, over all depths, are the tree below the root

Candidates are numbered depth by depth: first the k below the root, then k * k of each further depth, k below each of its nodes.
Ties go to the lower number. Totals never rise along a path, so a chosen candidate's ancestors are chosen too. Expanded nodes are
numbered in the order of their expansion, best first in a depth (their *rows*); nodes of the tree in the order of the candidates.

One program per request. prune does not sort: it finds, bit by bit, the total that N - 1 candidates reach.

Letters: B requests, n nodes of one depth, k the width, C candidates, E expanded nodes, N nodes, D depths.
"""

from typing import NamedTuple

import torch

from ..jit import jit, on_triton, tl, triton

LOWEST = -0x80000000  # lower than `_ordered` of any total


class Candidates(NamedTuple):
    """All candidates for the tree. `grow` adds them, depth by depth."""

    totals: torch.Tensor  # fp32 [B, C] log confidence of the path
    tokens: torch.Tensor  # int64 [B, C]
    # int64 [B, E = (D - 1) k] candidate number of each expanded node; candidate c is a child of expanded node c // k - 1
    expanded: torch.Tensor

    @classmethod
    def empty(cls, batch, max_depth, width, device):
        expanded = (max_depth - 1) * width
        totals = torch.empty(batch, width * (1 + expanded), device=device)
        tokens = torch.empty(totals.shape, dtype=torch.int64, device=device)
        return cls(totals, tokens, tokens.new_empty(batch, expanded))

    width = property(lambda self: self.totals.shape[1] // (1 + self.expanded.shape[1]))
    max_depth = property(lambda self: 1 + self.expanded.shape[1] // self.width)


class Grown(NamedTuple):
    """The nodes that are expanded at one depth, best first."""

    tokens: torch.Tensor  # int64 [B, k]
    parents: torch.Tensor  # int64 [B, k] place of the parent among the nodes one depth above
    values: torch.Tensor  # fp32 [B, k] log confidence of the path
    paths: torch.Tensor  # int64 [B, k, depth] rows on the way from the root, its own last


def grow_reference(candidates, nodes, tokens, scores, log_sums, temperature=None):
    """`grow` in plain torch."""
    width, depth = candidates.width, 0 if nodes is None else nodes.paths.shape[2]
    scores = scores.float().masked_fill(scores.isnan(), -torch.inf)
    if temperature is not None:
        log_sums = torch.where(temperature > 0, scores.logsumexp(2), log_sums)
    totals = (scores - log_sums[:, :, None]).clamp(max=0).transpose(0, 1)  # [B, n, k]
    if nodes is not None:
        totals = nodes.values[:, :, None] + totals
    totals, tokens = totals.masked_fill(totals.isnan(), -torch.inf).flatten(1), tokens.transpose(0, 1).flatten(1)
    first = max(1 + (depth - 1) * width, 0) * width
    candidates.totals[:, first : first + totals.shape[1]] = totals
    candidates.tokens[:, first : first + totals.shape[1]] = tokens
    if depth + 1 == candidates.max_depth:
        return None
    chosen = totals.sort(dim=1, descending=True, stable=True).indices[:, :width]
    rows = torch.arange(depth * width, (depth + 1) * width, device=chosen.device)
    candidates.expanded[:, rows] = first + chosen
    parents, paths = chosen // width, rows.expand(chosen.shape)[:, :, None]
    if nodes is not None:
        paths = torch.cat((nodes.paths.gather(1, parents[:, :, None].expand(-1, -1, depth)), paths), 2)
    return Grown(tokens.gather(1, chosen), parents, totals.gather(1, chosen), paths)


def prune_reference(candidates, root, num_nodes):
    """`prune` in plain torch."""
    (batch, count), width, device = candidates.totals.shape, candidates.width, root.device
    chosen = candidates.totals.sort(dim=1, descending=True, stable=True).indices[:, : num_nodes - 1]
    chosen = chosen.sort(dim=1).values  # [B, N - 1] in the candidates' order
    number = torch.zeros(batch, count + 1, dtype=torch.int64, device=device)  # the root's number is in the last column
    number.scatter_(1, chosen, torch.arange(1, num_nodes, device=device).expand(batch, -1))
    above = torch.nn.functional.pad(candidates.expanded, (1, 0), value=count).gather(1, chosen // width)
    parents = torch.nn.functional.pad(number.gather(1, above), (1, 0))  # [B, N]
    depths = (chosen - width).div(width * width, rounding_mode="floor") + 2
    depths = torch.nn.functional.pad(depths, (1, 0))
    steps, node = [], torch.arange(num_nodes, device=device).expand(batch, -1)
    for depth in range(candidates.max_depth, -1, -1):
        node = torch.where(depths.gather(1, node) > depth, parents.gather(1, node), node)
        steps.append(node)
    tokens = torch.cat((root[:, None], candidates.tokens.gather(1, chosen)), 1)
    return tokens, parents, depths, torch.stack(steps[::-1], 2)


@jit
def _ordered(total):
    """Integers int32 in the order of the fp32 totals: a warp reduces integers in one instruction."""
    bits = tl.where(total == 0.0, 0.0, total).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit(do_not_specialize=["depth", "num_expanded"])
def _grow(
    values, paths, tokens, scores, log_sums, temperature, totals, all_tokens, expanded,
    next_tokens, parents, next_values, next_paths, depth, num_expanded,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, NODES: tl.constexpr, RANKS: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    request, batch = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    node, rank = tl.arange(0, NODES), tl.arange(0, RANKS)
    row = node * batch + request  # of the scores [n, B, k]
    inside = (node < COUNT)[:, None] & (rank < WIDTH)[None, :]
    at = row[:, None] * WIDTH + rank[None, :]
    score = tl.load(scores + at, mask=inside, other=float("-inf")).to(tl.float32)
    score = tl.where(score == score, score, float("-inf"))
    log_sum = tl.load(log_sums + row, mask=node < COUNT, other=0.0).to(tl.float32)
    if temperature is not None:
        top = tl.max(score, 1)
        shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
        of_these = shift + tl.log(tl.sum(tl.exp(score - shift[:, None]), 1))
        log_sum = tl.where(tl.load(temperature + request) > 0, of_these, log_sum)
    gain = score - log_sum[:, None]
    total = tl.where(gain > 0.0, 0.0, gain)
    if values is not None:
        total += tl.load(values + request * COUNT + node, mask=node < COUNT, other=0.0)[:, None]
    total = tl.where(total == total, total, float("-inf"))
    number = node[:, None] * WIDTH + rank[None, :]  # among the n k candidates
    first = tl.maximum(1 + (depth - 1) * WIDTH, 0) * WIDTH
    table = request * (1 + num_expanded) * WIDTH + first
    tl.store(totals + table + number, total, mask=inside)
    tl.store(all_tokens + table + number, tl.load(tokens + at, mask=inside, other=0), mask=inside)
    if next_tokens is not None:
        left = tl.where(inside, _ordered(total), LOWEST)
        chosen, best = rank * 0, rank * 0
        for i in tl.static_range(WIDTH):
            highest = tl.max(left)
            first_of = tl.min(tl.where(left == highest, number, 0x7FFFFFFF))
            chosen, best = tl.where(rank == i, first_of, chosen), tl.where(rank == i, highest, best)
            left = tl.where(number == first_of, LOWEST, left)
        bits = tl.where(best < 0, best ^ 0x7FFFFFFF, best)
        parent, here, out = chosen // WIDTH, rank < WIDTH, request * WIDTH + rank
        token = tl.load(tokens + (parent * batch + request) * WIDTH + chosen % WIDTH, mask=here, other=0)
        tl.store(next_tokens + out, token, mask=here)
        tl.store(parents + out, parent.to(tl.int64), mask=here)
        tl.store(next_values + out, bits.to(tl.float32, bitcast=True), mask=here)
        tl.store(expanded + request * num_expanded + depth * WIDTH + rank, (first + chosen).to(tl.int64), mask=here)
        if paths is not None:
            for step in range(depth):
                way = tl.load(paths + (request * COUNT + parent) * depth + step, mask=here, other=0)
                tl.store(next_paths + out * (depth + 1) + step, way, mask=here)
        tl.store(next_paths + out * (depth + 1) + depth, (depth * WIDTH + rank).to(tl.int64), mask=here)


@jit(do_not_specialize=["num_candidates", "num_expanded", "num_nodes", "max_depth"])
def _prune(
    totals, all_tokens, expanded, root, kept, tokens, parents, depths, ancestors,
    num_candidates, num_expanded, num_nodes, max_depth,
    WIDTH: tl.constexpr, CANDIDATES: tl.constexpr, NODES: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CANDIDATES)
    total = tl.load(totals + request * num_candidates + c, mask=c < num_candidates, other=float("-inf"))
    ordered = tl.where(c < num_candidates, _ordered(total), LOWEST)
    # Find the highest integer that N - 1 totals reach, bit by bit.
    reach = tl.sum((ordered >= 0).to(tl.int32), 0)
    lowest = tl.where(reach >= num_nodes - 1, 0, LOWEST)
    for bit in range(31):
        higher = lowest + (1 << (30 - bit))
        reach = tl.sum((ordered >= higher).to(tl.int32), 0)
        lowest = tl.where(reach >= num_nodes - 1, higher, lowest)
    above, equal = ordered > lowest, ordered == lowest
    left = num_nodes - 1 - tl.sum(above.to(tl.int32), 0)
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= left))
    kept += request * num_nodes
    tl.store(kept + tl.cumsum(chosen.to(tl.int32), 0), c, mask=chosen)
    tl.debug_barrier()  # threads read entries of `kept` that other threads wrote
    node = tl.arange(0, NODES)
    below = (node > 0) & (node < num_nodes)  # all nodes but the root
    candidate = tl.load(kept + node, mask=below, other=-1)
    row = tl.where(below, candidate // WIDTH - 1, -1)
    over = tl.load(expanded + request * num_expanded + row, mask=row >= 0, other=-1).to(tl.int32)  # -1: the root
    parent = tl.max(tl.where((candidate[None, :] == over[:, None]) & (node < num_nodes)[None, :], node[None, :], 0), 1)
    depth = tl.where(below, (candidate - WIDTH + WIDTH * WIDTH) // (WIDTH * WIDTH) + 1, 0)
    token = tl.load(all_tokens + request * num_candidates + candidate, mask=below, other=0)
    token = tl.where(node == 0, tl.load(root + request), token)
    out = request * num_nodes + node
    tl.store(tokens + out, token, mask=node < num_nodes)
    tl.store(parents + out, parent.to(tl.int64), mask=node < num_nodes)
    tl.store(depths + out, depth.to(tl.int64), mask=node < num_nodes)
    for back in range(max_depth + 1):
        step = max_depth - back
        node = tl.where(depth > step, tl.gather(parent, node, 0), node)
        depth = tl.minimum(depth, step)
        tl.store(ancestors + out * (max_depth + 1) + step, node.to(tl.int64), mask=tl.arange(0, NODES) < num_nodes)


def grow(candidates, nodes, tokens, scores, log_sums, temperature=None):
    """Add the candidates after the nodes of one depth, and choose those to expand next; see above.

    candidates: filled up to the nodes' depth. nodes: Grown, or None for the root alone. tokens (int64) and scores [n, B, k] of the
    new candidates; log_sums [n, B]; temperature [B], None: all 0. Returns the next depth's nodes (Grown), None after the last
    depth. Raises ValueError for shapes that do not fit.
    """
    width, batch = candidates.width, len(candidates.totals)
    count, depth = (1, 0) if nodes is None else nodes.paths.shape[1:]
    shapes = [tuple(x.shape) for x in (tokens, scores, log_sums)]
    if shapes != [(count, batch, width)] * 2 + [(count, batch)] or depth >= candidates.max_depth:
        raise ValueError(
            f"grow takes tokens and scores [n, B, k] and log_sums [n, B], here of {count} nodes of {batch} requests with {width} "
            f"candidates each, at depths below {candidates.max_depth}; got {shapes} at depth {depth}"
        )
    if temperature is not None and temperature.shape != (batch,):
        raise ValueError(f"grow takes a temperature for each of {batch} requests, got {tuple(temperature.shape)}")
    if not on_triton(scores):
        return grow_reference(candidates, nodes, tokens, scores, log_sums, temperature)
    found = None
    if depth + 1 < candidates.max_depth:
        chosen, parents = tokens.new_empty(2, batch, width)
        values = candidates.totals.new_empty(batch, width)
        found = Grown(chosen, parents, values, tokens.new_empty(batch, width, depth + 1))
    if batch:
        _grow[(batch,)](
            None if nodes is None else nodes.values, None if nodes is None else nodes.paths,
            *(None if x is None else x.contiguous() for x in (tokens, scores, log_sums, temperature)),
            *candidates, *(found or [None] * 4), depth, candidates.expanded.shape[1],
            width, count, triton.next_power_of_2(count), triton.next_power_of_2(width), LOWEST, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return found


def prune(candidates, root, num_nodes):
    """Choose the tree of num_nodes nodes; see above.  root [B] tokens -> tokens, parents, depths [B, N], ancestors [B, N, D + 1]

    All are int64. ancestors: the node at each depth on the way from the root, itself last and repeated. The root's parent is 0.
    Raises ValueError for shapes that do not fit.
    """
    (batch, count), max_depth, device = candidates.totals.shape, candidates.max_depth, root.device
    if root.shape != (batch,) or not 1 < num_nodes <= 1 + count:
        raise ValueError(
            f"prune takes the roots of {batch} requests and from 2 to {1 + count} nodes, got {tuple(root.shape)} and {num_nodes}"
        )
    if not on_triton(candidates.totals):
        return prune_reference(candidates, root, num_nodes)
    kept = torch.empty(batch, num_nodes, dtype=torch.int32, device=device)
    tree = torch.empty(3, batch, num_nodes, dtype=torch.int64, device=device)
    ancestors = tree.new_empty(batch, num_nodes, max_depth + 1)
    if batch:
        block = triton.next_power_of_2(count)
        _prune[(batch,)](
            *candidates, root.contiguous(), kept, *tree, ancestors, count, candidates.expanded.shape[1], num_nodes, max_depth,
            candidates.width, block, triton.next_power_of_2(num_nodes), LOWEST, num_warps=min(max(block // 512, 1), 8),
        )  # fmt: skip
    return *tree, ancestors
