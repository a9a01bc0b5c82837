"""Drafting with EAGLE-3 heads: as with EAGLE's, from several of the target's residual streams and over a draft vocabulary.

The head's maths: heads/eagle3.py; here it runs on the engine's kernels.

Letters: M rows, H hidden size of the head, V the target's vocabulary, VD the draft's.
"""

import torch

from ....kernels.linear.linear import linear
from ....kernels.rms_norm import rms_norm
from ...models.blocks import widened
from .eagle import EagleDrafter
from .lm_heads import WholeLMHead


class Eagle3Drafter(EagleDrafter):
    """Drafts with an Eagle3 head, as EagleDrafter does with an Eagle.

    Tokens that are not in its draft vocabulary have scores of minus infinity.
    """

    def __init__(self, head, decoder, num_speculative_tokens, sampling="shared_noise"):
        super().__init__(head, decoder, num_speculative_tokens, sampling)
        self.streams = head.features
        self.draft_token_ids = head.draft_token_ids  # [VD] or None
        self.vocab_size = head.config.vocab_size
        self.lm_head = WholeLMHead(head.lm_head.weight)

    def place_lm_heads(self, lm_heads):
        self.lm_head = lm_heads(self.head.lm_head.weight)

    def _layer_of(self, head):
        return head.midlayer

    def run(self, forward_pass, source, from_target):
        layer = self.head.midlayer
        state = linear(source.to(self.dtype), self.head.fc.weight) if from_target else source
        normed = _norm(layer.hidden_norm, state)
        embedded = _norm(layer.input_layernorm, self.embedded(forward_pass.tokens))
        residual = normed if layer.norm_before_residual else state
        return self.finish(torch.cat((embedded, normed), 1), residual, forward_pass)

    def logits(self, state):
        logits = widened(self.lm_head.product(_norm(self.head.norm, state)))
        if self.draft_token_ids is None:
            return logits
        whole = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return whole.index_copy_(1, self.draft_token_ids, logits)


def _norm(module, x):
    """A norm of the head on the engine's kernel.  [M, H] -> [M, H]"""
    return rms_norm(x, module.weight, module.eps)


DRAFTER = Eagle3Drafter
