"""The ratio rules on the device, one launch per step: `token`, `recursive`, `block`, `traversal`. Reference: ratio_rules.py.

    parents, depths [N] or [B, N] in topological order, node 0 the root; tokens [B, N], -1: an empty slot; depth_limit [B]
    target scores [B N, V], temperature [B N]; draft scores [L, B, V], temperature [B]: distributions as in row_distributions.py
    distribution [N] or [B, N]: which of the L draft distributions the children of a node come from
    sampled [N] or [B, N]: whether a node was sampled from it; if not, its distribution is one-hot
    seed, sample, position [B]: keys of the noise; position: that of the step's root (philox.py says why)
    ->  path [B, D + 1] node at each depth, its last one repeated; num_accepted [B]; bonus [B] the token after the path

On a chain, for every uniform, `recursive` decides as `token` does and `traversal` as `block` does. So two rules are computed here;
they differ in the rate r of a node, always 1 in `recursive`. No distribution is ever written. After j failed children, a node's
distribution P and the rest of its draft's distribution q follow from j steps per token; the j walks over V found their scalars:

    P <- max(r P - (q / mass, or one-hot), 0) / S,  S its sum,     q <- q without the child's token,  mass its sum

So a child costs one walk. Where distributions are cut by min-p, top-k or top-p (keep_top.py), walks go over the kept tokens: the
target's for S, as no other token has any P, and the draft's for its mass. One program per node walks; in `traversal` it first
waits for its parent's program to publish the rate at which the node is entered. The programs after these each repeat the
decision, and each draws the next token on its part of V: argmax(log P + G). A program waits only for programs of lower number,
which start first: so all of them end, even if they run one by one. Requests at temperature 0 need no walk: their distributions
are one-hot.

Uniforms are those of philox.uniform (word n for node n). A sampled child whose q underflows to 0 counts as an empty slot. The
launch leaves the workspace as it found it, with zeros where programs signal each other, so a CUDA graph can replay it.

Letters: B requests, N nodes, D the tree's greatest depth, V vocabulary, L draft distributions.
"""

from typing import NamedTuple

import torch

from ..jit import jit, on_triton, tl, triton
from ..sampling.best_token import key_of
from ..sampling.lowest_key import scores_at
from ..sampling.philox import ACCEPT_UNIFORM, RESIDUAL_NOISE, chunk_words, gumbel_of_word, token_words
from .ratio_rules import verify_ratio_reference
from .row_distributions import row_distributions

RECURSIVE = ("token", "recursive")  # rules whose rate of a node is always 1
_BLOCK = 2048  # tokens per step of a walk
_PROGRAMS = 264  # programs that draw, about: two for each multiprocessor of an H200
_MAX_PARTS = 16  # parts of one row in a draw


class Workspace(NamedTuple):
    """Memory of a launch, for one batch size and number of nodes. Kept from step to step; two launches never use it at once."""

    signals: torch.Tensor  # int32 [B, N + 2] zeros: published rates, number of nodes done, number of parts drawn
    rates: torch.Tensor  # fp32 [B, N] of nodes whose children have failed
    steps: torch.Tensor  # fp32 [B, N, 5] per child: r, 1 / mass or 0, 1 for one-hot or 0, 1 / S, its token's bits
    keys: torch.Tensor  # int64 [B, parts] the best of each part


def make_workspace(batch, num_nodes, device):
    """The Workspace of a launch for `batch` requests of `num_nodes` nodes."""
    parts = triton.next_power_of_2(max(_PROGRAMS // max(batch, 1), 1))
    return Workspace(
        torch.zeros(batch, num_nodes + 2, dtype=torch.int32, device=device),
        torch.empty(batch, num_nodes, dtype=torch.float32, device=device),
        torch.empty(batch, num_nodes, 5, dtype=torch.float32, device=device),
        torch.empty(batch, min(parts, _MAX_PARTS), dtype=torch.int64, device=device),
    )


@jit
def _topology(parents, depths, tokens, limit, num_nodes, NODES: tl.constexpr, DOUBLINGS: tl.constexpr):
    """Parent and token of every node of a request, and whether the node and all its ancestors are tokens within the limit.

    The root's parent is -1."""
    node = tl.arange(0, NODES)
    inside = node < num_nodes
    parent = tl.load(parents + node, mask=inside, other=NODES).to(tl.int32)
    token = tl.load(tokens + node, mask=inside, other=-1).to(tl.int32)
    depth = tl.load(depths + node, mask=inside, other=0).to(tl.int32)
    live = (((token >= 0) & (depth <= limit)) | (node == 0)) & inside
    live, up = live.to(tl.int32), tl.where(inside & (node > 0), parent, 0)
    for _ in range(DOUBLINGS):
        live &= tl.gather(live, up, 0)
        up = tl.gather(up, up, 0)
    return tl.where(node == 0, -1, parent), token, live == 1


@jit
def _distribution(scores, v, inside, top, per_nat, total):
    """Probabilities of the tokens v of one row; 0 outside."""
    x = tl.load(scores + v, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    return tl.exp2((x - top) * per_nat) * (1.0 / total)


@jit
def _target_distribution(row, v, inside, heat, lowest, top, unit, total, CUT: tl.constexpr):
    """The same for the target: where distributions are cut, `row` holds logits that are not yet divided or cut."""
    if CUT:
        x = scores_at(row, v, inside, heat)
        p = tl.where(key_of(x, v) >= lowest, tl.exp2((x - top) * unit) * (1.0 / total), 0.0)
    else:
        p = _distribution(row, v, inside, top, unit, total)
    return p


@jit
def _listed(tokens, i, count, vocab_size):
    """The i-th of the `count` listed tokens, or the i-th of all tokens where none are listed."""
    return tl.where(count < vocab_size, tl.load(tokens + i, mask=(i < count) & (count < vocab_size), other=0), i)


@jit
def _residual(P, q, v, steps, count):
    """A node's distribution P, and the rest q of its draft's distribution, at the tokens v after `count` children have failed."""
    for i in range(count):
        r, soft, hot = tl.load(steps + 5 * i), tl.load(steps + 5 * i + 1), tl.load(steps + 5 * i + 2)
        scale, x = tl.load(steps + 5 * i + 3), tl.load(steps + 5 * i + 4).to(tl.int32, bitcast=True)
        P = tl.maximum(r * P - soft * q - tl.where(v == x, hot, 0.0), 0.0) * scale
        q = tl.where(v == x, 0.0, q)
    return P, q


@jit
def _walk_children(
    node, parent, token, live, n, r, signals, steps, drawn,
    p_row, p_heat, p_lowest, p_top, p_unit, p_total, p_tokens, p_count, q_row, q_top, q_unit, q_total, q_tokens, q_count,
    vocab_size, RECURSIVE: tl.constexpr, CUT: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Publish the rates of the children of node n, which is entered at rate r, and store each child's step.  -> n's last rate"""
    children = live & (parent == n)
    last, mass, num_children = n, r * 0.0 + 1.0, tl.sum(children.to(tl.int32), 0)
    for j in range(num_children):
        c = tl.min(tl.where(children & (node > last), node, NODES), 0)
        last = c
        x = tl.sum(tl.where(node == c, token, 0), 0)
        p_x = _target_distribution(p_row, x, x >= 0, p_heat, p_lowest, p_top, p_unit, p_total, CUT)
        q_x = _distribution(q_row, x, x >= 0, q_top, q_unit, q_total)
        p_x, q_x = _residual(p_x, q_x, x, steps, j)
        soft = tl.load(drawn + c).to(tl.int32) != 0
        there = (q_x > 0) | (soft == 0)
        chance, wanted = tl.where(soft, q_x / mass, 1.0), r * p_x
        rate = tl.where(wanted < chance, wanted / chance, tl.where(wanted > 0, 1.0, 0.0))
        rate = tl.where(there, rate, 0.0)
        # The sign bit distinguishes a published rate, even a rate of 0, from the zeros before.
        tl.atomic_xchg(signals + c, rate.to(tl.int32, bitcast=True) | -0x80000000)
        inverse, hot = tl.where(soft, 1.0 / mass, 0.0), tl.where(soft, 0.0, 1.0)
        sums, left = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        for start in range(0, p_count, BLOCK):
            v = start + tl.arange(0, BLOCK)
            inside = v < p_count
            if CUT:
                v = _listed(p_tokens, v, p_count, vocab_size)
            P = _target_distribution(p_row, v, inside, p_heat, p_lowest, p_top, p_unit, p_total, CUT)
            q = _distribution(q_row, v, inside, q_top, q_unit, q_total)
            P, q = _residual(P, q, v, steps, j)
            sums += tl.maximum(r * P - inverse * q - tl.where(v == x, hot, 0.0), 0.0)
            left += tl.where(v == x, 0.0, q)
        if CUT:
            left = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, tl.where(j < num_children - 1, q_count, 0), BLOCK):
                v = start + tl.arange(0, BLOCK)
                inside = v < q_count
                v = _listed(q_tokens, v, q_count, vocab_size)
                q = _distribution(q_row, v, inside, q_top, q_unit, q_total)
                _, q = _residual(q, q, v, steps, j)
                left += tl.where(v == x, 0.0, q)
        S = tl.sum(sums, 0)
        mass = tl.where(there, tl.sum(left, 0), mass)
        some = there & (S > 1e-30)
        tl.store(steps + 5 * j, tl.where(some, r, 1.0))
        tl.store(steps + 5 * j + 1, tl.where(some, inverse, 0.0))
        tl.store(steps + 5 * j + 2, tl.where(some, hot, 0.0))
        tl.store(steps + 5 * j + 3, tl.where(some, 1.0 / S, 1.0))
        tl.store(steps + 5 * j + 4, tl.where(there, x, -1).to(tl.float32, bitcast=True))
        tl.debug_barrier()
        if not RECURSIVE:
            r = tl.where(there, tl.where(some, S / (S + 1.0 - r), tl.where(r >= 1.0, 1.0, 0.0)), r)
    return r


@jit(do_not_specialize=["batch", "num_nodes", "max_depth"])
def _verify_ratio(
    scores, temperature, top, total, best, lowest, kept, num_kept,
    draft_scores, draft_temperature, draft_top, draft_total, draft_kept, num_draft_kept, distribution, drawn,
    parents, depths, tokens, depth_limit, seed, sample, position, signals, rates, steps, keys, path, num_accepted, bonus,
    topology_stride, distribution_stride, drawn_stride, batch, num_nodes, max_depth, vocab_size,
    RECURSIVE: tl.constexpr, CUT: tl.constexpr, NODES: tl.constexpr, DOUBLINGS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, UNIFORM: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    log2_e: tl.constexpr = 1.4426950408889634
    pid = tl.program_id(0)
    request = (pid % batch).to(tl.int64)
    heat = tl.load(temperature + request * num_nodes).to(tl.float32)
    parent, token, live = _topology(
        parents + request * topology_stride, depths + request * topology_stride, tokens + request * num_nodes,
        tl.load(depth_limit + request), num_nodes, NODES, DOUBLINGS,
    )  # fmt: skip
    node = tl.arange(0, NODES)
    first = request * num_nodes  # the request's first node
    signals += request * (num_nodes + 2)
    distribution += request * distribution_stride
    drawn += request * drawn_stride
    p_unit = log2_e / tl.where(heat > 0, heat, 1.0)
    if CUT:
        p_unit = log2_e + heat * 0.0  # p_top is a score, so it is already divided by the temperature
    q_unit = log2_e / tl.where(heat > 0, tl.load(draft_temperature + request).to(tl.float32), 1.0)
    if pid < num_nodes * batch:
        n = pid // batch
        if heat > 0:
            if tl.sum((live & (parent == n)).to(tl.int32), 0) > 0:
                r = heat * 0.0 + 1.0
                if not RECURSIVE:  # noqa: SIM102  one is known when it is compiled, the other is not
                    if n > 0:
                        bits = tl.atomic_add(signals + n, 0)
                        while bits == 0:
                            bits = tl.atomic_add(signals + n, 0)
                        r = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
                q_distribution = tl.load(distribution + n).to(tl.int64) * batch + request
                p_distribution = first + n
                p_lowest, p_tokens, p_count, q_tokens, q_count = 0, tokens, vocab_size, tokens, vocab_size
                if CUT:
                    p_lowest, p_count = tl.load(lowest + p_distribution), tl.load(num_kept + p_distribution)
                    q_count = tl.load(num_draft_kept + q_distribution)
                    p_tokens, q_tokens = kept + p_distribution * vocab_size, draft_kept + q_distribution * vocab_size
                r = _walk_children(
                    node, parent, token, live, n, r, signals,
                    steps + 5 * (first + tl.sum((parent < n).to(tl.int32), 0) - 1),
                    drawn, scores + p_distribution * vocab_size, heat, p_lowest, tl.load(top + p_distribution), p_unit,
                    tl.load(total + p_distribution), p_tokens, p_count,
                    draft_scores + q_distribution * vocab_size, tl.load(draft_top + q_distribution), q_unit, tl.load(draft_total +
                    q_distribution), q_tokens, q_count, vocab_size, RECURSIVE, CUT, NODES, BLOCK,
                )  # fmt: skip
                tl.store(rates + first + n, r)
            tl.debug_barrier()
            tl.atomic_add(signals + num_nodes, 1)
    else:
        part = pid // batch - num_nodes
        position_ = tl.load(position + request).to(tl.int64)
        seed_, sample_ = tl.load(seed + request).to(tl.int64), tl.load(sample + request).to(tl.int64)
        if heat > 0:
            done = tl.atomic_add(signals + num_nodes, 0)
            while done < num_nodes:
                done = tl.atomic_add(signals + num_nodes, 0)
            below = live & (node > 0)
            entered = (tl.load(signals + node, mask=below, other=0) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
            u = chunk_words(0, seed_, sample_, position_, UNIFORM, NODES).to(tl.float64) * 2.3283064365386963e-10
            if RECURSIVE:
                taken = (below & (u < entered)).to(tl.int32)
            else:
                kids = ((node[:, None] == parent[None, :]) & below[None, :]).to(tl.int32)  # [NODES, NODES]
                inner = tl.max(kids, 1) > 0
                rate = tl.where(inner, tl.load(rates + first + node, mask=below & inner, other=0.0), entered)
                taken = (below & (u < rate)).to(tl.int32)
                for _ in range(max_depth):
                    taken |= tl.max(kids * taken[None, :], 1)  # something is accepted at or below the node
        else:
            if CUT:  # the only kept token
                wanted = tl.load(kept + (first + tl.maximum(parent, 0)) * vocab_size, mask=live, other=-1).to(tl.int64)
            else:
                wanted = tl.load(best + first + tl.maximum(parent, 0), mask=live, other=-1)
            taken = (live & (node > 0) & (token == wanted)).to(tl.int32)
        n = part * 0
        count = part * 0
        path += request * (max_depth + 1)
        tl.store(path, n.to(tl.int64), mask=part == 0)
        for depth in range(max_depth):
            child = tl.min(tl.where((taken == 1) & (parent == n), node, NODES), 0)
            count += (child < NODES).to(tl.int32)
            n = tl.where(child < NODES, child, n)
            tl.store(path + depth + 1, n.to(tl.int64), mask=part == 0)
        tl.store(num_accepted + request, count.to(tl.int64), mask=part == 0)
        if heat > 0:
            tried = tl.sum((live & (parent == n)).to(tl.int32), 0)
            steps += 5 * (first + tl.sum((parent < n).to(tl.int32), 0) - 1)
            q_distribution = tl.load(distribution + n, mask=tried > 0, other=0).to(tl.int64) * batch + request
            p_top, p_total, p_lowest, p_count = tl.load(top + first + n), tl.load(total + first + n), 0, vocab_size
            if CUT:
                p_lowest, p_count = tl.load(lowest + first + n), tl.load(num_kept + first + n)
            q_top, q_total = tl.load(draft_top + q_distribution), tl.load(draft_total + q_distribution)
            p_row, q_row = scores + (first + n) * vocab_size, draft_scores + q_distribution * vocab_size
            key = key_of(tl.where(p_top == p_top, float("-inf"), p_top), n * 0)
            for start in range(part * BLOCK, p_count, PARTS * BLOCK):
                v = start + tl.arange(0, BLOCK)
                inside = v < p_count
                if CUT:
                    v = _listed(kept + (first + n) * vocab_size, v, p_count, vocab_size)
                P = _target_distribution(p_row, v, inside, heat, p_lowest, p_top, p_unit, p_total, CUT)
                q = _distribution(q_row, v, inside & (tried > 0), q_top, q_unit, q_total)
                P, q = _residual(P, q, v, steps, tried)
                if tl.max(P, 0) > 0:
                    if CUT:
                        words = token_words(v, seed_, sample_, position_, NOISE)
                    else:
                        words = chunk_words(start, seed_, sample_, position_, NOISE, BLOCK)
                    score = tl.where(P > 0, tl.log(P) + gumbel_of_word(words), float("-inf"))
                    highest = tl.max(score, 0)
                    key = tl.maximum(key, key_of(highest, tl.min(tl.where(score == highest, v, 0x7FFFFFFF), 0)))
            tl.store(keys + request * PARTS + part, key)
            tl.debug_barrier()
            if tl.atomic_add(signals + num_nodes + 1, 1) == PARTS - 1:
                key = tl.max(tl.load(keys + request * PARTS + tl.arange(0, PARTS)), 0)
                tl.store(bonus + request, 0x7FFFFFFF - (key & 0xFFFFFFFF))
                tl.store(signals + node, node * 0, mask=node < num_nodes)
                tl.store(signals + num_nodes + tl.arange(0, 2), tl.zeros((2,), tl.int32))
        elif part == 0:
            if CUT:
                tl.store(bonus + request, tl.load(kept + (first + n) * vocab_size).to(tl.int64))
            else:
                tl.store(bonus + request, tl.load(best + first + n))


def verify_ratio(
    rule, *, parents, depths, tokens, scores, temperature, draft_scores, draft_temperature, distribution, sampled, depth_limit,
    seed, sample, position, max_depth, workspace=None, kept=None,
):  # fmt: skip
    """Accepted path, its length and the token after it; see above for shapes.

    rule: a key of ratio_rules.RATIO_RULES. max_depth: of the tree. workspace (on a GPU): make_workspace of the same shape. kept
    (where distributions are cut, on a GPU): the keep_top.Kept of the target, for the same scores and temperature, and that of the
    draft, whose scores are already cut. Siblings are in the order in which they were sampled. Returns (path int64
    [B, max_depth + 1], num_accepted int64 [B], next token int64 [B]). Raises ValueError for shapes that do not fit.
    """
    if not on_triton(tokens):
        return verify_ratio_reference(
            rule, parents=parents, depths=depths, tokens=tokens, scores=scores, temperature=temperature, draft_scores=draft_scores,
            draft_temperature=draft_temperature, distribution=distribution, sampled=sampled, depth_limit=depth_limit, seed=seed,
            sample=sample, position=position, max_depth=max_depth,
        )  # fmt: skip
    (batch, num_nodes), (rows, vocab_size) = tokens.shape, scores.shape
    if rows != batch * num_nodes or draft_scores.shape[1:] != (batch, vocab_size):
        raise ValueError(
            f"verify_ratio takes scores [B N, V] and draft scores [L, B, V] for tokens {tuple(tokens.shape)}, got "
            f"{tuple(scores.shape)} and {tuple(draft_scores.shape)}"
        )
    per_request = draft_temperature, depth_limit, seed, sample, position
    if temperature.shape != (rows,) or any(x.shape != (batch,) for x in per_request):
        raise ValueError(
            f"verify_ratio takes temperature [{rows}], and the draft's, depth_limit, seed, sample and position [{batch}], got "
            f"{tuple(temperature.shape)} and "
            f"{[tuple(x.shape) for x in per_request]}"
        )
    per_node = parents, depths, distribution, sampled
    if any(x.shape not in ((batch, num_nodes), (num_nodes,)) for x in per_node) or parents.shape != depths.shape:
        raise ValueError(
            f"verify_ratio takes parents, depths, distribution and sampled [N] or [B, N] for {num_nodes} nodes, got "
            f"{[tuple(x.shape) for x in per_node]}"
        )
    if kept is not None and [len(x.count) for x in kept] != [rows, len(draft_scores) * batch]:
        raise ValueError(
            f"verify_ratio takes what is kept of {rows} and {len(draft_scores) * batch} rows, got {[len(x.count) for x in kept]}"
        )
    if workspace.rates.shape != tokens.shape:
        raise ValueError(f"the workspace is for {tuple(workspace.rates.shape)} nodes, not {tuple(tokens.shape)}")
    path = torch.empty(batch, max_depth + 1, dtype=torch.int64, device=tokens.device)
    num_accepted, bonus = (torch.empty(batch, dtype=torch.int64, device=tokens.device) for _ in range(2))
    if batch:
        if kept is None:
            draft = row_distributions(draft_scores.reshape(-1, vocab_size), draft_temperature)
            distributions = (
                (*row_distributions(scores, temperature), None, None, None),
                (draft.top, draft.total, None, None),
            )
        else:
            distributions = [(x.top, x.total, x.lowest, x.tokens, x.count) for x in kept]
            distributions = (
                (*distributions[0][:2], None, *distributions[0][2:]),
                (*distributions[1][:2], *distributions[1][3:]),
            )
        parts = workspace.keys.shape[1]
        _verify_ratio[(batch * (num_nodes + parts),)](
            scores.contiguous(), temperature.contiguous(), *distributions[0], draft_scores.contiguous(),
            draft_temperature.contiguous(), *distributions[1], distribution.contiguous(), sampled.contiguous(),
            parents.contiguous(), depths.contiguous(), tokens.contiguous(), depth_limit.contiguous(), seed.contiguous(),
            sample.contiguous(), position.contiguous(), *workspace, path, num_accepted, bonus, *(num_nodes if x.dim() == 2 else 0
            for x in (parents, distribution, sampled)), batch, num_nodes, max_depth, vocab_size, rule in RECURSIVE, kept is not
            None, max(triton.next_power_of_2(num_nodes), 4), max(max_depth, 1).bit_length(), parts, _BLOCK, ACCEPT_UNIFORM,
            RESIDUAL_NOISE, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return path, num_accepted, bonus
