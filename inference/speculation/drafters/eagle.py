"""Drafting with EAGLE heads: one decoder layer that starts from the target's features and goes on from its own states.

The pair (e(x_{t+1}), feature_t) has place and position t in the head's own cache, so the content of a page depends on the token
after it. The head's formulas: heads/eagle.py; here it runs on the engine's kernels. EAGLE-3: eagle3.py.

Letters: M rows, H hidden size of the head, F width of the target's feature, V the target's vocabulary.
"""

from dataclasses import replace

import torch

from ....heads.layers import rope_frequencies
from ....kernels.embedding import embed
from ....kernels.linear.linear import linear
from ...models.blocks import Layer, Norm, Rotary, scaled_logits
from ...models.decoder import row_counts
from ...models.weights import weights_of_layer
from .drafter import free_weights
from .lm_heads import WholeLMHead
from .own_cache import OwnCacheDrafter


class EagleDrafter(OwnCacheDrafter):
    """Drafts with an Eagle head, chain or tree.

    head: the module, read in place, so updates of a head in training apply at once (not to what is quantised). Pages in the prefix
    cache would be stale then: switch it off. The weights of the head's products become views of packed ones. decoder: the target's
    Decoder; num_speculative_tokens: depth of drafts; sampling: a way of draft_sampling.py.
    """

    lookahead = 1
    can_quantise = True
    lm_head = None  # one of lm_heads.py; None: the target's

    def __init__(self, head, decoder, num_speculative_tokens, sampling="shared_noise"):
        super().__init__(sampling)
        self.head, self.decoder, self.num_speculative_tokens = head, decoder, num_speculative_tokens
        config, layer = head.config, self._layer_of(head)
        self.dtype, device = head.fc.weight.dtype, head.fc.weight.device
        self.kv_shape = 1, config.num_key_value_heads, config.head_dim, self.dtype
        self.state_shape = config.hidden_size, self.dtype
        self.layer = Layer.from_weights(
            weights_of_layer(layer),
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            rotary=Rotary.from_frequencies(
                *rope_frequencies(config), num_positions=decoder.max_positions, dtype=self.dtype, device=device
            ),
            eps=config.rms_norm_eps,
        )
        self.last_norm = self._last_norm(head)

    def quantise(self, release):
        """Round the out product, the MLP and the lm_head. Prompts read the other products, too: these stay."""
        layer, lm_head = self.layer, self._whole_lm_head()
        out, mlp = layer.attention.out.in_8_bits(), layer.mlp.in_8_bits()
        self.layer = replace(layer, attention=replace(layer.attention, out=out), mlp=mlp)
        saved, scored = layer.attention.out.nbytes + layer.mlp.nbytes - out.nbytes - mlp.nbytes, 0
        if lm_head is not None:
            self.lm_head = lm_head.in_8_bits()
            scored = lm_head.weight.nbytes - self.lm_head.weight.nbytes
        self.saved_bytes = {"first": scored, "level": saved + scored, "advance": saved}
        if release:
            module = self._layer_of(self.head)
            free_weights([module.self_attn.o_proj, module.mlp.gate_proj, module.mlp.up_proj, module.mlp.down_proj])

    def _whole_lm_head(self):
        """The lm_head to round: a copy of the target's, where it is a plain product of this rank, in the head's dtype."""
        decoder = self.decoder
        fits = decoder.is_packed and decoder.is_whole and decoder.dtype == self.dtype
        return WholeLMHead(decoder.lm_head) if fits else None

    def _layer_of(self, head):
        return head.layers[0]

    def _last_norm(self, head):
        """The norm after the layer: of ones, for EAGLE reads the sum alone."""
        ones = torch.ones(head.config.hidden_size, dtype=self.dtype, device=head.fc.weight.device)
        return Norm(ones, head.config.rms_norm_eps)

    def embedded(self, tokens):
        """[M] -> [M, H]"""
        return embed(tokens, self.head.embed_tokens.weight).to(self.dtype)

    def run(self, forward_pass, source, from_target):
        _, state = self.finish(*self.entering(forward_pass.tokens, source, from_target), forward_pass)
        return state, state

    def entering(self, tokens, source, from_target):
        """What enters the layer.  tokens [M], source: see `run`  ->  [M, .] what q, k and v read, residual [M, H]"""
        pair = torch.cat((self.embedded(tokens), source.to(self.dtype)), 1)  # [M, 2 H]
        x = linear(pair, self.head.fc.weight, self.head.fc.bias)
        return x, x

    def finish(self, x, residual, forward_pass, rows=slice(None)):
        """The layer.  x [M, .] what q, k and v read, residual [M, H]  ->  normed, state [M, H], of some rows if they are given"""
        heads = self.layer.attention.heads(x, forward_pass, self.kv[0])
        parts, residual = self.layer.after_heads(heads[rows], residual[rows])
        return self.last_norm(residual, parts)

    def newest(self, forward_pass, source, rows):
        # Of the emitted tokens only the newest one's state is read: the others need keys and values.
        return self.finish(*self.entering(forward_pass.tokens, source, True), forward_pass, rows)[1]

    def fill(self, forward_pass, feature):
        # Of a prompt only keys and values are read again, and these are the only layer's: they need no query and no MLP.
        x, _ = self.entering(forward_pass.tokens, feature, from_target=True)
        self.layer.attention.write_keys(x, forward_pass, self.kv[0])

    def run_dummy(self, forward_pass, feature):
        self.run(forward_pass, feature, from_target=True)
        self.fill(forward_pass, feature)

    def row_counts(self, most):
        attention = self.layer.attention
        keys = attention.features_of_keys(self.kv_shape[2])
        return row_counts([(*keys.shape, keys.splits)], most, self.head.fc.weight.device)

    def logits(self, normed):
        normed = normed.to(self.decoder.dtype)
        if self.lm_head is None:
            return self.decoder.logits(normed)
        return scaled_logits(self.lm_head.product(normed), self.decoder.logits_divisor)

    def prompt_rows(self, chunk):
        # The last row reads the token that is drawn next: `advance` computes it.
        count, first = chunk.count - chunk.is_last, chunk.start + 1
        return count, chunk.request.known_token_ids[first : first + count]


DRAFTER = EagleDrafter
