"""The pass of block drafters: one pass over the newest token and mask tokens gives the distributions of all depths.

The head's own keys and values at a committed place are projected from the target's feature there, and from nothing else. `fill`
and `advance` only project. A draft's pass writes the block's own keys and values after the committed places, L and on; the next
`advance` overwrites those of the tokens that were accepted, the next draft the others. The pass has the head's whole block however
deep the draft is, so that the distributions are those it was trained for.

To the attention a block is a tree of one path; how far its slots see (Reach of heads/packed_attention.py) is told by their depths.
A slot that sees the whole block counts as the deepest node. Its window counts from its own depth; where it is the block's, from the
first slot, and holds this slot beside the positions before it.

The head's formulas: heads/block.py; here it runs on the engine's kernels.

Letters: B requests, S slots of a block, K depths, M rows, F width of the target's feature, H hidden, V vocabulary, VD the draft's,
L committed length.
"""

from functools import partial

import torch

from ....heads.layers import rope_frequencies
from ....kernels.attention.attention_fold import AttentionOptions
from ....kernels.attention.rotary_kv_write import rotary_kv_write
from ....kernels.attention.tree_attention import build_tree_index
from ....kernels.block_convolution import block_convolution
from ....kernels.embedding import embed
from ....kernels.linear.linear import linear, linear_parts
from ....kernels.rms_norm import rms_norm
from ...models.blocks import Layer, Norm, Rotary, widened
from ...models.decoder import ForwardPass
from ...models.weights import weights_of_layer
from .drafter import Drafter
from .lm_heads import WholeLMHead


class BlockPass(Drafter):
    """A drafter's pass of a BlockHead, and its keys and values.

    head: the module, read in place, so updates of a head in training apply at once. Pages in the prefix cache would be stale then:
    switch it off. The weights of the head's products become views of packed ones. decoder: the target's Decoder;
    num_speculative_tokens: depth of drafts; sampling: a way of draft_sampling.py.
    """

    def __init__(self, head, decoder, num_speculative_tokens, sampling):
        super().__init__(sampling)
        self.head, self.decoder, self.num_speculative_tokens = head, decoder, num_speculative_tokens
        config, self.streams = head.config, head.features
        self.dtype, device = head.fc.weight.dtype, head.fc.weight.device
        self.kv_shape = config.num_hidden_layers, config.num_key_value_heads, config.head_dim, self.dtype
        self.take_draft_vocabulary(head.draft_token_ids, config.vocab_size)
        self.size, self.first_slot = config.block_size, config.first_slot  # S
        self.extra_places = max(0, self.size - 1 - num_speculative_tokens)
        positions = decoder.max_positions + self.size  # a block may be longer than any tree
        rotary = Rotary.from_frequencies(
            *rope_frequencies(config), num_positions=positions, dtype=self.dtype, device=device
        )
        shape = dict(num_heads=config.num_attention_heads, num_kv_heads=config.num_key_value_heads, rotary=rotary)
        self.reaches = config.reaches
        self.layers = [
            Layer.from_weights(
                weights_of_layer(
                    layer,
                    input_norm=layer.input_layernorm.weight.data,
                    q_norm=layer.self_attn.q_norm.weight.data,
                    k_norm=layer.self_attn.k_norm.weight.data,
                ),
                eps=config.rms_norm_eps,
                options=AttentionOptions(window=reach.window and reach.window + reach.of_block),
                **shape,
            )
            for layer, reach in zip(head.layers, self.reaches)
        ]
        self.norm = Norm(head.norm.weight.data, config.rms_norm_eps)
        self.lm_head = None if head.uses_target_lm_head else WholeLMHead(head.lm_head.weight)
        self.masks = torch.full((1, self.size - 1), config.mask_token_id, device=device)
        self.slots = torch.arange(self.size, device=device)
        self.whole_block, self.first_depths = torch.full_like(self.slots, self.size - 1), torch.zeros_like(self.slots)

    def place_lm_heads(self, lm_heads):
        if self.lm_head is not None:
            self.lm_head = lm_heads(self.head.lm_head.weight)

    def attach(self, kv):
        self.kv = kv

    def marginals(self, batch, num_depths):
        """The scores of the first depths by the pass alone, over the draft vocabulary.  batch: BatchRows  ->  logits [K, B, VD]"""
        self.kept = self.states(batch, num_depths)
        return self.head.scaled(self.products(self.kept))

    def states(self, batch, num_depths):
        """The normed states of the slots that predict the first depths.  batch: BatchRows  ->  [K, B, H]"""
        tokens = torch.cat((batch.root[:, None], self.masks.expand(len(batch.root), -1)), 1)  # [B, S]
        positions = batch.committed[:, None] + self.slots
        rows = tokens.flatten(), positions.flatten(), batch.places(0, self.size).flatten()
        passes = {reach: ForwardPass(*rows, self._index(batch, reach)) for reach in {*self.reaches}}
        residual, parts = embed(rows[0], self.head.embed_tokens.weight).to(self.dtype), None
        if self.head.config.input_embedding_scale != 1:
            residual = residual * self.head.config.input_embedding_scale
        for layer, own, reach, layer_kv in zip(self.layers, self.head.layers, self.reaches, self.kv):
            x, residual = layer.input_norm(residual, parts)
            attention = partial(layer.attention, forward_pass=passes[reach], layer_kv=layer_kv)
            parts = _around(own.attention_conv, attention, x)
            x, residual = layer.post_norm(residual, parts)
            parts = _around(own.mlp_conv, layer.mlp, x)
        state = self.norm(residual, parts)[0].view(*tokens.shape, -1)  # [B, S, H]
        return state[:, self.first_slot : self.first_slot + num_depths].transpose(0, 1)

    def products(self, states):
        """What lm_head gives, before the head scales it.  [K, B, H] -> [K, B, VD]"""
        rows = states.flatten(0, 1)
        if self.lm_head is None:
            logits = self.decoder.products(rows.to(self.decoder.dtype))
        else:
            logits = widened(self.lm_head.product(rows))
        return logits.view(*states.shape[:2], -1)

    def confidence(self, depths, rows=None):
        """How sure the head is that the first nodes of some depths are accepted, if those before them are.

        depths: a slice of K; rows [K, B, r]: of W1 for the tokens before, where the confidence sees them  ->  fp32 [K, B]
        """
        proj, read = self.head.confidence_head.proj, self.kept[depths]
        if self.head.config.confidence_sees_token:
            read = torch.cat((read, rows.to(read.dtype)), -1)
        return ((read.float() * proj.weight[0].float()).sum(-1) + proj.bias.float()).sigmoid()

    @property
    def is_sure(self):
        """Whether drafts have a confidence."""
        return self.tells_confidence and self.head.confidence_head is not None

    def _index(self, batch, reach):
        """The TreeIndex of layers whose slots see so far."""
        depths, counted = self.slots if reach.is_causal else self.whole_block, self.slots
        if reach.window is None:
            counted = depths
        elif reach.of_block:
            counted = self.first_depths
        path, is_chain = self.slots.expand(self.size, self.size), counted is depths and reach.is_causal
        shape = dict(dtype=self.dtype, is_chain=is_chain, window_depths=counted)
        return build_tree_index(batch.block_table, batch.committed, depths, path, self.kv_shape[1], **shape)

    def advance(self, batch, feature, emitted, num_accepted):
        length = feature.shape[1]
        # Rows after the newest token's lie after the committed ones: a draft overwrites them before they are read.
        positions = batch.committed[:, None] + torch.arange(length, device=feature.device)
        self._project(feature.flatten(0, 1), positions.flatten(), batch.places(0, length).flatten())

    def prompt_rows(self, chunk):
        return chunk.count, chunk.request.known_token_ids[chunk.start : chunk.start + chunk.count]

    def fill(self, forward_pass, feature):
        self._project(feature, forward_pass.positions, forward_pass.cache_rows)

    def _project(self, feature, positions, cache_rows):
        """Write the keys and values of the context.  feature [M, F], positions and cache_rows [M]"""
        head, shared = self.head, {}
        context = linear(feature.to(self.dtype), head.fc.weight)
        context = rms_norm(context, head.hidden_norm.weight, head.hidden_norm.eps)
        for layer, layer_kv in zip(self.layers, self.kv):
            attention = layer.attention
            num_queries = attention.num_heads * self.kv_shape[2]
            rotary_kv_write(
                linear_parts(context, attention.qkv.weight[num_queries:]),
                positions=positions,
                cos=attention.rotary.cos,
                sin=attention.rotary.sin,
                cache_rows=cache_rows,
                layer_kv=layer_kv,
                num_heads=0,
                num_kv_heads=attention.num_kv_heads,
                k_norm=attention.k_norm,
                eps=attention.eps,
                shared=shared,
            )


def _around(convolution, sublayer, x):
    """A sublayer between the head's convolutions (heads/block_parts.py), if it has them.  x [M, H], sublayer: to parts [., M, H]"""
    if convolution is None:
        return sublayer(x)
    (before, after), size = convolution.base_kernel, convolution.block_size
    ingoing, outgoing = convolution.corrections(linear(x, convolution.kernel_projection.weight))
    x = block_convolution(x, before, ingoing, size)
    return block_convolution(sublayer(x), after, outgoing, size)[None]
