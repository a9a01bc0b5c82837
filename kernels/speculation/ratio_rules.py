"""The verifiers that compare two distributions: `token` and `block` on chains, `recursive` and `traversal` on trees.

    rule(tree, draft, p, u, depth_limit)  ->  Verdict: the accepted path, and the distribution of the one token to emit after it

p [B, N, V] is the target's distribution after every node, u [B, N] a uniform in [0, 1) per node (the root's is not read). All
four rules keep the target's distribution on three conditions: q is the distribution that the children were really drawn from; the
children of different nodes were drawn independently; no noise is used twice, neither for two purposes nor in two steps (`block` and
`traversal` look at nodes after the accepted ones). Tests prove it by enumeration. This file is the reference of verify_ratio.py:
plain torch, any float dtype.

A rule reads the following over V, per drafted child: p and q at its token; for the case that the child is rejected, the sum of
(r p - q)+; and, if a sibling follows, the sum of q without the child. `recursive` and `token` (r = 1) need the sums only along the
path they walk; `block` and `traversal` need them for every child, in the order of the nodes, and decide after all of them.

Letters: B requests, N nodes, D the tree's greatest depth, V vocabulary, L draft distributions.
"""

from typing import NamedTuple

import torch

from ..sampling.philox import RESIDUAL_NOISE, gumbel, uniform
from .row_distributions import probabilities


class Nodes(NamedTuple):
    """The trees. Rules accept any object with these attributes."""

    parents: torch.Tensor  # [N] or [B, N] in topological order
    depths: torch.Tensor  # [N] or [B, N]
    max_depth: int


class DraftProbabilities(NamedTuple):
    """The drafted tokens and the distributions they were drawn from. Siblings are in the order in which they were drawn."""

    # [B, N], node 0 is the root; -1: an empty slot, which is never accepted, and neither are nodes below it
    tokens: torch.Tensor
    q: torch.Tensor  # [B, L, V] draft distributions after temperature, top-k, top-p, each kept once; p's dtype
    # [N] or [B, N]: which of the L distributions the children of a node come from; any number for leaves
    distribution: torch.Tensor
    # bool [N] or [B, N]: whether the token was sampled; a token that was not has a one-hot distribution
    sampled: torch.Tensor


class Verdict(NamedTuple):
    path: torch.Tensor  # [B, D + 1] the accepted node at each depth, the last one repeated
    num_accepted: torch.Tensor  # [B]
    distribution: torch.Tensor  # [B, V] of the token to emit


def token(tree, draft, p, u, depth_limit):
    """Modified rejection sampling on a chain: arXiv 2302.01318 and 2211.17192.

    Accept x_i iff u_i q_i(x_i) < p_i(x_i), up to the first rejection; then y ~ norm((p - q)+), or y ~ p after the last token.
    """
    goes_on, x, q = chain_distributions(tree, draft, depth_limit)
    taken = goes_on & accepts(u.roll(-1, 1), at(p, x), at(q, x))  # [B, N] whether the child of every node is taken
    num_accepted = taken.long().cumprod(1).sum(1)
    p = pick(p, num_accepted)
    rest, _ = residual(p, pick(q, num_accepted))
    distribution = torch.where(pick(goes_on, num_accepted)[:, None], rest, p)
    return verdict(tree, num_accepted, distribution)


def block(tree, draft, p, u, depth_limit):
    """Block verification on a chain: arXiv 2403.10444.

    P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)), S_i = sum((P_i p_{i+1} - q_{i+1})+), h_i = S_i / (S_i + 1 - P_i); at the last token
    h_k = P_k. tau is the greatest i with u_i < h_i, whether or not an earlier i failed; y ~ norm((P_tau p - q)+), or y ~ p after
    the last token.
    """
    goes_on, x, q = chain_distributions(tree, draft, depth_limit)
    p_x, q_x = at(p, x), at(q, x)  # [B, N]
    P = torch.ones_like(p_x)
    for i in range(1, P.shape[1]):
        P[:, i] = ratio(P[:, i - 1] * p_x[:, i - 1], q_x[:, i - 1])
    rest, S = residual(p, q, P)
    h = torch.where(goes_on, keep_rate(S, P), P)
    taken = goes_on.roll(1, 1) & accepts(u, h, 1.0)  # [B, N] of the node itself
    num_accepted = torch.where(taken, tree.depths, 0).amax(1)
    distribution = torch.where(pick(goes_on, num_accepted)[:, None], pick(rest, num_accepted), pick(p, num_accepted))
    return verdict(tree, num_accepted, distribution)


def recursive(tree, draft, p, u, depth_limit):
    """Recursive rejection sampling on a tree, from the root: arXiv 2402.14160 (without replacement), 2305.09781.

    At the accepted node, for its children in order: accept x iff u q'(x) < p(x), where x was drawn from q'; else
    p <- norm((p - q')+).
    """
    live, parents = live_nodes(tree, draft, depth_limit)
    node = torch.zeros_like(parents[:, 0])  # [B] the last node accepted
    # [B, V] the node's distribution after the children so far have failed, and the distribution of its next child
    P, Q = p[:, 0], next_distribution(draft, 0)
    # In topological order one pass is enough: the children of an accepted node come after it.
    for n in range(1, parents.shape[1]):
        x = draft.tokens[:, n]
        slot = slot_distribution(Q, x, draft.sampled[..., n])
        tried = live[:, n] & (parents[:, n] == node)
        taken = tried & accepts(u[:, n], at(P, x), at(slot, x))
        rest, _ = residual(P, slot)
        P = torch.where(taken[:, None], p[:, n], torch.where(tried[:, None], rest, P))
        Q = torch.where(taken[:, None], next_distribution(draft, n), torch.where(tried[:, None], without(Q, x), Q))
        node = torch.where(taken, n, node)
    return verdict(tree, node, P)


def traversal(tree, draft, p, u, depth_limit):
    """Traversal verification on a tree, from the leaves: arXiv 2505.12398.

    visit(node, r): for its children in order: visit(x, min(1, r P(x) / Q(x))); if that fails, P, r <- norm((r P - Q)+), keep_rate.
    After the children, accept the node with probability r and emit y ~ P. No r depends on a decision, so all r are computed first
    and the walk follows.
    """
    live, parents = live_nodes(tree, draft, depth_limit)
    rows = torch.arange(len(p), device=p.device)
    # [B, N, V] a node's distribution after the children so far have failed, and the distribution of its next child
    P = p.clone()
    Q = torch.stack([next_distribution(draft, n) for n in range(parents.shape[1])], 1)
    r = torch.ones_like(p[..., 0])  # [B, N] the rate at which a node is accepted after the children so far have failed
    for n in range(1, parents.shape[1]):
        x, above = draft.tokens[:, n], (rows, parents[:, n])
        slot = slot_distribution(Q[above], x, draft.sampled[..., n])
        r[:, n] = ratio(r[above] * at(P[above], x), at(slot, x))
        rest, S = residual(P[above], slot, r[above])
        failed = live[:, n]
        P[above] = torch.where(failed[:, None], rest, P[above])
        Q[above] = torch.where(failed[:, None], without(Q[above], x), Q[above])
        r[above] = torch.where(failed, keep_rate(S, r[above]), r[above])
    found = live & accepts(u, r, 1.0)
    for n in range(parents.shape[1] - 1, 0, -1):
        found[rows, parents[:, n]] |= found[:, n]  # something is accepted at or below the node
    node = torch.zeros_like(parents[:, 0])
    for n in range(1, parents.shape[1]):
        node = torch.where(found[:, n] & (parents[:, n] == node), n, node)
    return verdict(tree, node, P[rows, node])


RATIO_RULES = {"token": token, "block": block, "recursive": recursive, "traversal": traversal}


def verify_ratio_reference(
    rule, *, parents, depths, tokens, scores, temperature, draft_scores, draft_temperature, distribution, sampled, depth_limit,
    seed, sample, position, max_depth,
):  # fmt: skip
    """verify_ratio in plain torch, with the same arguments and results: every distribution is computed."""
    (batch, nodes), vocab_size, key = tokens.shape, scores.shape[1], (seed, sample, position)
    p = probabilities(scores, temperature).view(batch, nodes, vocab_size)
    q = probabilities(draft_scores.flatten(0, 1), draft_temperature.repeat(len(draft_scores)))
    q = q.view(draft_scores.shape).transpose(0, 1)  # [B, L, V]
    sampled = sampled & (draft_temperature > 0)[:, None]  # [B, N]
    # A token whose q underflows counts as an empty slot; the others are renormalised without it, so the distribution is kept.
    rows = torch.arange(batch, device=q.device)[:, None]
    # [B, N] the distribution that a node's own token comes from
    above = distribution.expand_as(tokens).gather(1, parents.expand_as(tokens))
    lost = sampled & (q[rows, above, tokens.clamp(min=0)] == 0)
    draft = DraftProbabilities(tokens.masked_fill(lost, -1), q, distribution, sampled)
    found = RATIO_RULES[rule](Nodes(parents, depths, max_depth), draft, p, uniform(*key, nodes), depth_limit)
    return found.path, found.num_accepted, draw(found.distribution, gumbel(*key, vocab_size, RESIDUAL_NOISE))


def draw(distribution, noise):
    """Draw a token from every distribution by Gumbel-max; ties to the lowest id.  distribution, noise [B, V] -> [B]

    The noise must have no other use: neither the target's own tokens nor the draft (philox.py, RESIDUAL_NOISE).
    """
    return (distribution.log() + noise).argmax(-1)


def accepts(u, numerator, denominator):
    """u < numerator / denominator, without the division. With <, u = 0 never accepts a token of target probability 0."""
    return u * denominator < numerator


def ratio(numerator, denominator):
    """min(1, numerator / denominator); 0 where the numerator is 0."""
    return torch.where(numerator < denominator, numerator / denominator, (numerator > 0).to(numerator.dtype))


def residual(p, q, r=None):
    """norm((r p - q)+), or p if the mass S of (r p - q)+ is numerically 0; and S.  [..., V] -> [..., V], [...]"""
    rest = ((p if r is None else r[..., None] * p) - q).clamp(min=0)
    S = rest.sum(-1, keepdim=True)
    return torch.where(S > 0, rest / S, p), S.squeeze(-1)


def keep_rate(S, r):
    """S / (S + 1 - r): the rate at which a node is accepted after a child has failed. With S = 0: 1 for r = 1, else 0."""
    return torch.where(S > 0, S / (S + 1 - r), (r >= 1).to(r.dtype))


def slot_distribution(q, x, sampled):
    """The distribution of a child x: q (without the siblings before x) if x was sampled, else one-hot.  [B, V], [B], [B]"""
    one_hot = torch.zeros_like(q).scatter(-1, x.clamp(min=0)[..., None], 1.0)
    return torch.where(sampled[..., None], q, one_hot)


def without(q, x):
    """The distribution of the next child: q without token x, renormalised. If no mass is left it is all zero, and the slots of
    further children are empty.
    """
    rest = q.scatter(-1, x.clamp(min=0)[..., None], 0.0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, rest)


def at(distribution, x):
    """distribution(x), any value for an empty slot.  [..., V], [...] -> [...]"""
    return distribution.gather(-1, x.clamp(min=0)[..., None]).squeeze(-1)


def pick(distributions, i):
    """distributions[b, i[b]].  [B, k, ...], [B] -> [B, ...]"""
    return distributions[torch.arange(len(distributions), device=distributions.device), i]


def next_distribution(draft, node):
    """The distribution that the first child of `node` is drawn from.  -> [B, V]"""
    return pick(draft.q, draft.distribution[..., node].expand(len(draft.q)))


def live_nodes(tree, draft, depth_limit):
    """Whether a node and all its ancestors have tokens and lie within the limit; and every node's parent.  -> two [B, N]"""
    parents = tree.parents.expand_as(draft.tokens).clamp(min=0)
    live = (draft.tokens >= 0) & (tree.depths <= depth_limit[:, None])
    live[:, 0] = True
    for _ in range(tree.max_depth):
        live &= live.gather(1, parents)
    return live, parents


def chain_distributions(tree, draft, depth_limit):
    """Per node of a chain: whether a token follows it, that token, and the distribution it was drawn from.

    -> [B, N], [B, N], [B, N, V]
    """
    live, _ = live_nodes(tree, draft, depth_limit)
    nothing = torch.full_like(draft.tokens[:, :1], -1)
    goes_on, x = torch.cat([live[:, 1:], nothing > 0], 1), torch.cat([draft.tokens[:, 1:], nothing], 1)
    q = torch.stack([next_distribution(draft, n) for n in range(x.shape[1])], 1)
    return goes_on, x, slot_distribution(q, x, draft.sampled.roll(-1, -1))


def verdict(tree, node, distribution):
    """The Verdict: path from the root to `node` [B], its last entry repeated, and the distribution of the token that follows."""
    parents = tree.parents.expand(len(node), -1).clamp(min=0)
    num_accepted = tree.depths.expand(len(node), -1).gather(1, node[:, None]).squeeze(1)
    path = node[:, None].repeat(1, tree.max_depth + 1)
    for depth in range(tree.max_depth - 1, -1, -1):
        node = torch.where(depth < num_accepted, parents.gather(1, node[:, None]).squeeze(1), node)
        path[:, depth] = node
    return Verdict(path, num_accepted, distribution)
