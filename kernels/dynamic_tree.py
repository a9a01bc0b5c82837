"""Growing a draft tree from the draft's confidence (EAGLE-2, arXiv 2406.16858): which nodes are expanded, and which make the tree.

    grow    of n nodes with k candidates each, the k of the greatest value: the nodes of the next depth
            gains [B, n, k] log confidence of each candidate, values [B, n] of the nodes  ->  totals [B, n k] = value + gain,
            chosen [B, k] their numbers among the n k, best first
    prune   of all C candidates of all depths the num_nodes - 1 of the greatest totals, and the tree they make
            totals, tokens, parents [B, C], root [B]  ->  tokens, parents, depths [B, N], ancestors [B, N, D + 1]

Candidates are numbered depth by depth: first the k below the root, then k * k of each further depth. Values never rise along a path
and ties go to the lower number, so with a candidate its ancestors are chosen too. Nodes are numbered in the candidates' order.
NaN counts as minus infinity.

Letters: B requests, n nodes of one depth, k the width, C candidates, N nodes, D depths.
"""

import torch


def grow_reference(gains, values=None):
    """The formula in plain torch; values None: 0.  -> (totals [B, n k], chosen int64 [B, k])"""
    totals = gains if values is None else gains + values[:, :, None]
    totals = totals.masked_fill(totals.isnan(), -torch.inf).flatten(1)
    order = totals.sort(dim=1, descending=True, stable=True).indices
    return totals, order[:, : gains.shape[2]]


def prune_reference(totals, tokens, parents, root, width, max_depth, num_nodes):
    """The formula in plain torch.  parents [B, C]: the candidate above each, -1 for the root"""
    (batch, count), device = totals.shape, totals.device
    order = totals.sort(dim=1, descending=True, stable=True).indices[:, : num_nodes - 1]
    chosen = order.sort(dim=1).values  # [B, N - 1] in the candidates' order
    number = torch.zeros(
        batch, count + 1, dtype=torch.int64, device=device
    )  # of every candidate; the last column is the root
    number.scatter_(1, chosen, torch.arange(1, num_nodes, device=device).expand(batch, -1))
    zero = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    above = parents.gather(1, chosen)
    above = torch.cat((zero, number.gather(1, torch.where(above < 0, count, above))), 1)  # [B, N]
    depth = torch.cat((zero, 1 + (chosen - width).div(width * width, rounding_mode="floor") + 1), 1)  # [B, N]
    steps, node = [], torch.arange(num_nodes, device=device).expand(batch, -1)
    for level in range(max_depth, -1, -1):
        node = torch.where(depth.gather(1, node) > level, above.gather(1, node), node)
        steps.append(node)
    tokens = torch.cat((root[:, None], tokens.gather(1, chosen)), 1)
    return tokens, above, depth, torch.stack(steps[::-1], 2)
