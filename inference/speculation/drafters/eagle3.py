"""Drafting with EAGLE-3 heads: as with EAGLE's, from several of the target's residual streams and over a draft vocabulary.

The head's maths: heads/eagle3.py; here it runs on the engine's kernels.

Letters: M rows, H hidden size of the head, V the target's vocabulary, VD the draft's.
"""

from ....kernels.linear.linear import linear
from ....kernels.speculation.normed_pair import normed_pair
from ...models.blocks import Norm, widened
from .drafter import free_weights
from .eagle import EagleDrafter
from .lm_heads import WholeLMHead


class Eagle3Drafter(EagleDrafter):
    """Drafts with an Eagle3 head, as EagleDrafter does with an Eagle.

    Tokens that are not in its draft vocabulary are not drafted.
    """

    def __init__(self, head, decoder, num_speculative_tokens, sampling="shared_noise"):
        super().__init__(head, decoder, num_speculative_tokens, sampling)
        self.streams = head.features
        self.take_draft_vocabulary(head.draft_token_ids, head.config.vocab_size)
        self.lm_head = WholeLMHead(head.lm_head.weight)

    def quantise(self, release):
        super().quantise(release)
        if release:
            free_weights([self.head.lm_head])

    def _whole_lm_head(self):
        return self.lm_head

    def place_lm_heads(self, lm_heads):
        self.lm_head = lm_heads(self.head.lm_head.weight)

    def _layer_of(self, head):
        return head.midlayer

    def _last_norm(self, head):
        return Norm(head.norm.weight, head.norm.eps)

    def run(self, forward_pass, source, from_target):
        normed, state = self.finish(*self.entering(forward_pass.tokens, source, from_target), forward_pass)
        return state, normed

    def entering(self, tokens, source, from_target):
        layer = self.head.midlayer
        state = linear(source.to(self.dtype), self.head.fc.weight) if from_target else source
        own, other = layer.input_layernorm, layer.hidden_norm
        table = self.head.embed_tokens.weight
        pair, normed = normed_pair(tokens, table, own.weight, state, other.weight, own.eps, other.eps)
        return pair, normed if layer.norm_before_residual else state

    def normed(self, state):
        return self.last_norm(state)[0]

    def logits(self, normed):
        return widened(self.lm_head.product(normed))


DRAFTER = Eagle3Drafter
