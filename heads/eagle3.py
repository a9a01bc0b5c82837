"""EAGLE-3 heads (arXiv 2503.01840): one decoder layer over several of the target's layers, trained on its own states.

    g_t = fc([r_t of layer a ; r_t of layer b ; ...])      step 0, r the residual streams entering the aux layers; later g = state
    z_t = [input_layernorm(e(x_{t+1+i})) ; hidden_norm(g_t)]
    state_t = DecoderLayer(z_t), g_t its residual          hidden_norm(g_t) with norm_before_residual; position t + i
    logits = lm_head(norm(state_t))                        over the draft vocabulary; predicts x_{t+2+i}

Draft token i is the target's token i + d2t[i]; t2d says which tokens of the target can be drafted. Both are None where the draft
vocabulary is the whole one. The embedding is the target's, frozen; a head of another width trains its own embedding.

Letters: B rows of a batch, T tokens per row, S steps, H hidden size of the head, HT of the target, A aux layers, V the
target's vocabulary, VD the draft's.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import nn

from .draft_vocabulary import DraftsOverVocabulary
from .head import Head, Predictions, bytes_of, key_bytes, next_tokens
from .layers import (
    DecoderLayer,
    LayerConfig,
    RMSNorm,
    Rotary,
    check_embedding,
    intermediate_size_of,
    share_embedding,
)
from .packed_attention import PackedAttention

NUM_DEFAULT_LAYERS = 3
MOST_STEPS = 8
MLP_BLOCK = 64  # a narrower head's MLP width is a multiple of this, for matrix units and tensor parallelism


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerConfig):
    """Shape of an EAGLE-3 head.

    aux_layer_ids: id k is the residual stream entering layer k (0-based); the number of layers is the stream after the last layer.
    None: the layers that published heads read, which follow from the target's depth (`default_aux_layers`)."""

    target_hidden_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...] | None = None
    norm_before_residual: bool = False

    def __post_init__(self):
        super().__post_init__()
        ids = self.aux_layer_ids
        if ids is not None and not (
            isinstance(ids, tuple)
            and ids
            and all(type(id) is int and id >= 0 for id in ids)
            and sorted({*ids}) == [*ids]
        ):
            raise ValueError(f"Eagle3Config.aux_layer_ids must be ascending layer numbers, got {ids!r}")
        if not 2 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"Eagle3Config.draft_vocab_size must be from 2 to the vocab_size {self.vocab_size}, got {self.draft_vocab_size}"
            )

    @classmethod
    def for_target(cls, target_config, **changes):
        """As LayerConfig.for_target; by default with the whole vocabulary and the aux layers of published heads.

        A `hidden_size` below the target's makes the MLP narrower, too, and leaves fewer attention heads, of the same dimension.
        """
        text = target_config.get_text_config()
        taken = {"target_hidden_size": text.hidden_size, "draft_vocab_size": text.vocab_size}
        size = changes.get("hidden_size", text.hidden_size)
        if size != text.hidden_size:
            taken |= _narrower(text, size)
        if "aux_layer_ids" not in changes:
            taken["aux_layer_ids"] = default_aux_layers(text.num_hidden_layers)
        return super().for_target(target_config, **taken | changes)

    @property
    def num_aux_layers(self):
        return NUM_DEFAULT_LAYERS if self.aux_layer_ids is None else len(self.aux_layer_ids)

    @property
    def own_embedding(self):
        """Whether the head trains its own embedding, because its width differs from the target's."""
        return self.hidden_size != self.target_hidden_size


def _narrower(text, size):
    """The sizes of a layer narrower than those of a target with this text config; ValueError unless it holds whole heads."""
    heads, rest = divmod(text.num_attention_heads * size, text.hidden_size)
    if size > text.hidden_size or rest or not heads:
        least = text.hidden_size // math.gcd(text.hidden_size, text.num_attention_heads)
        raise ValueError(
            f"hidden_size {size}: a head is at most as wide as its target, here {text.hidden_size}, and holds whole attention "
            f"heads: take a multiple of {least}"
        )
    most = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    blocks = round(intermediate_size_of(text) * size / text.hidden_size / MLP_BLOCK)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": max(count for count in range(1, most + 1) if heads % count == 0),
        "intermediate_size": MLP_BLOCK * max(1, blocks),
    }


def default_aux_layers(num_layers):
    """The aux layers that published heads read of a target with `num_layers` layers; ValueError if it has too few."""
    if num_layers < 7:
        raise ValueError(
            f"a target of {num_layers} layers has no default aux layers (2, n//2, n-3): give aux_layer_ids"
        )
    return 2, num_layers // 2, num_layers - 3


class Eagle3Layer(DecoderLayer):
    """The decoder layer with two input norms: one for the embedding, one for the state."""

    def __init__(self, config):
        super().__init__(config, 2 * config.hidden_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def forward(self, embedded, state, rotation, attention):
        """embedded and state [B, T, H] -> [B, T, H]"""
        normed = self.hidden_norm(state)
        z = torch.cat((self.input_layernorm(embedded), normed), -1)
        return super().forward(z, normed if self.norm_before_residual else state, rotation, attention)


class Eagle3(DraftsOverVocabulary, Head):
    """EAGLE-3 head: several steps from several features of the target, each on the state of the step before.

    features: the layers whose entering residual streams it reads, low to high.
    embed_tokens: None until take_embedding, if the head's file held none.  d2t int64 [VD], t2d bool [V]: None for the whole
    vocabulary; a new head has the first VD tokens until set_draft_vocabulary.
    """

    def __init__(self, config):
        super().__init__(config)
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size).requires_grad_(config.own_embedding)
        self.embedding_is_targets = False  # if True, plain files leave the embedding out
        self.fc = nn.Linear(config.num_aux_layers * config.target_hidden_size, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        whole = config.draft_vocab_size == config.vocab_size
        self.register_buffer("d2t", None if whole else torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", None if whole else torch.arange(config.vocab_size) < config.draft_vocab_size)
        self.rotary = Rotary(config)

    @property
    def features(self):
        if self.config.aux_layer_ids is None:
            raise ValueError(
                "this head's file names no aux layers: call head.take_depth(the target's number of layers) first"
            )
        return self.config.aux_layer_ids

    @property
    def target_hidden_size(self):
        return self.config.target_hidden_size

    @property
    def feature_size(self):
        return self.fc.in_features

    @property
    def num_checked_tokens(self):
        """At most the steps that `forward` unrolls."""
        return min(self.num_speculative_tokens, MOST_STEPS)

    @property
    def needs_embedding(self):
        return self.embed_tokens is None

    def take_embedding(self, weight):
        """Use the target's embedding table [V, HT] itself, without a copy. ValueError if this head needs another one."""
        self.embed_tokens = share_embedding(weight, self.config.vocab_size, self.config.hidden_size)
        self.embedding_is_targets = True

    def take_depth(self, num_layers):
        """Read the default aux layers of a target with `num_layers` layers, if the head's file named none."""
        if self.config.aux_layer_ids is None:
            self.config = replace(self.config, aux_layer_ids=default_aux_layers(num_layers))

    def mismatches(self, text_config):
        """As Head.mismatches, and aux layers that the target does not have."""
        depth = text_config.num_hidden_layers
        layers = default_aux_layers(depth) if self.config.aux_layer_ids is None else self.features
        wrong = super().mismatches(text_config)
        if layers[-1] > depth:
            wrong.append(
                f"aux layers {list(layers)}, the target has layers 0 to {depth - 1} and {depth} for what comes after them"
            )
        return wrong

    @torch.no_grad()
    def initialize_from_target(self, lm_head_weight, embedding):
        """Start from the target's lm_head and its embedding, [V, HT] each.  ValueError if the shapes do not fit.

        A head of the target's width shares the embedding, and its lm_head starts as the draft tokens' rows. A narrower head starts
        with both tables in their principal directions: of all tables of its width these lose the least.
        """
        expected = (self.config.vocab_size, self.config.target_hidden_size)
        for name, table in (("lm_head", lm_head_weight), ("embedding", embedding)):
            if tuple(table.shape) != expected:
                raise ValueError(f"the target's {name} is {tuple(table.shape)}, this head can start from {expected}")
        if self.config.own_embedding:
            self.embed_tokens.weight.copy_(principal_directions(embedding, self.config.hidden_size))
            lm_head_weight = principal_directions(lm_head_weight, self.config.hidden_size)
        else:
            self.take_embedding(embedding)
        ids = self.draft_token_ids
        self.lm_head.weight.copy_(lm_head_weight if ids is None else lm_head_weight[ids.to(lm_head_weight.device)])

    def logits(self, state):
        """Prediction over the draft vocabulary.  [..., H] -> [..., VD]"""
        return self.lm_head(self.norm(state))

    def forward(self, features, tokens, position_ids, document_ids, num_steps):
        """The states of `num_steps` steps over packed rows, each step on the states of the previous step ("training-time test").

        At step i row t attends to the step-0 keys of rows <= t of its own document and to its own row's keys of steps 1 to i.

        features [B, T, A HT]; tokens [B, T, S >= num_steps] at t + 1, t + 2, ...; position_ids [B, T] of t; document_ids
        [B, T]  ->  num_steps tensors [B, T, H]
        """
        check_embedding(self.embed_tokens)
        if not 1 <= num_steps <= min(MOST_STEPS, tokens.shape[-1]):
            raise ValueError(
                f"num_steps must be from 1 to {MOST_STEPS} and at most the {tokens.shape[-1]} tokens given per row, got {num_steps}"
            )
        state = self.fc(features.to(self.fc.weight.dtype))
        attention, keys, states = PackedAttention(document_ids), [], []

        def run(step, state, *keys):
            now = attention.after(keys)
            embedded = self.embed_tokens(tokens[..., step]).to(state.dtype)
            state = self.midlayer(embedded, state, self.rotary(position_ids + step, state.dtype), now)
            return state, *now.keys[-2:]

        for step in range(num_steps):
            state, *own = self.run_step(run, step, state, *keys)
            keys += own
            states.append(state)
        return states

    def predict(self, features, input_ids, position_ids, document_ids, lm_head_weight=None, num_steps=None):
        """Predictions of the unrolled steps of `forward`: see Head.predict."""
        count = num_steps or self.num_speculative_tokens
        states = self(features, next_tokens(input_ids, count), position_ids, document_ids, count)
        return Predictions(
            [state.flatten(0, 1) for state in states],
            lambda rows, k: self.logits(rows),
            self.draft_token_ids,
            same_logits=True,
        )

    def outputs_at(self, rows, features, tokens, position_ids, document_ids, lm_head_weight=None):
        states = self(features, tokens, position_ids, document_ids, tokens.shape[-1])
        return [self.logits(state[0, rows]) for state in states]

    def draft_bytes(self, lm_head_bytes):
        """See Head.draft_bytes. Steps on the head's own states do not read fc, which only joins the target's streams."""
        layer, lm_head = bytes_of(self.midlayer), bytes_of(self.norm, self.lm_head)
        return {"first": lm_head, "level": layer + lm_head, "advance": bytes_of(self.fc) + layer}

    def draft_key_bytes(self, depth):
        return depth * key_bytes(self.config, self.fc.weight)  # the levels but the first, and the pass after the step


def principal_directions(table, size):
    """The rows of a table, projected on its `size` principal directions.  [V, HT] -> fp32 [V, size]"""
    table = table.float()
    return table @ torch.linalg.eigh(table.T @ table).eigenvectors[:, -size:]
