"""Drafting without a model: copy what followed the newest tokens at their last occurrence (kernels/speculation/prompt_lookup.py).

This is vLLM's method "ngram". It suits outputs that repeat their prompt or themselves: edited code, quotations, tables. It proposes
chains only, because an earlier place has one continuation, and nothing where the newest tokens have not occurred before.

Letters: B requests, D the chain's depth, L committed length.
"""

import torch

from ....kernels.speculation.prompt_lookup import prompt_lookup
from ..draft import Draft
from .drafter import Drafter
from .levels import no_distributions


class NgramDrafter(Drafter):
    """Copies what followed the longest match of the newest `shortest` to `longest` tokens.

    tree: tree.Tree, a chain. Raises ValueError for another tree, and unless 1 <= shortest <= longest.
    """

    def __init__(self, tree, shortest, longest):
        if not tree.is_chain or not tree.max_depth:
            raise ValueError(
                f"prompt lookup drafts a chain of at least one token, this tree has {tree.num_nodes} nodes, {tree.max_depth} deep: "
                "name the tree chain, or none"
            )
        whole = all(isinstance(x, int) and not isinstance(x, bool) for x in (shortest, longest))
        if not whole or not 1 <= shortest <= longest:
            raise ValueError(
                f"prompt_lookup_min and prompt_lookup_max must be whole numbers, 1 <= min <= max, got {shortest!r} and {longest!r}"
            )
        self.shortest, self.longest, self.num_speculative_tokens = shortest, longest, tree.max_depth

    def copied(self, batch, num_drafted):
        """Tokens after the root, -1 where there is nothing to propose.  batch: BatchRows -> [B, num_drafted]"""
        # The root stands at L, so L + 1 tokens are known.
        return prompt_lookup(batch.history, batch.seats, batch.committed + 1, self.shortest, self.longest, num_drafted)

    def candidates(self, batch, widths):
        """One candidate per depth, the first; the others are -1: see Drafter.candidates."""
        found = self.copied(batch, len(widths))[..., None]
        return torch.nn.functional.pad(found, (0, max(widths) - 1), value=-1)

    def propose(self, batch, tree, processor=None):
        """Copied tokens; nothing is sampled, so the Draft has no distributions. See Drafter.propose; processor is not used."""
        tokens = torch.cat((batch.root[:, None], self.copied(batch, tree.max_depth)), 1)
        return Draft(tokens, tree, None, None, *no_distributions(tree))
