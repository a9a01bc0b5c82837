"""Attention of a step that holds both: nodes of draft trees, then prompts' tokens, in the rows of one pass on a GPU."""

from dataclasses import dataclass

from ..linear.linear import empty_rows
from .attention_fold import EVERYTHING
from .prefill_attention import PrefillIndex
from .tree_attention import TreeIndex


@dataclass(frozen=True)
class MixedIndex:
    """Where the keys of both kinds of rows lie. Made once per forward pass, used by every layer."""

    trees: TreeIndex
    prompts: PrefillIndex

    def attend(self, q, kv, options=EVERYTHING):
        """q [B * N + T, HQ, D], kv [2, rows, D] of one layer -> [B * N + T, HQ, D]

        Few programs of prompts walk long contexts, many of chains read much memory. So chains that fill the card run beside the
        prompts, which come first; other trees run after them.
        """
        nodes, out = self.trees.num_rows, empty_rows(q.shape[0], q[0].numel(), q.dtype, q.device).view(q.shape)
        self.prompts.attend(q[nodes:], kv, options, out=out[nodes:])
        self.trees.attend(q[:nodes], kv, options, out=out[:nodes], late=True)
        return out
