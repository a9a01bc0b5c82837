"""Verifiers: the rule that turns a draft and the target's scores into an accepted path and one more token.

    verifier(tree, draft, target)  ->  path [B, D + 1], num_accepted [B], next token [B]

tree: TreeOnDevice; draft: Draft; target: the engine's TargetScores, the scores of all nodes, changed as their requests ask. It
has the requests' rows as `batch` and the tokens that it was computed for as `drafted` [B, N]. `sample()` gives the target's own
token after every node, `distributions()` the scores that the ratio rules compare with the draft's. Verifiers know no cache, model
or tokenizer. `strict` keeps every bit and the ratio rules keep the distribution: see docs/lossless.md. `synthetic` keeps nothing:
it accepts by given rates, to measure the engine's speed without a trained head.

Letters: B requests, N nodes, D the tree's greatest depth, V vocabulary.
"""

import torch

from ...kernels.jit import on_triton
from ...kernels.speculation.verify_ratio import make_workspace, verify_ratio
from ...kernels.speculation.verify_strict import verify_strict
from ...kernels.speculation.verify_synthetic import verify_synthetic


class Strict:
    """Follow the child that equals the target's own token; if no child does, emit that token and stop.

    Nodes deeper than the number of tokens that the request may still emit are never accepted.
    """

    name = "strict"

    @property
    def undrafted(self):
        """The verifier of steps that draft nothing."""
        return self

    def __call__(self, tree, draft, target):
        limit = target.batch.remaining - 1
        return verify_strict(tree.parents, tree.depths, target.drafted, target.sample(), limit, tree.max_depth)


class Ratio:
    """The verifier of one rule in kernels/speculation/ratio_rules.py, chosen by name. Keeps a workspace per batch size on a GPU.

    Its noise is keyed by the position of a step's root (kernels/sampling/philox.py), so no step reuses the noise of another.
    """

    def __init__(self, name):
        self.name, self._workspaces = name, {}

    @property
    def undrafted(self):
        """The verifier of steps that draft nothing: with nothing to compare, it emits the target's own token."""
        return Strict()

    def __call__(self, tree, draft, target):
        scores, temperature, kept = target.distributions()
        if draft.scores is None:
            draft = with_any_distribution(draft, scores, kept)
        batch, shape = target.batch, tuple(draft.tokens.shape)
        if on_triton(scores) and shape not in self._workspaces:
            self._workspaces[shape] = make_workspace(*shape, scores.device)
        return verify_ratio(
            self.name,
            parents=tree.parents,
            depths=tree.depths,
            tokens=draft.tokens,
            scores=scores,
            temperature=temperature,
            draft_scores=draft.scores,
            draft_temperature=draft.temperature,
            distribution=draft.distribution,
            sampled=draft.sampled,
            depth_limit=batch.remaining - 1,
            seed=batch.seed,
            sample=batch.sample,
            position=batch.committed,
            max_depth=tree.max_depth,
            workspace=self._workspaces.get(shape),
            kept=None if kept is None else (kept, draft.kept),
        )


def with_any_distribution(draft, scores, kept):
    """A draft without sampled tokens, given a dummy distribution. The kernel reads it; the result does not depend on it.

    The dummy is a part of the target's scores, so nothing is copied or computed. Its temperature is so high that no probability
    overflows (where distributions are cut, a highest score is already divided by the temperature).
    """
    batch = len(draft.tokens)
    return draft._replace(
        scores=scores[None, :batch],
        temperature=torch.full((batch,), 1e30, device=scores.device),
        distribution=torch.zeros_like(draft.distribution),
        kept=None if kept is None else type(kept)(*(None if x is None else x[:batch] for x in kept)),
    )


class Synthetic:
    """Accepts depth d with probability rates[d - 1] (unconditional, so falling), whatever the tokens are.

    The accepted path runs through the first candidate of every depth. Draws depend on a request's seed and position.
    """

    name = "synthetic"

    def __init__(self, rates, device):
        check_rates(rates)
        self.rates = torch.tensor(rates, dtype=torch.float64, device=device)

    @property
    def undrafted(self):
        return self

    def __call__(self, tree, draft, target):
        path, batch = tree.ancestors[tree.tree.deepest], target.batch
        return verify_synthetic(path, self.rates, batch.seed, batch.committed, batch.remaining, target.sample())


def check_rates(rates):
    """ValueError unless these are possible acceptance rates: a list of numbers from 0 to 1 that never rise."""
    numbers = isinstance(rates, list | tuple) and all(isinstance(rate, int | float) for rate in rates)
    if not numbers or not rates or not 0 <= min(rates) <= max(rates) <= 1 or sorted(rates)[::-1] != list(rates):
        raise ValueError(
            f"acceptance_rates are the unconditional rates of position 1, 2, ...: falling, from 0 to 1; got {rates!r}"
        )


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
