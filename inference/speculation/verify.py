"""Verifiers: the rule that turns (tree, drafted tokens, target) into an accepted path and one more token.

`strict` and `synthetic` are called with (tree, tokens [B, N], target_tokens [B, N], batch); the ratio rules with (tree, draft,
batch, scores [B N, V], temperature [B N]), for they compare the laws of target and draft. All answer (path [B, D + 1],
num_accepted [B], bonus [B]) and know no cache, model or tokenizer. tree: TreeTensors; batch: slots.BatchRows. `strict` keeps every
bit and the ratio rules keep the law: see docs/lossless.md. `synthetic` keeps nothing: it accepts by given rates, to measure the
engine's speed without a trained head.

Letters: B requests, N nodes, D the tree's greatest depth, V vocabulary.
"""

import torch

from ...kernels.jit import on_triton
from ...kernels.sampling.keep_top import Kept
from ...kernels.sampling.philox import RESIDUAL_NOISE, gumbel, uniform
from ...kernels.speculation.row_laws import probabilities
from ...kernels.speculation.verify_ratio import make_workspace, verify_ratio
from ...kernels.speculation.verify_strict import verify_strict
from ...kernels.speculation.verify_synthetic import verify_synthetic
from .drawings import RATIO_VERIFIERS
from .ratio_rules import RATIO_RULES, Draft, draw
from .tree import DynamicTree

VERIFIERS = ("strict", *RATIO_VERIFIERS, "synthetic")


def strict(tree, tokens, target_tokens, batch):
    """Follow the child that carries the target's own token; where there is none, emit that token and stop.

    Nodes deeper than the tokens that the request may still emit are not taken.
    """
    limit = batch.remaining - 1
    return verify_strict(tree.parents, tree.depths, tokens, target_tokens, limit, tree.max_depth)


class Ratio:
    """A rule of ratio_rules.py by its name, on the device that the tensors are on. Keeps a workspace per batch size.

    Its noise is keyed by the position of a step's root (kernels/sampling/philox.py), so that no step uses another's again.
    """

    def __init__(self, name):
        self.name, self._workspaces = name, {}

    def __call__(self, tree, draft, batch, scores, temperature, kept=None):
        """draft: draw_nodes.Drafted, without scores if all of it was chosen without chance; scores, temperature: the target's law
        at every node, as row_laws.py defines it; kept: on a GPU, where laws are cut, that of what keep_top.Kept says, and a draft
        with scores has one too."""
        limit, key = batch.remaining - 1, (batch.seed, batch.sample, batch.committed)
        if draft.scores is None:
            draft = with_any_law(draft, scores, kept)
        if not on_triton(scores):
            return self.by_reference(tree, draft, scores, temperature, limit, key)
        shape = tuple(draft.tokens.shape)
        if shape not in self._workspaces:
            self._workspaces[shape] = make_workspace(*shape, scores.device)
        return verify_ratio(
            self.name in ("token", "recursive"), tree.parents, tree.depths, draft.tokens, scores, temperature, draft.scores,
            draft.temperature, draft.law, draft.drawn, limit, *key, tree.max_depth, self._workspaces[shape],
            None if kept is None else (kept, draft.kept),
        )  # fmt: skip

    def by_reference(self, tree, draft, scores, temperature, limit, key):
        """The same by the reference: every law is computed."""
        (batch, nodes), vocab_size = draft.tokens.shape, scores.shape[1]
        p = probabilities(scores, temperature).view(batch, nodes, vocab_size)
        q = probabilities(draft.scores.flatten(0, 1), draft.temperature.repeat(len(draft.scores)))
        q = q.view(draft.scores.shape).transpose(0, 1)  # [B, L, V]
        drawn = draft.drawn & (draft.temperature > 0)[:, None]  # [B, N]
        # Where q underflows its token counts as an empty slot; the others are renormalised without it, so the law is kept.
        rows = torch.arange(batch, device=q.device)[:, None]
        lost = drawn & (q[rows, draft.law[tree.parents], draft.tokens.clamp(min=0)] == 0)
        told = Draft(draft.tokens.masked_fill(lost, -1), q, draft.law, drawn)
        found = RATIO_RULES[self.name](tree, told, p, uniform(*key, nodes), limit)
        return found.path, found.num_accepted, draw(found.law, gumbel(*key, vocab_size, RESIDUAL_NOISE))


def with_any_law(draft, scores, kept):
    """A draft of which nothing is drawn, with a law that is read and plays no part: some of the target's scores, so that nothing is
    copied or computed for it, at a temperature so high that no probability overflows (where laws are cut, a highest score is one
    that has been divided)."""
    batch = len(draft.tokens)
    return draft._replace(
        scores=scores[None, :batch],
        temperature=torch.full((batch,), 1e30, device=scores.device),
        law=torch.zeros_like(draft.law),
        kept=None if kept is None else Kept(*(None if x is None else x[:batch] for x in kept)),
    )


class Synthetic:
    """Accepts depth d with probability rates[d - 1] (unconditional, so falling), whatever the tokens are.

    The accepted path runs through the first candidate of every depth. Draws depend on a request's seed and position.
    """

    def __init__(self, rates, device):
        numbers = isinstance(rates, list | tuple) and all(isinstance(rate, int | float) for rate in rates)
        if not numbers or not rates or not 0 <= min(rates) <= max(rates) <= 1 or sorted(rates)[::-1] != list(rates):
            raise ValueError(
                f"acceptance_rates are the unconditional rates of position 1, 2, ...: falling, from 0 to 1; got {rates!r}"
            )
        self.rates = torch.tensor(rates, dtype=torch.float64, device=device)

    def __call__(self, tree, tokens, target_tokens, batch):
        path = tree.ancestors[tree.deepest]
        return verify_synthetic(path, self.rates, batch.seed, batch.committed, batch.remaining, target_tokens)


def rates_for_length(acceptance_length, depth):
    """Falling rates r, r^2, ... r^depth whose sum plus one is `acceptance_length`. ValueError if no r in [0, 1] does it."""
    if not isinstance(acceptance_length, int | float) or not 1 <= acceptance_length <= depth + 1:
        raise ValueError(
            f"acceptance_length must be from 1 to {depth + 1} tokens per step with drafts {depth} deep, got {acceptance_length!r}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if 1 + sum(middle**i for i in range(1, depth + 1)) < acceptance_length:
            low = middle
        else:
            high = middle
    return [high**i for i in range(1, depth + 1)]


class TreeTensors:
    """A topology on a device: parents, depths and ranks [N], ancestors [N, D + 1]; `deepest`: the first node of depth D.

    columns [N - 1]: where each node but the root stands among candidates [D, W] laid out flat, W the greatest of the tree's widths.
    Of a DynamicTree nothing is known before it is grown (draw_nodes.Topology), and the depths are 0.
    """

    def __init__(self, tree, device):
        self.tree = tree
        self.num_nodes, self.max_depth = tree.num_nodes, tree.max_depth
        if isinstance(tree, DynamicTree):
            self.depths = torch.zeros(tree.num_nodes, dtype=torch.int64, device=device)
            return
        self.parents = torch.tensor((0, *tree.parents[1:]), device=device)
        self.depths = torch.tensor(tree.depths, device=device)
        self.ranks = torch.tensor(tree.ranks, device=device)
        self.ancestors = torch.tensor(tree.ancestors, device=device)
        self.deepest = tree.depths.index(tree.max_depth)
        self.columns = (self.depths[1:] - 1) * max(tree.widths, default=0) + self.ranks[1:]
