"""Medusa heads (arXiv 2401.10774): K small heads that read the target's last hidden state and predict several tokens ahead.

Head k (0-based) reads x = the hidden state after the final norm at position t and predicts the token at t + 2 + k:

    ResBlock(x) = x + SiLU(W x + b)          W [H, H] and b [H] start at zero: every block starts as the identity
    logits_k    = lm_head_k(ResBlock_{k,R-1}(... ResBlock_{k,0}(x)))

`lm_head_k` belongs to the head (initialised from the target's) or is the target's own, shared by all heads. Each head has
blocks of its own; nothing is tied between heads.

Letters: H hidden size, V vocabulary, K heads, R residual blocks per head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .head import Head, Predictions, bytes_of, cast_lm_head


@dataclass(frozen=True)
class MedusaConfig:
    """Shape of a set of Medusa heads. `hidden_size` and `vocab_size` are the target's."""

    hidden_size: int
    vocab_size: int
    num_heads: int = 4  # K
    num_layers: int = 1  # R
    shared_lm_head: bool = False
    base_model_name_or_path: str = ""
    adapter: str = ""  # fingerprint of the target's adapter that they were trained with; "": none

    def __post_init__(self):
        for name, least in (("hidden_size", 1), ("vocab_size", 2), ("num_heads", 1), ("num_layers", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"MedusaConfig.{name} must be a whole number of at least {least}, got {value!r}")


class ResBlock(nn.Module):
    """x + SiLU(W x + b), the identity until it is trained.  [..., H] -> [..., H]"""

    def __init__(self, hidden_size):
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Module):
    """One head: R residual blocks and, unless the target's is shared, an lm_head [V, H] without bias."""

    def __init__(self, config):
        super().__init__()
        self.blocks = nn.ModuleList(ResBlock(config.hidden_size) for _ in range(config.num_layers))
        self.lm_head = None
        if not config.shared_lm_head:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class Medusa(Head):
    """K Medusa heads over the target's last hidden state. They do not look at each other's tokens."""

    autoregressive = False

    def __init__(self, config):
        super().__init__(config)
        self.heads = nn.ModuleList(MedusaHead(config) for _ in range(config.num_heads))

    @property
    def num_speculative_tokens(self):
        return self.config.num_heads

    @property
    def max_speculative_tokens(self):
        return self.config.num_heads

    @property
    def uses_target_lm_head(self):
        return self.config.shared_lm_head

    @property
    def adapter(self):
        return self.config.adapter

    def initialize_from_target(self, lm_head_weight, embedding=None):
        """Start every own lm_head as a copy of the target's [V, H]. A shared lm_head and the embedding need no start.

        Raises ValueError if the target has another hidden size or vocabulary than the config says.
        """
        expected = (self.config.vocab_size, self.config.hidden_size)
        if tuple(lm_head_weight.shape) != expected:
            raise ValueError(
                f"the target's lm_head is {tuple(lm_head_weight.shape)}, the head's config says "
                f"(vocab_size, hidden_size) = {expected}: build the head from this target's config"
            )
        with torch.no_grad():
            for head in self.heads:
                if head.lm_head is not None:
                    head.lm_head.weight.copy_(lm_head_weight)

    def hidden(self, features, depth):
        """The state that head `depth` hands to its lm_head.  [..., H] -> [..., H]"""
        for block in self.heads[depth].blocks:
            features = block(features)
        return features

    def logits(self, features, depth, lm_head_weight=None):
        """Prediction of head `depth`.  [..., H] -> [..., V]

        lm_head_weight: the target's lm_head [V, H]; needed where it is shared, ignored otherwise.
        """
        own = self.heads[depth].lm_head
        if own is None and lm_head_weight is None:
            raise ValueError("these heads share the target's lm_head: pass lm_head_weight=target.lm_head.weight")
        weight = lm_head_weight if own is None else own.weight
        return F.linear(self.hidden(features, depth), weight)

    def forward(self, features, lm_head_weight=None):
        """Predictions of all heads and their label offsets.  [..., H] -> (K tensors [..., V], K offsets)"""
        logits = [self.logits(features, k, lm_head_weight) for k in range(self.config.num_heads)]
        return logits, self.label_offsets

    def predict(self, features, input_ids, position_ids, document_ids, lm_head_weight=None, num_steps=None):
        """Every head reads only the feature, and no token: see Head.predict."""
        dtype = self.trained_dtype
        weight = cast_lm_head(lm_head_weight, dtype) if self.uses_target_lm_head else None
        states = [features.flatten(0, 1)] * (num_steps or self.num_speculative_tokens)
        return Predictions(states, lambda rows, k: self.logits(rows.to(dtype), k, weight))

    def outputs_at(self, rows, features, tokens, position_ids, document_ids, lm_head_weight=None):
        return self(features[0, rows], lm_head_weight)[0]

    def draft_bytes(self, lm_head_bytes):
        """All depths are drafted at once."""
        return {"first": bytes_of(self) + (lm_head_bytes if self.uses_target_lm_head else 0)}
