"""Block drafters: a small decoder that predicts all tokens of a block in one pass. DFlash (arXiv 2602.06036), with DSpark's edge.

    c_t = hidden_norm(fc([r_t of layer a ; r_t of layer b ; ...]))     r the residual streams entering the aux layers
    x   = [e(x_{t+1}) ; e(MASK) ; e(MASK) ; ...]                       a block of S slots at positions t + 1 to t + S
    every layer: a = x + o_proj(attention(input_layernorm(x)))         queries are the block's
                 x = a + mlp(post_attention_layernorm(a))
    h   = norm(x)                                                      slot i >= 1 predicts the token at its own place, x_{t+1+i}
    logits = target.lm_head(h) + W2 W1[previous token]                 the edge, where the head has one

The keys and values of a layer are those of the context c_0 .. c_t, then of the block: the same k_proj, v_proj, k_norm and rotation,
without input_layernorm for the context. A slot sees the whole context and its whole block; where is_causal, only the block's slots
up to itself. In sliding layers it sees the last of the context alone (Reach of packed_attention.py); projects differ in the rest:
of the block it sees all (z-lab's own code), or the slots up to itself (SpecForge, speculators), where the window counts from the
slot (transformers, so z-lab, SpecForge and vLLM) or from the block (speculators). Queries and keys are normed per head, as Qwen3's.

With sample_from_anchor slot i predicts the token after its own place instead, so all S slots predict, the first one x_{t+2}.
The embedding is the target's, frozen. So is lm_head, or the head has its own over a draft vocabulary, as EAGLE-3 (eagle3.py).
Slots do not see each other's drafted tokens: one distribution per depth. The edge (DSpark's "Markov head") corrects it by the token
before; W1 [V, r] and W2 [VD, r] are the paper's names, and W2 starts at zero. The confidence that the target accepts a slot's token
is sigmoid(proj [h ; W1[previous token]]).
Not here: gated and recurrent edges, selectors, convolutions.

Letters: B rows of a batch, T tokens per row, R blocks per row, S slots of a block, H hidden size, A aux layers, M slots of any
blocks, V the target's vocabulary, VD the draft's, r rank of the edge.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.attention.rotary import rotary
from .draft_vocabulary import DraftsOverVocabulary
from .head import Head, Predictions, bytes_of, cast_lm_head, next_tokens
from .layers import MLP, Attention, LayerConfig, RMSNorm, Rotary, check_embedding, share_embedding
from .packed_attention import Reach, attend, blocks_mask


@dataclass(frozen=True, kw_only=True)
class BlockConfig(LayerConfig):
    """Shape of a block drafter. `hidden_size` and `vocab_size` are the target's.

    draft_vocab_size: VD of its own lm_head; None: the target's lm_head is used.
    A block has num_speculative_tokens + 1 slots, with sample_from_anchor num_speculative_tokens. edge_rank: r, 0 for no edge;
    confidence: whether it predicts if its tokens are accepted, with confidence_sees_token by the token before too.
    aux_layer_ids: id k is the residual stream entering layer k (0-based) of the target; mask_token_id: the token in the slots to
    be predicted; is_causal: whether a slot sees only the block's slots up to itself; num_target_layers: None if the file says none.
    sliding_layers: numbers of the head's layers with a sliding_window, at least a block long; sliding_is_causal: is_causal of
    these; window_of_block: whether their window counts from the block's first slot.
    """

    num_hidden_layers: int
    mask_token_id: int
    aux_layer_ids: tuple[int, ...]
    is_causal: bool = False
    sliding_layers: tuple[int, ...] = ()
    sliding_window: int | None = None
    sliding_is_causal: bool = False
    window_of_block: bool = False
    num_target_layers: int | None = None
    draft_vocab_size: int | None = None
    sample_from_anchor: bool = False
    edge_rank: int = 0
    confidence: bool = False
    confidence_sees_token: bool = True

    may_be_zero = ("edge_rank",)

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
        self._check_sliding_layers()
        size = self.draft_vocab_size
        if size is not None and not (type(size) is int and 2 <= size <= self.vocab_size):
            raise ValueError(
                f"BlockConfig.draft_vocab_size must be None or from 2 to the vocab_size {self.vocab_size}, got {size!r}"
            )
        if not self.confidence and not self.confidence_sees_token:
            raise ValueError(
                "BlockConfig.confidence_sees_token false asks for confidence, which is false: leave it true"
            )
        if self.confidence and self.confidence_sees_token and not self.edge_rank:
            raise ValueError(
                "BlockConfig.confidence with confidence_sees_token reads the edge's table of tokens, and edge_rank is 0: give an "
                "edge_rank, or set confidence_sees_token to false"
            )

    def _check_sliding_layers(self):
        layers, window = self.sliding_layers, self.sliding_window
        if any(type(one) is not int or not 0 <= one < self.num_hidden_layers for one in layers) or sorted(
            {*layers}
        ) != [*layers]:
            raise ValueError(
                f"BlockConfig.sliding_layers must be ascending layers below {self.num_hidden_layers}, got {layers!r}"
            )
        if not layers and (window is not None or self.sliding_is_causal or self.window_of_block):
            raise ValueError(
                "BlockConfig.sliding_window, sliding_is_causal and window_of_block belong to sliding_layers"
            )
        if layers and not (type(window) is int and window >= self.block_size):
            raise ValueError(
                f"BlockConfig.sliding_window must be at least a block's {self.block_size} slots, got {window!r}"
            )
        if layers and self.is_causal and (not self.sliding_is_causal or self.window_of_block):
            raise ValueError(
                "BlockConfig.is_causal is of all layers: set sliding_is_causal, too, and no window_of_block"
            )

    @classmethod
    def for_target(cls, target_config, **changes):
        """As LayerConfig.for_target; mask_token_id and aux_layer_ids must be among the changes."""
        taken = {"num_hidden_layers": 1, "num_target_layers": target_config.get_text_config().num_hidden_layers}
        return super().for_target(target_config, **taken | changes)

    @property
    def num_scores(self):
        """VD: the tokens that the head has scores for."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def block_size(self):
        """S"""
        return self.num_speculative_tokens + self.first_slot

    @property
    def reaches(self):
        """What the slots see in each layer: Reaches."""
        sliding = Reach(self.sliding_is_causal, self.sliding_window, self.window_of_block)
        return [sliding if i in self.sliding_layers else Reach(self.is_causal) for i in range(self.num_hidden_layers)]

    @property
    def first_slot(self):
        """The slot that predicts the first drafted token; depth k is predicted by slot first_slot + k."""
        return 0 if self.sample_from_anchor else 1


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


class Edge(nn.Module):
    """DSpark's correction of a slot's logits by the token before: W2 W1[token]. It starts at zero: without effect."""

    def __init__(self, config):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.edge_rank)
        self.markov_w2 = nn.Linear(config.edge_rank, config.num_scores, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=config.edge_rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, rows):
        """rows of W1 [M, r]  ->  [M, VD]"""
        return self.markov_w2(rows)


class Confidence(nn.Module):
    """How sure the head is that the target accepts a slot's token."""

    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.edge_rank * config.confidence_sees_token, 1)


class BlockHead(DraftsOverVocabulary, Head):
    """Block drafter: predicts a block of tokens in one pass from several features of the target.

    features: the layers whose entering residual streams it reads, low to high. markov_head: its Edge, or None;
    confidence_head: None if it has none.
    embed_tokens: the target's table, or a file's own, never trained; None if the file held none, until take_embedding.
    lm_head: None where the target's is used; else rows of it, never trained. d2t int64 [VD], t2d bool [V]: None for the whole
    vocabulary; a new head has the first VD tokens until set_draft_vocabulary.
    """

    def __init__(self, config):
        super().__init__(config)
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size).requires_grad_(False)
        self.embedding_is_targets = True  # unless a file brings its own
        self.fc = nn.Linear(len(config.aux_layer_ids) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList([BlockLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.markov_head = Edge(config) if config.edge_rank else None
        self.confidence_head = Confidence(config) if config.confidence else None
        self.rotary = Rotary(config)
        count, own = config.num_scores, config.draft_vocab_size is not None
        self.lm_head = nn.Linear(size, count, bias=False).requires_grad_(False) if own else None
        whole = count == config.vocab_size
        self.register_buffer("d2t", None if whole else torch.zeros(count, dtype=torch.int64))
        self.register_buffer("t2d", None if whole else torch.arange(config.vocab_size) < count)

    @property
    def uses_target_lm_head(self):
        return self.lm_head is None

    @property
    def autoregressive(self):
        """Only an edge looks at drafted tokens."""
        return self.markov_head is not None

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

    @torch.no_grad()
    def initialize_from_target(self, lm_head_weight, embedding):
        """Share the target's embedding [V, H]; lm_head [V, H] is used unchanged, or the draft tokens' rows of it are copied."""
        self.take_embedding(embedding)
        if self.lm_head is not None:
            ids = self.draft_token_ids
            rows = lm_head_weight if ids is None else lm_head_weight[ids.to(lm_head_weight.device)]
            self.lm_head.weight.copy_(rows)

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

    @property
    def steps_in_a_pass(self):
        return len(self.layers)

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
        masks = {reach: self._mask(rows, document_ids, reach) for reach in {*self.config.reaches}}
        for layer, reach in zip(self.layers, self.config.reaches):
            x = self.run_step(layer, x, context, rotations, masks[reach])
        return self.norm(x).view(batch, count, size, -1)

    def _mask(self, rows, document_ids, reach):
        """Which keys every slot sees: see blocks_mask."""
        return blocks_mask(rows, document_ids, self.config.block_size, reach)

    def logits(self, states, previous, lm_head_weight):
        """The scores of the tokens that slots predict.

        states [M, H] of `forward`; previous [M]: the token before the predicted one, which only the edge reads; lm_head_weight:
        the target's [V, H], in whose dtype they are computed, not read by a head with its own  ->  [M, VD]
        """
        rows = None if self.markov_head is None else self.markov_head.markov_w1(previous)
        return self._logits(states, rows, lm_head_weight if self.lm_head is None else self.lm_head.weight)

    def _logits(self, states, rows, lm_head_weight):
        """As `logits`.  rows [M, r]: of W1 for the tokens before, None without an edge; lm_head_weight: the one to use"""
        logits = F.linear(states.to(lm_head_weight.dtype), lm_head_weight)
        return logits if rows is None else logits + self.markov_head(rows).to(logits.dtype)

    def confidence_logits(self, states, previous):
        """Scores whose sigmoid is the probability that the target accepts a slot's token.  As `logits`  ->  [M]"""
        read = states.to(self.confidence_head.proj.weight.dtype)
        if self.config.confidence_sees_token:
            read = torch.cat((read, self.markov_head.markov_w1(previous).to(read.dtype)), -1)
        return self.confidence_head.proj(read)[:, 0]

    def predict(self, features, input_ids, position_ids, document_ids, lm_head_weight=None, num_steps=None, every=1):
        """Predictions of a block after every position: see Head.predict. A block per token: for short texts.

        Their states hold the edge's rows of W1 beside those of `forward`. every: after one of so many positions only; M counts
        those.
        """
        depths = range(num_steps or self.num_speculative_tokens)
        rows = torch.arange(0, input_ids.shape[1], every, device=input_ids.device).expand(len(input_ids), -1)
        tokens = next_tokens(input_ids, len(depths))[:, ::every].flatten(0, 1)  # [M, K]
        firsts = tokens[:, 0].view_as(rows)
        states = self(features, firsts, rows, position_ids, document_ids).flatten(0, 1)  # [M, S, H]
        first, size, ids = self.config.first_slot, states.shape[-1], self.draft_token_ids
        weight = cast_lm_head(lm_head_weight if self.lm_head is None else self.lm_head.weight, states.dtype)
        found = [states[:, first + k] for k in depths]
        if self.markov_head is None:
            return Predictions(found, lambda rows, k: self._logits(rows, None, weight), ids)
        before = [self.markov_head.markov_w1(tokens[:, k]).to(states.dtype) for k in depths]
        joined = [torch.cat(pair, -1) for pair in zip(found, before)]
        return Predictions(joined, lambda rows, k: self._logits(rows[:, :size], rows[:, size:], weight), ids)

    def outputs_at(self, rows, features, tokens, position_ids, document_ids, lm_head_weight=None):
        states = self(features, tokens[:, rows, 0], rows[None], position_ids, document_ids)[0]  # [R, S, H]
        depths = range(tokens.shape[-1])
        found = [states[:, self.config.first_slot + k] for k in depths]
        if lm_head_weight is None and self.lm_head is None:
            return found
        return [self.logits(found[k], tokens[0, rows, k], lm_head_weight) for k in depths]

    def draft_bytes(self, lm_head_bytes):
        """See Head.draft_bytes: one pass for all depths; after a step the context's keys and values. Each depth reads W2."""
        keys = [part for layer in self.layers for part in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
        edge = {} if self.markov_head is None else {"level": bytes_of(self.markov_head.markov_w2)}
        lm_head = lm_head_bytes if self.lm_head is None else bytes_of(self.lm_head)
        first = bytes_of(self.layers, self.norm) + lm_head + edge.get("level", 0)
        return {"first": first, **edge, "advance": bytes_of(self.fc, *keys)}
