"""EAGLE heads (EAGLE-1 arXiv 2401.15077; EAGLE-2, 2406.16858, drafts trees with the same weights): one decoder layer that predicts
the target's next feature.

    u_t = fc([e(x_{t+1}) ; f_t])         e the target's embedding, f_t its last hidden state after the final norm
    s_t = DecoderLayer(u_t)              without a norm before the attention; position t
    logits = target.lm_head(s_t)         predicts x_{t+2}; s_t is the f of the next step, there is no final norm

Letters: B rows of a batch, T tokens per row, H hidden size, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .head import Head, Predictions, bytes_of, cast_lm_head, key_bytes, next_tokens
from .layers import DecoderLayer, LayerConfig, Rotary, check_embedding, share_embedding
from .packed_attention import PackedAttention


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LayerConfig):
    """Shape of an EAGLE head. `hidden_size` and `vocab_size` are the target's."""

    fc_bias: bool = False


class Eagle(Head):
    """EAGLE head: predicts one step ahead from the target's last hidden state; unrolls on its own states to any depth.

    embed_tokens: the target's table, never trained; None if the head's file held none, until take_embedding.
    """

    uses_target_lm_head = True

    def __init__(self, config):
        super().__init__(config)
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size).requires_grad_(False)
        self.embedding_is_targets = False  # if True, files leave the embedding out
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layers = nn.ModuleList([DecoderLayer(config, size)])
        self.rotary = Rotary(config)

    @property
    def needs_embedding(self):
        return self.embed_tokens is None

    @property
    def num_checked_tokens(self):
        """A few: the head has no greatest depth."""
        return min(self.num_speculative_tokens, 3)

    def initialize_from_target(self, lm_head_weight, embedding):
        """Share the target's embedding [V, H]; the target's lm_head is used unchanged."""
        self.take_embedding(embedding)

    def take_embedding(self, weight):
        """Use the target's embedding table [V, H] itself, without a copy. ValueError if it is of another shape."""
        self.embed_tokens = share_embedding(weight, self.config.vocab_size, self.config.hidden_size)
        self.embedding_is_targets = True

    def forward(self, features, next_tokens, position_ids, document_ids):
        """One teacher-forced step over packed rows. Returns the states that target.lm_head turns into logits.

        features [B, T, H], next_tokens [B, T] at t + 1, position_ids [B, T] of t, document_ids [B, T] -> [B, T, H]
        """
        check_embedding(self.embed_tokens)
        pair = torch.cat((self.embed_tokens(next_tokens), features), -1)  # [B, T, 2 H]
        x = self.fc(pair.to(self.fc.weight.dtype))
        return self.layers[0](x, x, self.rotary(position_ids, x.dtype), PackedAttention(document_ids))

    def predict(self, features, input_ids, position_ids, document_ids, lm_head_weight=None, num_steps=None):
        """Step 0 reads the target's features, later steps the head's own states, as in drafting (and in HASS's training).

        Step i of the root at t reads x_{t+1+i} and the state of the step before, at position t + i. It attends to the text's
        pairs up to t, which hold the target's features, and to the root's own pairs of steps 1 to i. See Head.predict.
        """
        count, dtype = num_steps or self.num_speculative_tokens, self.fc.weight.dtype
        tokens, attention = next_tokens(input_ids, count), PackedAttention(document_ids)
        state, keys, states = features, [], []

        def run(i, state, *keys):
            now = attention.after(keys)
            pair = torch.cat((self.embed_tokens(tokens[..., i]), state), -1)  # [B, T, 2 H]
            x = self.fc(pair.to(dtype))
            state = self.layers[0](x, x, self.rotary(position_ids + i, x.dtype), now)
            return state, *now.keys[-2:]

        for i in range(count):
            state, *own = self.run_step(run, i, state, *keys)
            keys += own
            states.append(state.flatten(0, 1))
        weight = cast_lm_head(lm_head_weight, dtype)
        return Predictions(states, lambda rows, k: F.linear(rows.to(dtype), weight))

    def outputs_at(self, rows, features, tokens, position_ids, document_ids, lm_head_weight=None):
        """Run each step on the states of the step before, at all positions: see Head.outputs_at."""
        state, found = features, []
        for step in range(tokens.shape[-1]):
            state = self(state, tokens[..., step], position_ids + step, document_ids)
            chosen = state[0, rows]
            found.append(chosen if lm_head_weight is None else F.linear(chosen, lm_head_weight))
        return found

    def draft_bytes(self, lm_head_bytes):
        own = bytes_of(self.fc, self.layers)
        return {"first": lm_head_bytes, "level": own + lm_head_bytes, "advance": own}

    def draft_key_bytes(self, depth):
        return depth * key_bytes(self.config, self.fc.weight)  # the levels but the first, and the pass after the step
