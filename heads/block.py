"""Block drafters: a small decoder that predicts all tokens of a block in one pass. DFlash (arXiv 2602.06036), DSpark, DFlash2.

    c_t = hidden_norm(fc([r_t of layer a ; r_t of layer b ; ...]))     r the residual streams entering the aux layers
    x   = [e(x_{t+1}) ; e(MASK) ; e(MASK) ; ...]                       a block of S slots at positions t + 1 to t + S
    every layer: a = x + o_proj(attention(input_layernorm(x)))         queries are the block's
                 x = a + mlp(post_attention_layernorm(a))
    h   = norm(x)                                                      slot i >= 1 predicts the token at its own place, x_{t+1+i}
    logits = target.lm_head(h)                                         corrected by the previous token, where the head does so

Some heads scale and cap: x = scale e(...), and logits = cap tanh(multiplier lm_head(h) / cap), before any correction and before a
selector finds its candidates. z-lab's code does so in the model's dtype (`DFlashDraftModel.compute_logits`), vLLM in fp32, as here
(`DFlash2Qwen3ForCausalLM.compute_candidates`); DeepSpec's Gemma 4 drafter caps before its edge. e is the table's row itself, not
scaled as the target may do (z-lab's `_raw_input_embeddings`).

The keys and values of a layer are those of the context c_0 .. c_t, then of the block: the same k_proj, v_proj, k_norm and rotation,
without input_layernorm for the context. A slot sees the whole context and its whole block; where is_causal, only the block's slots
up to itself. In sliding layers it sees the last of the context alone (Reach of packed_attention.py); projects differ in the rest:
of the block it sees all (z-lab's code before 2026-08), or the slots up to itself (z-lab's code since, SpecForge, speculators), and
the window counts from the slot (transformers, so z-lab, SpecForge and vLLM) or from the block (speculators). Queries and keys are
normed per head, as Qwen3's.

With sample_from_anchor slot i predicts the token after its own place instead, so all S slots predict, the first one x_{t+2}.
The embedding is the target's, frozen. So is lm_head, or the head has its own over a draft vocabulary, as EAGLE-3 (eagle3.py).
Slots do not see each other's drafted tokens: one distribution per depth. DSpark's edge or DFlash2's selector corrects it by the
token before, and DFlash2's convolutions run around attention and mlp: block_parts.py has these parts.

Letters: B rows of a batch, T tokens per row, R blocks per row, S slots of a block, H hidden size, A aux layers, M slots of any
blocks, V the target's vocabulary, VD the draft's, r rank of a correction.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.attention.rotary import rotary
from .block_parts import Confidence, Convolution, Edge, Selector
from .draft_vocabulary import DraftsOverVocabulary
from .head import Head, Predictions, bytes_of, cast_lm_head, key_bytes, next_tokens
from .layers import MLP, Attention, RMSNorm, Rotary, check_embedding, share_embedding
from .packed_attention import attend, blocks_mask


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
    """A decoder layer whose attention sees a context beside its own rows. attention_conv, mlp_conv: Convolution, or None."""

    def __init__(self, config):
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention_conv = Convolution(config) if config.conv_kernel_size else None
        self.mlp_conv = Convolution(config) if config.conv_kernel_size else None

    def forward(self, x, context, rotations, mask):
        """As BlockAttention, x not normed.  -> [B, R S, H]"""

        def attention(rows):
            return self.self_attn(rows, context, rotations, mask)

        x = x + _around(self.attention_conv, attention, self.input_layernorm(x))
        return x + _around(self.mlp_conv, self.mlp, self.post_attention_layernorm(x))


def _around(convolution, sublayer, x):
    """sublayer(x), with the Convolution if there is one."""
    return sublayer(x) if convolution is None else convolution.around(sublayer, x)


class BlockHead(DraftsOverVocabulary, Head):
    """Block drafter: predicts a block of tokens in one pass from several features of the target.

    features: the layers whose entering residual streams it reads, low to high. markov_head: its Edge, candidate_selector: its
    Selector, confidence_head: its Confidence, or None each.
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
        self.candidate_selector = Selector(config) if config.selector_rank else None
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
    def correction(self):
        """The part that corrects a slot's logits by the token before: an Edge, a Selector, or None."""
        return self.candidate_selector if self.markov_head is None else self.markov_head

    @property
    def autoregressive(self):
        """Only a correction looks at drafted tokens."""
        return self.correction is not None

    @property
    def max_candidates(self):
        return None if self.candidate_selector is None else self.candidate_selector.top_k

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
        x = self.embed_tokens(block.flatten(1)).to(context.dtype) * self.config.input_embedding_scale  # [B, R S, H]
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
        """The scores of the tokens that slots predict; minus infinity for tokens that a selector does not choose among.

        states [M, H] of `forward`; previous [M]: the token before the predicted one, which only a correction reads; lm_head_weight:
        the target's [V, H], in whose dtype they are computed, not read by a head with its own  ->  [M, VD]
        """
        logits = self.slot_logits(states, lm_head_weight)
        return logits if self.correction is None else self.correction(logits, states, self.correction.before(previous))

    def slot_logits(self, states, lm_head_weight):
        """As `logits`, by the slots' states alone."""
        return self._scores(states, lm_head_weight if self.lm_head is None else self.lm_head.weight)

    def _scores(self, states, weight):
        """As `slot_logits`, by the lm_head's weight that counts.  [M, H], [VD, H] -> [M, VD]"""
        return self.scaled(F.linear(states.to(weight.dtype), weight))

    def scaled(self, logits):
        """The head's logits by lm_head's products: see above. In fp32 or wider, if they are scaled at all.  [M, VD] -> [M, VD]

        No backward reads what comes out: losses overwrite it.
        """
        if not self.config.scales_logits:
            return logits
        cap = self.config.final_logit_softcapping
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * self.config.output_multiplier
        return torch.tanh(logits / cap) * cap if cap else logits

    def _whole_logits(self, states, previous, lm_head_weight):
        """As `logits`, but finite."""
        selector = self.candidate_selector
        if selector is None:
            return self.logits(states, previous, lm_head_weight)
        return selector.whole(self.slot_logits(states, lm_head_weight), states, selector.before(previous))

    def confidence_logits(self, states, previous):
        """Scores whose sigmoid is the probability that the target accepts a slot's token.  As `logits`  ->  [M]"""
        read = states.to(self.confidence_head.proj.weight.dtype)
        if self.config.confidence_sees_token:
            read = torch.cat((read, self.markov_head.markov_w1(previous).to(read.dtype)), -1)
        return self.confidence_head.proj(read)[:, 0]

    def predict(self, features, input_ids, position_ids, document_ids, lm_head_weight=None, num_steps=None, every=1):
        """Predictions of a block after every position: see Head.predict. A block per token: for short texts.

        Their states hold what a correction reads of the tokens before beside those of `forward`. every: after one of so many
        positions only; M counts those.
        """
        depths = range(num_steps or self.num_speculative_tokens)
        rows = torch.arange(0, input_ids.shape[1], every, device=input_ids.device).expand(len(input_ids), -1)
        tokens = next_tokens(input_ids, len(depths))[:, ::every].flatten(0, 1)  # [M, K]
        firsts = tokens[:, 0].view_as(rows)
        states = self(features, firsts, rows, position_ids, document_ids).flatten(0, 1)  # [M, S, H]
        first, size = self.config.first_slot, states.shape[-1]
        weight = cast_lm_head(lm_head_weight if self.lm_head is None else self.lm_head.weight, states.dtype)
        found = [states[:, first + k] for k in depths]
        if self.correction is not None:
            before = [self.correction.before(tokens[:, k]).to(states.dtype) for k in depths]
            found = [torch.cat(pair, -1) for pair in zip(found, before)]

        def corrected(by):
            return lambda rows, k: by(self._scores(rows[:, :size], weight), rows[:, :size], rows[:, size:])

        if self.correction is None:
            return Predictions(found, lambda rows, k: self._scores(rows, weight), self.draft_token_ids)
        whole = None if self.candidate_selector is None else corrected(self.candidate_selector.whole)
        return Predictions(found, corrected(self.correction), self.draft_token_ids, whole_logits=whole)

    def outputs_at(self, rows, features, tokens, position_ids, document_ids, lm_head_weight=None):
        states = self(features, tokens[:, rows, 0], rows[None], position_ids, document_ids)[0]  # [R, S, H]
        depths = range(tokens.shape[-1])
        found = [states[:, self.config.first_slot + k] for k in depths]
        if lm_head_weight is None and self.lm_head is None:
            return found
        return [self._whole_logits(found[k], tokens[0, rows, k], lm_head_weight) for k in depths]

    def draft_bytes(self, lm_head_bytes):
        """See Head.draft_bytes: one pass for all depths; after a step the context's keys and values. Each depth reads W2."""
        keys = [part for layer in self.layers for part in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
        edge = {} if self.markov_head is None else {"level": bytes_of(self.markov_head.markov_w2)}
        lm_head = lm_head_bytes if self.lm_head is None else bytes_of(self.lm_head)
        first = bytes_of(self.layers, self.norm) + lm_head + edge.get("level", 0)
        if self.candidate_selector is not None:
            first += bytes_of(self.candidate_selector.hidden_projection)
        return {"first": first, **edge, "advance": bytes_of(self.fc, *keys)}

    def draft_key_bytes(self, depth):
        """See Head.draft_key_bytes: one pass; layers with a window are left out."""
        layers = self.config.num_hidden_layers - len(self.config.sliding_layers)
        return layers * key_bytes(self.config, self.fc.weight)
