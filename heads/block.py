"""Block drafters, so far DFlash (arXiv 2602.06036): a small decoder that predicts all tokens of a block in one pass.

    c_t = hidden_norm(fc([r_t of layer a ; r_t of layer b ; ...]))     r the residual streams entering the aux layers
    x   = [e(x_{t+1}) ; e(MASK) ; e(MASK) ; ...]                       a block of S slots at positions t + 1 to t + S
    every layer: a = x + o_proj(attention(input_layernorm(x)))         queries are the block's
                 x = a + mlp(post_attention_layernorm(a))
    logits = target.lm_head(norm(x))                                   slot i >= 1 predicts the token at its own place, x_{t+1+i}

The keys and values of a layer are those of the context c_0 .. c_t, then of the block: the same k_proj, v_proj, k_norm and rotation,
without input_layernorm for the context. A slot sees the whole context and its whole block; where is_causal, only the block's slots
up to itself. Queries and keys are normed per head, as Qwen3's.

The embedding and lm_head are the target's, frozen. Slots do not see each other's drafted tokens: one distribution per depth.
Not here: edges between drafted tokens, confidence, selectors, convolutions, sliding windows.

Letters: B rows of a batch, T tokens per row, R blocks per row, S slots of a block, H hidden size, A aux layers.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.attention.rotary import rotary
from .head import Head, Predictions, bytes_of, cast_lm_head, next_tokens
from .layers import MLP, Attention, LayerConfig, RMSNorm, Rotary, check_embedding, share_embedding
from .packed_attention import attend, blocks_mask


@dataclass(frozen=True, kw_only=True)
class BlockConfig(LayerConfig):
    """Shape of a block drafter. `hidden_size` and `vocab_size` are the target's; a block has num_speculative_tokens + 1 slots.

    aux_layer_ids: id k is the residual stream entering layer k (0-based) of the target; mask_token_id: the token in the slots to
    be predicted; is_causal: whether a slot sees only the block's slots up to itself; num_target_layers: None if the file says none.
    """

    num_hidden_layers: int
    mask_token_id: int
    aux_layer_ids: tuple[int, ...]
    is_causal: bool = False
    num_target_layers: int | None = None

    def __post_init__(self):
        super().__post_init__()
        ids = self.aux_layer_ids
        if not ids or any(type(id) is not int or id < 0 for id in ids) or sorted({*ids}) != [*ids]:
            raise ValueError(f"BlockConfig.aux_layer_ids must be ascending layer numbers, got {ids!r}")
        if self.attention_bias:
            raise ValueError("BlockConfig.attention_bias must be false: block drafters have no biases")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"BlockConfig.mask_token_id must be below the vocab_size {self.vocab_size}, got {self.mask_token_id}"
            )

    @classmethod
    def for_target(cls, target_config, **changes):
        """As LayerConfig.for_target; mask_token_id and aux_layer_ids must be among the changes."""
        taken = {"num_hidden_layers": 1, "num_target_layers": target_config.get_text_config().num_hidden_layers}
        return super().for_target(target_config, **taken | changes)

    @property
    def block_size(self):
        """S"""
        return self.num_speculative_tokens + self.first_slot

    @property
    def first_slot(self):
        """The slot that predicts the first drafted token; depth k is predicted by slot first_slot + k."""
        return 1


class BlockAttention(Attention):
    """Attention of blocks over the context and themselves, with norms of queries and keys per head."""

    def __init__(self, config):
        super().__init__(config, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x, context, rotations, mask):
        """x [B, R S, H] normed, context [B, T, H], rotations: (cos, sin) of x and of the context, mask: of blocks_mask

        ->  [B, R S, H]
        """
        of_block, of_context = rotations
        q = self._turned(self.q_norm(self._heads(self.q_proj(x))), of_block)
        parts = ((context, of_context), (x, of_block))
        k = torch.cat([self._turned(self.k_norm(self._heads(self.k_proj(one))), angles) for one, angles in parts], 1)
        v = torch.cat([self._heads(self.v_proj(one)) for one, _ in parts], 1)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        out = attend(q, k, v, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x):
        return x.unflatten(-1, (-1, self.head_dim))  # [B, ., heads, D]

    def _turned(self, x, rotation):
        return rotary(x.flatten(0, 1), *rotation).view(x.shape)


class BlockLayer(nn.Module):
    """A decoder layer whose attention sees a context beside its own rows."""

    def __init__(self, config):
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, context, rotations, mask):
        """As BlockAttention, x not normed.  -> [B, R S, H]"""
        x = x + self.self_attn(self.input_layernorm(x), context, rotations, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockHead(Head):
    """Block drafter: predicts a block of tokens in one pass from several features of the target.

    features: the layers whose entering residual streams it reads, low to high.
    embed_tokens: the target's table, never trained; None if the head's file held none, until take_embedding.
    """

    autoregressive = False
    uses_target_lm_head = True

    def __init__(self, config):
        super().__init__(config)
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size).requires_grad_(False)
        self.fc = nn.Linear(len(config.aux_layer_ids) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList([BlockLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.rotary = Rotary(config)

    @property
    def features(self):
        return self.config.aux_layer_ids

    @property
    def feature_size(self):
        return self.fc.in_features

    @property
    def max_speculative_tokens(self):
        return self.num_speculative_tokens

    @property
    def needs_embedding(self):
        return self.embed_tokens is None

    def initialize_from_target(self, lm_head_weight, embedding):
        """Share the target's embedding [V, H]; the target's lm_head is used unchanged."""
        self.take_embedding(embedding)

    def take_embedding(self, weight):
        """Use the target's embedding table [V, H] itself, without a copy. ValueError if it is of another shape."""
        self.embed_tokens = share_embedding(weight, self.config.vocab_size, self.config.hidden_size)
        self.embedding_is_targets = True

    def mismatches(self, text_config):
        """As Head.mismatches, and aux layers that the target does not have."""
        depth, layers = text_config.num_hidden_layers, self.features
        wrong = super().mismatches(text_config)
        if (
            layers[-1] >= depth
        ):  # after the last layer transformers gives the normed state, the engine what is not normed
            wrong.append(f"aux layers {list(layers)}, the target has layers 0 to {depth - 1}")
        return wrong

    def context(self, features):
        """What the layers' context keys and values are projected from.  [..., A H] -> [..., H]"""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def forward(self, features, tokens, rows, position_ids, document_ids):
        """The normed states of blocks, each after a position of packed rows.

        Block r sees the features of its own document up to place rows[r], and itself. Its first slot holds tokens[r], which stands
        one position after that place.

        features [B, T, A H]; tokens and rows [B, R]; position_ids and document_ids [B, T]  ->  [B, R, S, H]
        """
        check_embedding(self.embed_tokens)
        size, (batch, count) = self.config.block_size, rows.shape
        context = self.context(features)
        block = torch.full((batch, count, size), self.config.mask_token_id, device=tokens.device)
        block[..., 0] = tokens
        x = self.embed_tokens(block.flatten(1)).to(context.dtype)  # [B, R S, H]
        places = position_ids.gather(1, rows)[..., None] + 1 + torch.arange(size, device=rows.device)
        rotations = tuple(self.rotary(one, x.dtype) for one in (places.flatten(1), position_ids))
        mask = self._mask(rows, document_ids)
        for layer in self.layers:
            x = layer(x, context, rotations, mask)
        return self.norm(x).view(batch, count, size, -1)

    def _mask(self, rows, document_ids):
        """Which keys every slot sees: see blocks_mask."""
        return blocks_mask(rows, document_ids, self.config.block_size, self.config.is_causal)

    def logits(self, states, previous, lm_head_weight):
        """The scores of the tokens that slots predict.

        states [M, H] of `forward`; previous [M]: the token before each predicted one; lm_head_weight: the target's [V, H], in whose
        dtype they are computed  ->  [M, V]
        """
        return F.linear(states.to(lm_head_weight.dtype), lm_head_weight)

    def predict(self, features, input_ids, position_ids, document_ids, lm_head_weight=None, num_steps=None, every=1):
        """Predictions of a block after every position: see Head.predict. A block per token: for short texts.

        every: after one of so many positions only; then M counts these.
        """
        rows = torch.arange(0, input_ids.shape[1], every, device=input_ids.device).expand(len(input_ids), -1)
        tokens = next_tokens(input_ids, 1)[..., 0].gather(1, rows)
        states = self(features, tokens, rows, position_ids, document_ids).flatten(0, 1)  # [M, S, H]
        weight = cast_lm_head(lm_head_weight, states.dtype)
        depths = range(num_steps or self.num_speculative_tokens)
        return Predictions([states[:, 1 + k] for k in depths], lambda rows, k: F.linear(rows.to(weight.dtype), weight))

    def outputs_at(self, rows, features, tokens, position_ids, document_ids, lm_head_weight=None):
        states = self(features, tokens[:, rows, 0], rows[None], position_ids, document_ids)[0]  # [R, S, H]
        found = [states[:, 1 + k] for k in range(tokens.shape[-1])]
        return found if lm_head_weight is None else [F.linear(state, lm_head_weight) for state in found]

    def draft_bytes(self, lm_head_bytes):
        """See Head.draft_bytes: one pass for all depths; after a step the context's keys and values."""
        keys = [part for layer in self.layers for part in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
        return {"first": bytes_of(self.layers, self.norm) + lm_head_bytes, "advance": bytes_of(self.fc, *keys)}
