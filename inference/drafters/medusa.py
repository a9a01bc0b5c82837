"""Drafting with Medusa heads: head k proposes candidates for depth k + 1 from the feature of the last committed token.

The heads do not look at each other's tokens, so every node of depth d takes its candidate from one list: rank r means the
r-th best of head d - 1, whatever the parent. Under noise the candidates are the top of log q + G with the target's own G at that
position (shared noise): it proposes what the target is about to draw.
"""

import torch

from ...heads.medusa import Medusa


class MedusaDrafter:
    """Drafts trees with Medusa heads.

    head: a Medusa module, read in place (a head in training is used as it is at the moment); lm_head_weight [V, H]: the target's.
    """

    features = Medusa.features

    def __init__(self, head, lm_head_weight):
        self.head = head
        self.num_speculative_tokens = head.num_speculative_tokens
        self.lm_head_weight = lm_head_weight
        self.dtype = next(head.parameters()).dtype
        # A shared lm_head is used in the heads' dtype; where that is the target's own, no copy is made.
        self.shared_weight = lm_head_weight.to(self.dtype) if head.config.shared_lm_head else None

    def candidates(self, feature, widths, temperature, noise):
        """The best tokens of each depth, best first.

        feature [B, H]; widths: how many per depth; temperature [B] or None; noise [B, D, V] or None: the target's noise at the
        positions of depth 1..D  ->  list over depth of int64 [B, width]
        """
        feature = feature.to(self.dtype)
        found = []
        for depth, width in enumerate(widths):
            scores = self.head.logits(feature, depth, self.shared_weight).float()  # [B, V]
            if noise is not None:
                scores = scores / temperature[:, None] + noise[:, depth]
            found.append(scores.topk(width, -1).indices)
        return found

    def propose(self, root_tokens, feature, tree, temperature, noise):
        """Tokens of all nodes.  root_tokens [B], feature [B, H], tree: TreeTensors  ->  (tokens [B, N], candidates)"""
        found = self.candidates(feature, tree.tree.widths, temperature, noise)
        offsets, columns = [0], [root_tokens[:, None]]
        for candidates in found:
            offsets.append(offsets[-1] + columns[-1].shape[1])
            columns.append(candidates)
        column = torch.tensor(offsets, device=feature.device)[tree.depths] + tree.ranks
        return torch.cat(columns, 1)[:, column], found
