"""EAGLE heads (EAGLE-1 arXiv 2401.15077; EAGLE-2, 2406.16858, drafts trees with the same weights): one decoder layer that predicts
the target's next feature.

    u_t = fc([e(x_{t+1}) ; f_t])         e the target's embedding, f_t its last hidden state after the final norm
    s_t = DecoderLayer(u_t)              without a norm before the attention; position t
    logits = target.lm_head(s_t)         predicts x_{t+2}; s_t is the f of the next step, there is no final norm

Letters: B rows of a batch, T tokens per row, H hidden size, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import nn

from .layers import DecoderLayer, LayerConfig, Rotary, check_embedding, share_embedding
from .packed_attention import PackedAttention


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LayerConfig):
    """Shape of an EAGLE head. `hidden_size` and `vocab_size` are the target's."""

    fc_bias: bool = False


class Eagle(nn.Module):
    """One step ahead over one feature of the target; unrolled on its own states as deep as one likes.

    features: what it reads from the target (`final`: the last hidden state after the final norm).
    embed_tokens: the target's table, never trained; None if the head's file held none, until take_embedding.
    """

    features = ("final",)

    def __init__(self, config):
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size).requires_grad_(False)
        self.embedding_is_targets = False  # then files leave it out
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layers = nn.ModuleList([DecoderLayer(config, size)])
        self.rotary = Rotary(config)

    @property
    def num_speculative_tokens(self):
        """A default, not a limit."""
        return self.config.num_speculative_tokens

    @property
    def label_offsets(self):
        """Step i at position t predicts the token at t + label_offsets[i]."""
        return tuple(2 + i for i in range(self.num_speculative_tokens))

    @property
    def needs_embedding(self):
        return self.embed_tokens is None

    def take_embedding(self, weight):
        """Use the target's embedding table [V, H] itself, without a copy. ValueError if it is of another shape."""
        self.embed_tokens = share_embedding(weight, self.config.vocab_size, self.config.hidden_size)
        self.embedding_is_targets = True

    def forward(self, features, next_tokens, position_ids, document_ids):
        """One step, teacher-forced, over packed rows: the states that target.lm_head turns into logits.

        features [B, T, H], next_tokens [B, T] those at t + 1, position_ids [B, T] of t, document_ids [B, T] -> [B, T, H]
        """
        check_embedding(self.embed_tokens)
        pair = torch.cat((self.embed_tokens(next_tokens), features), -1)  # [B, T, 2 H]
        x = self.fc(pair.to(self.fc.weight.dtype))
        return self.layers[0](x, x, self.rotary(position_ids, x.dtype), PackedAttention(document_ids))
