"""Drafting depth by depth, for drafters whose distributions depend on the drafted tokens: one per node with children.

A drafter of this kind gives the distribution after the root (`start`), and those after further nodes from their tokens and the
state of their parents (`expand`). All of them sample children in the same ways (draft_sampling.py).

Letters: B requests, N nodes, n nodes with children of one depth, I of all depths, W candidates per node, S state, V vocabulary, VD
that of the drafter.
"""

from dataclasses import replace

import torch

from ....kernels.jit import on_triton
from ....kernels.sampling.sample import log_sum_exp, top_tokens
from ....kernels.speculation.dynamic_tree import Candidates, grow, prune
from ..draft import Draft
from ..draft_sampling import OWN_NOISE, sampled_nodes
from ..draw_nodes import Families, draw_families
from ..tree import chain
from ..tree_on_device import TreeOnDevice
from .drafter import Drafter, rows_of
from .levels import GrownLevel, GrownLevels, Levels, choose


class SequentialDrafter(Drafter):
    """See above. sampling: a way of draft_sampling.py."""

    autoregressive = True

    def __init__(self, sampling):
        self.sampling = sampling
        self._levels = {}  # per tree

    def start(self, batch):
        """The distribution after the root.  batch: BatchRows  ->  logits [1, B, VD], state [B, 1, S]"""
        raise NotImplementedError

    def _scored(self, logits, width, is_whole=False):
        """What to draw `width` tokens from, and which tokens these scores are of: see top_tokens.

        logits [n, B, VD]  ->  themselves and token_ids, or scores [n, B, V] and None: with is_whole, if VD are too few, and on the
        CPU, where drafts share the target's rows of noise
        """
        if self.token_ids is None or is_whole or width > len(self.token_ids) or not on_triton(logits):
            return self.whole(logits), None
        return logits, self.token_ids

    def expand(self, batch, level, tokens, state):
        """Distributions after the nodes of a level (levels.Level), whose parents' states are those given.

        tokens [B, n], state [B, n, S]  ->  logits [n, B, VD], state [B, n, S]
        """
        raise NotImplementedError

    def propose(self, batch, tree, processor=None):
        """Tokens of all nodes; their distributions too unless noise is shared: see Drafter.propose."""
        if tree.tree.grows:
            return self._grow(batch, tree, processor)
        plan = self.levels(tree)
        draws = batch.draws.view(3, len(batch.seats), -1).transpose(1, 2)  # [3, N, B]
        seed, sample, position = choose(
            draws[:, : plan.num_inner] if plan.inner is None else draws, plan.inner
        ).contiguous()
        # Tokens that are not sampled are accepted by the target's distribution alone.
        with_distributions, distributions, kept = self.sampling in OWN_NOISE, None, []
        is_whole = with_distributions or processor is not None
        tokens, (logits, state) = [batch.root[:, None]], self.start(batch)
        for level, following in zip(plan.levels, [*plan.levels[1:], None]):
            scores, token_ids = self._scored(logits, level.width, is_whole)
            temperature, left = batch.temperature, None
            if processor is not None:
                scores, temperature, left = processor(scores, level.depths + 1)
            here = slice(level.first, level.first + level.count)
            keys = [x[here].flatten() for x in (seed, sample, position)]
            found = self._draw(level, scores, temperature, keys, batch, token_ids)  # [n, B, W]
            children = choose(found.transpose(0, 1).flatten(1), level.columns)  # [B, c]
            tokens.append(children)
            if with_distributions:
                if distributions is None:
                    distributions = scores.new_empty(plan.num_inner, *scores.shape[1:])
                distributions[here] = scores
                kept.append(left)
            if following is not None:
                inner = choose(children, level.taken)
                if with_distributions:
                    inner = inner.clamp(min=0)  # an empty node is computed as if it held token 0
                logits, state = self.expand(batch, following, inner, choose(state, level.parents))
        tokens = choose(torch.cat(tokens, 1), plan.order)
        if self.sampling == "shared_noise":
            return Draft(tokens, tree)
        if not with_distributions:
            return Draft(tokens, tree, None, None, *plan.chosen)
        joined = None if kept[0] is None else type(kept[0])(*(torch.cat(parts) for parts in zip(*kept)))
        sampled = sampled_nodes(self.sampling, tree.parents)
        return Draft(
            tokens, tree, distributions, temperature, distribution=plan.distribution, sampled=sampled, kept=joined
        )

    def _draw(self, level, scores, temperature, keys, batch, token_ids):
        """Candidates of the level's nodes.  scores [n, B, V] or, of token_ids, [n, B, VD], temperature [B], keys: three [n B]

        ->  [n, B, W]
        """
        if self.sampling in ("shared_noise", "greedy"):
            heat = temperature if level.count == 1 else temperature.repeat(level.count)
            noise = () if self.sampling == "greedy" else (heat, *keys)
            found = top_tokens(scores.flatten(0, 1), level.width, *noise, token_ids=token_ids)
            return found.view(*scores.shape[:2], level.width)
        distributions = torch.arange(level.count, device=scores.device)
        families = Families(level.width, distributions, level.nodes, level.sizes)
        return draw_families(self.sampling, scores, families, temperature, (batch.seed, batch.sample, batch.committed))

    def _grow(self, batch, tree, processor):
        """Draft a dynamic tree: kernels/speculation/dynamic_tree.py.  -> Draft, with its own trees and no distributions"""
        plan, width, requests = self.levels(tree), tree.tree.width, len(batch.seats)
        candidates = Candidates.empty(requests, tree.max_depth, width, batch.root.device)
        temperature, wide = None, batch
        if self.sampling == "shared_noise":
            # The keys of `wide` are those of a level's k B rows, repeated once for all levels.
            integers, floats = batch.integers.repeat(1, width), batch.floats.repeat(1, width)
            temperature, wide = batch.temperature, replace(batch, integers=integers, floats=floats)
        nodes, (logits, state) = None, self.start(batch)  # [n, B, VD], [B, n, S], n = 1 and then the width
        for depth in range(tree.max_depth):
            scores, token_ids = self._scored(logits, width, processor is not None)
            heat = wide.temperature[: logits.shape[:2].numel()]
            if processor is not None:
                scores, heat, _ = processor(scores, plan.depths[depth, : len(logits)])
                heat = heat.repeat(len(logits))
            nodes = grow(candidates, nodes, *self._confidence(scores, heat, token_ids, width, depth, wide), temperature)
            if nodes is not None:
                level = GrownLevel(depth + 1, depth * width + 1, width, nodes.paths, plan.depths[depth])
                logits, state = self.expand(batch, level, nodes.tokens, rows_of(state, nodes.parents))
        tokens, parents, depths, ancestors = prune(candidates, batch.root, tree.num_nodes)
        grown = TreeOnDevice(tree.tree, depths, parents, ancestors)
        if self.sampling == "shared_noise":
            return Draft(tokens, grown)
        # Nothing is sampled, so the verifier reads no distribution.
        return Draft(tokens, grown, None, None, *plan.chosen)

    def _confidence(self, scores, temperature, token_ids, width, depth, wide):
        """The best tokens of nodes at a depth, and the numbers that give their confidence (kernels/speculation/dynamic_tree.py).

        scores [n, B, V] or, of token_ids, [n, B, VD], temperature [n B], wide: BatchRows with the keys of n B rows or more
        ->  tokens and their scores [n, B, width], log_sums [n, B]. Without noise a token's confidence is the draft's probability.
        With the target's noise the draw is nearly known, and the confidence is the softmax over the best perturbed scores.
        """
        rows, keys = scores.flatten(0, 1), ()
        if self.sampling == "shared_noise":
            position = wide.committed + (1 + depth)
            keys = temperature, *(x[: len(rows)] for x in (wide.seed, wide.sample, position))
        tokens, best = top_tokens(rows, width, *keys, with_scores=True, token_ids=token_ids)
        shape = scores.shape[:2]
        return tokens.view(*shape, width), best.view(*shape, width), log_sum_exp(rows).view(shape)

    def candidates(self, batch, widths):
        """The best tokens of each depth, best first, after the draft's own first choices: see Drafter.candidates."""
        width, found, (logits, state) = max(widths), [], self.start(batch)
        levels = self.levels(TreeOnDevice.of(chain(len(widths)), batch.root.device)).levels
        for level in levels:
            keys = batch.temperature, batch.seed, batch.sample, batch.committed + 1 + level.depth
            scores, token_ids = self._scored(logits, width)
            found.append(top_tokens(scores[0], width, *keys, token_ids=token_ids))
            if level.depth + 1 < len(widths):
                logits, state = self.expand(batch, levels[level.depth + 1], found[-1][:, :1], state)
        return torch.stack(found, 1)

    def levels(self, tree):
        """The Levels of a TreeOnDevice, the GrownLevels of one that grows."""
        if tree.tree not in self._levels:
            self._levels[tree.tree] = (GrownLevels if tree.tree.grows else Levels)(tree)
        return self._levels[tree.tree]
